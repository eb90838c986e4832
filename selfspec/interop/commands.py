"""The commands that serve an exported head."""

import json
import shlex

# The length of the chains they draft. Neither vLLM nor SGLang verifies trees by default.
NUM_DRAFT_TOKENS = 3

# vLLM's name of each method, and SGLang's.
SGLANG_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE"}


def serve_command(engine: str, method: str, target: str, directory: str, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> str:
    """The command that serves a draft with this target. It tells vLLM the method, which vLLM would guess from the path."""
    if engine == "speculators":
        # The exported config already names the target.
        return f"vllm serve {shlex.quote(directory)}"
    if engine == "sglang":
        settings: dict[str, object] = {
            "model-path": target,
            "speculative-algorithm": SGLANG_ALGORITHMS[method],
            "speculative-draft-model-path": directory,
            "speculative-num-steps": num_draft_tokens,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": num_draft_tokens + 1,
        }
        options = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in settings.items())
        return f"python -m sglang.launch_server {options}"
    speculative = {"method": method, "model": directory, "num_speculative_tokens": num_draft_tokens}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"
