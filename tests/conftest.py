"""Shared by all tests: no network, quiet threads, and a tiny random target with a real tokenizer on disk."""

import os

# Before torch is imported: spinning threads are many times slower where cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if not torch.cuda.is_available():
    # Read when triton is imported, which transformers does: its interpreter runs the kernels' logic on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from support import MadeOnce
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER_TEXT = "the cat sat on the mat and the dog sat on the cat; one two three four five six seven"


class SkippedTests:
    """Writes down which tests, files and folders were skipped, one node id a line; see `.ci/run`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.node_ids: dict[str, None] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.node_ids[report.nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and "gpu" not in report.keywords:
            self.node_ids[report.nodeid.partition("[")[0]] = None

    def pytest_sessionfinish(self) -> None:
        self.file.write_text("".join(f"{node_id}\n" for node_id in self.node_ids))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-skipped", type=Path, metavar="FILE", help="write what was skipped to FILE, GPU tests left out")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("write_skipped")
    # Workers report to the process that started them.
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkippedTests(file))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Fills a folder the first time that any process of this run asks for it; the others wait until it is complete."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def make(name: str, build: Callable[[Path], None]) -> Path:
        directory = base / name
        with FileLock(base / f"{name}.lock"):
            if not directory.exists():
                incomplete = tmp_path_factory.mktemp(name)
                build(incomplete)
                incomplete.rename(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: every text is encodable, tokens of several characters, characters of several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TOKENIZER_TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A random float32 Llama of two layers with grouped heads and a context of 4096 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
        # Wide enough that greedy decoding does not repeat one token for ever.
        initializer_range=0.5,
    )
    directory = tmp_path_factory.mktemp("tiny-target")
    LlamaForCausalLM(config).save_pretrained(directory)
    tiny_tokenizer.save_pretrained(directory)
    return directory
