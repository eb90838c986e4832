"""The answers of Anthropic's Messages API: whole, and as its events."""

from __future__ import annotations

import json
from collections.abc import Iterator

from selfspec.serve.answers import JSON
from selfspec.serve.blocks import CALL, Block, BlockAnswer
from selfspec.serve.errors import ApiError
from selfspec.serve.messages import MessagesRequest
from selfspec.serve.parts import REASONING
from selfspec.serve.usage import speculation


class MessagesAnswer(BlockAnswer):
    """A message of the assistant, with a block of content for each block of the answer."""

    NAMES = MessagesRequest.NAMES

    def begin(self) -> bytes:
        # The ping tells proxies at once that the connection is alive.
        return self.line({"type": "message_start", "message": self.record()}) + self.line({"type": "ping"})

    def end(self) -> bytes:
        record = self.record()
        delta = {name: record[name] for name in ("stop_reason", "stop_sequence")}
        ended = {"type": "message_delta", "delta": delta, "usage": record["usage"]}
        return self.line(ended) + self.line({"type": "message_stop"})

    def fail(self, error: ApiError) -> bytes:
        return self.line(error.renamed(self.NAMES).messages_body())

    def record(self) -> JSON:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [self._content(block, block.text) for block in self.blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self.completion and self.completion.stop_string,
            "usage": self._usage(),
        }

    def opened(self, block: Block) -> Iterator[JSON]:
        yield {"type": "content_block_start", "index": block.index, "content_block": self._content(block, "")}

    def extended(self, block: Block, text: str) -> Iterator[JSON]:
        delta = {"type": "text_delta", "text": text}
        if block.kind == CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind == REASONING:
            delta = {"type": "thinking_delta", "thinking": text}
        yield {"type": "content_block_delta", "index": block.index, "delta": delta}

    def closed(self, block: Block) -> Iterator[JSON]:
        yield {"type": "content_block_stop", "index": block.index}

    def _content(self, block: Block, text: str) -> JSON:
        if block.record is not None:
            name = block.record["function"]["name"]
            return {"type": "tool_use", "id": block.record["id"], "name": name, "input": json.loads(text or "{}")}
        if block.kind == REASONING:
            # Nobody signs it, because it comes back as the model's own text.
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text}

    @property
    def _stop_reason(self) -> str | None:
        completion = self.completion
        if completion is None:
            return None
        if completion.finish_reason == "length":
            most = self._requests[0].sampling.max_new_tokens
            return "max_tokens" if len(completion.token_ids) >= most else "model_context_window_exceeded"
        if completion.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self.has_calls else "end_turn"

    def _usage(self) -> JSON:
        """Anthropic counts what was in the cache apart from the rest of the prompt."""
        completion = self.completion
        num_prompt = len(self._requests[0].prompt_ids)
        num_reused = completion.num_reused_tokens if completion else 0
        counts = {
            "input_tokens": num_prompt - num_reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_reused,
            "output_tokens": len(completion.token_ids) if completion else 0,
        }
        return {**counts, "speculation": speculation([completion], self.drafter)} if completion else counts
