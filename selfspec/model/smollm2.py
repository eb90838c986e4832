"""Make the default target, SmolLM2-135M-Instruct: from one quantised GGUF file to an ordinary Hugging Face directory.

Shapes, weights, vocabulary, merges and chat template are all read from the GGUF file.

Invariant: the weights are the same on every machine, bit for bit.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from selfspec.files import save_file

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

# Names of tensors outside the layers, and of those of layer N after "blk.N." and "model.layers.N.".
MODEL_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_file: Path, directory: Path) -> None:
    """Write config, bf16 weights and tokenizer of the model in `gguf_file` to `directory`, which must exist."""
    reader = gguf.GGUFReader(gguf_file)
    config = build_config(reader)
    config.save_pretrained(directory)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(directory)
    save_file(build_weights(reader, config), directory / "model.safetensors")
    build_tokenizer(reader).save_pretrained(directory)
    # The saved class name differs between transformers versions; this one is known to all of them.
    settings_file = directory / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings_file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def check(directory: Path) -> None:
    """Load and try what `convert` wrote.

    Raises:
        ValueError: the tokenizer or the model does not work as it should.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "Total:   12.50 for 3 items\n\tx = 1234  # café 日本\n"
    token_ids = tokenizer(text).input_ids
    if tokenizer.decode(token_ids) != text or "12" in tokenizer.convert_ids_to_tokens(token_ids):
        raise ValueError("the converted tokenizer changes a text, or does not split its digits")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output_ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output_ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if "Paris" not in answer:
        raise ValueError(f"asked for the capital of France, the converted model answers {answer!r}")


def build_config(reader: gguf.GGUFReader) -> LlamaConfig:
    """The model's configuration in transformers' names."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.rope.dimension_count"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def build_weights(reader: gguf.GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Every weight by its name, dequantised and rounded once to bf16. The output layer is tied, so it has no entry."""
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        prefix, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name in num_heads:
            values = _split_rotary_halves(values, num_heads[name])
        if prefix:
            name = f"model.layers.{prefix.removeprefix('blk.')}.{LAYER_WEIGHTS[name]}"
        else:
            name = MODEL_WEIGHTS[name]
        weights[f"{name}.weight"] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return weights


def build_tokenizer(reader: gguf.GGUFReader) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer. It splits digits, as the GGUF's pre-tokenizer "smollm" does, and adds no BOS."""
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    token_types = _field(reader, "tokenizer.ggml.token_type")
    control_tokens = [token for token, kind in zip(tokens, token_types, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])

    def token_named(key: str) -> str:
        return tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        bos_token=token_named("bos"),
        eos_token=token_named("eos"),
        unk_token=token_named("unknown"),
        pad_token=token_named("padding"),
    )
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    return tokenizer


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no field {key!r}")
    return field.contents()


def _split_rotary_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of rows [out, in], which interleaves the two halves of each head's rotary pairs."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
