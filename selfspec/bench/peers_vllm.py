"""vLLM, driven beside this project's engine: in this process, step by step, without its server and its prefix cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from selfspec.bench.peers import News, Settings

# The smallest share of a card that holds an 8B model in 16 bits and the cache of 128 short requests.
MEMORY_SHARE = 0.6
NEEDED = "vLLM is not installed here: run this mode where it is (pip install vllm, in an environment of its own)"


class VllmPeer:
    """A `vllm.LLM`. It is opened once, because that takes a minute or more, and serves every part.

    Args:
        directory: of the target.
        head: folder of an EAGLE-3 head as vLLM reads it; None for plain decoding.
        num_draft_tokens: the length of its chains.

    Raises:
        ValueError: vLLM is not there.
    """

    takes_all = False

    def __init__(
        self, directory: Path, *, head: Path | None, num_draft_tokens: int, places: int, longest: int, dtype: str
    ) -> None:
        # The engine's steps are taken in this process, and nothing is sent or fetched.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import torch
            import vllm
        except ImportError as error:
            raise ValueError(f"{NEEDED}: {error}" if error.name != "vllm" else NEEDED) from error
        speculation = None
        if head is not None:
            speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_draft_tokens}
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            str(directory),
            dtype=dtype,
            speculative_config=speculation,
            max_model_len=longest,
            max_num_seqs=places,
            gpu_memory_utilization=MEMORY_SHARE,
            enable_prefix_caching=False,
            disable_log_stats=False,
        )
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.environment = {"vllm": vllm.__version__, "torch": torch.__version__, "device": device, "dtype": dtype}
        self.num_requests = 0
        # Its name of a request -> the number, and how many tokens have been told.
        self._open: dict[str, tuple[int, int]] = {}

    def submit(self, number: int, prompt_ids: list[int], settings: Settings) -> None:
        name = str(self.num_requests)
        self.num_requests += 1
        self._open[name] = (number, 0)
        params = self._params(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=number if settings.temperature else None,
            ignore_eos=settings.ignore_eos,
        )
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt_ids}, params)

    def news(self) -> list[News]:
        out: list[News] = []
        while not out:
            for output in self._llm.llm_engine.step():
                if output.request_id not in self._open:
                    continue
                number, num_told = self._open[output.request_id]
                # An output has all tokens of its answer so far.
                token_ids = list(output.outputs[0].token_ids)
                out.append(News(number, token_ids[num_told:], output.finished))
                self._open[output.request_id] = (number, len(token_ids))
                if output.finished:
                    del self._open[output.request_id]
        return out

    def counts(self) -> tuple[float, float]:
        values: dict[str, Any] = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        num_drafts = values.get("vllm:spec_decode_num_drafts", 0)
        return num_drafts + values.get("vllm:spec_decode_num_accepted_tokens", 0), num_drafts

    def close(self) -> None:
        """It stays open for the next part, and ends with the process."""
