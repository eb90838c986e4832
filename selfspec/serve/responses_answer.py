"""The answers of OpenAI's Responses API: whole, and as its events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from selfspec.serve.answers import JSON
from selfspec.serve.blocks import CALL, Block, BlockAnswer
from selfspec.serve.errors import ApiError
from selfspec.serve.parts import REASONING
from selfspec.serve.responses import ResponsesRequest
from selfspec.serve.usage import speculation

# For the two kinds of text: how the item is called, its part, and the part's events.
ITEMS = {True: ("rs", "reasoning_text"), False: ("msg", "output_text")}


class ResponsesAnswer(BlockAnswer):
    """A response, whose output has an item for each block.

    Args:
        asked: the request, much of which a response repeats.
    """

    NAMES = ResponsesRequest.NAMES

    def __init__(self, *args: Any, asked: ResponsesRequest, **named: Any) -> None:
        super().__init__(*args, **named)
        self._asked = asked
        self._number = 0

    def begin(self) -> bytes:
        return b"".join(self._lifecycle(name) for name in ("created", "in_progress"))

    def end(self) -> bytes:
        return self._lifecycle(self._status)

    def fail(self, error: ApiError) -> bytes:
        error = error.renamed(self.NAMES)
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = {"code": code, "message": error.message, "type": error.kind, "param": error.param}
        return self._lifecycle("failed", status="failed", error=failed)

    def line(self, content: JSON) -> bytes:
        content["sequence_number"] = self._number
        self._number += 1
        return super().line(content)

    def record(self) -> JSON:
        asked, status = self._asked, self._status
        is_cut = status == "incomplete"
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.model,
            "output": [self._item(block) for block in self.blocks],
            "usage": self._usage(),
            "instructions": asked.instructions,
            "tools": asked.tools or [],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "max_output_tokens": asked.max_output_tokens,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "metadata": asked.metadata or {},
            "user": asked.user,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
        }

    def opened(self, block: Block) -> Iterator[JSON]:
        yield self._event("output_item.added", block, item=self._item(block, status="in_progress"))
        if block.kind != CALL:
            yield self._event("content_part.added", block, part=self._part(block))

    def extended(self, block: Block, text: str) -> Iterator[JSON]:
        if block.kind == CALL:
            yield self._event("function_call_arguments.delta", block, delta=text)
        else:
            yield self._event(f"{self._part_kind(block)}.delta", block, delta=text, **self._no_logprobs(block))

    def closed(self, block: Block) -> Iterator[JSON]:
        if block.kind == CALL:
            yield self._event("function_call_arguments.done", block, arguments=block.text)
        else:
            yield self._event(f"{self._part_kind(block)}.done", block, text=block.text, **self._no_logprobs(block))
            yield self._event("content_part.done", block, part=self._part(block))
        yield self._event("output_item.done", block, item=self._item(block))

    @property
    def _status(self) -> str:
        if self.completion is None:
            return "in_progress"
        return "incomplete" if self.completion.finish_reason == "length" else "completed"

    def _lifecycle(self, name: str, **changes: Any) -> bytes:
        return self.line({"type": f"response.{name}", "response": {**self.record(), **changes}})

    def _event(self, name: str, block: Block, **more: Any) -> JSON:
        is_of_item = name.startswith("output_item")
        place = {"output_index": block.index} | ({} if is_of_item else {"item_id": self._item_id(block)})
        if not is_of_item and block.kind != CALL:
            place["content_index"] = 0
        return {"type": f"response.{name}", **place, **more}

    def _item_id(self, block: Block) -> str:
        prefix = "fc" if block.kind == CALL else ITEMS[block.kind == REASONING][0]
        return f"{prefix}_{self.answer_id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, *, status: str | None = None) -> JSON:
        """A block as an item of the output; one that has just been opened has no content yet."""
        head = {"id": self._item_id(block), "status": status or ("incomplete" if block.is_cut else "completed")}
        if block.record is not None:
            call = {"call_id": block.record["id"], "name": block.record["function"]["name"], "arguments": block.text}
            return {**head, "type": "function_call", **call}
        content = [] if status else [self._part(block)]
        if block.kind == REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _part_kind(self, block: Block) -> str:
        return ITEMS[block.kind == REASONING][1]

    def _part(self, block: Block) -> JSON:
        part = {"type": self._part_kind(block), "text": block.text}
        return part if block.kind == REASONING else {**part, "annotations": [], "logprobs": []}

    def _no_logprobs(self, block: Block) -> JSON:
        return {} if block.kind == REASONING else {"logprobs": []}

    def _usage(self) -> JSON | None:
        completion = self.completion
        if completion is None:
            return None
        num_prompt, num_answer = completion.num_prompt_tokens, len(completion.token_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": completion.num_reused_tokens, "cache_write_tokens": 0},
            "output_tokens": num_answer,
            # Tokens are not counted by the blocks that they make.
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_answer,
            "speculation": speculation([completion], self.drafter),
        }
