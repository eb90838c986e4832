"""The engine for asyncio: answers as they come, cancelled when nobody reads on, and no task that waits in vain."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support import random_prompts, tiny_model, tiny_target
from transformers import PreTrainedTokenizerFast

from selfspec import AsyncEngine, Completion, SamplingParams, StreamEvent, Target, generate, stream
from selfspec.engine import EngineClosed, EngineFull
from selfspec.engine.asynchronous import CLOSED
from selfspec.loop.batch import Batch
from selfspec.loop.drafter import Drafter, Proposal
from selfspec.tree import chain

PROMPTS = [[5, 6, 7, 8] * 4, [9, 10, 11], [20, 21] * 5]
LENGTH: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
# Longer than any test waits for.
ENDLESS: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    return Target(tiny_model("llama", vocab_size=len(tiny_tokenizer)), tiny_tokenizer)


def engine_of(target: Target, **options: Any) -> AsyncEngine:
    return AsyncEngine(target, **{"drafter": "ngram", "use_cost_guard": False, **options})


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until the engine's thread has come to something."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def is_idle(engine: AsyncEngine) -> bool:
    return engine.num_running == engine.num_waiting == 0


class SlowDrafter(Drafter):
    """Drafts nothing, and takes its time, so that an answer is under way for as long as a test needs."""

    name = "slow"

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        time.sleep(0.02)
        return Proposal(chain(batch.roots))


class BrokenTokenizer:
    """Fails at the first text of an answer."""

    chat_template = None

    def __call__(self, text: str) -> Any:
        return type("Encoded", (), {"input_ids": [5, 6]})

    def decode(self, *args: Any, **options: Any) -> str:
        raise RuntimeError("no such piece")


def test_streams_tell_what_the_synchronous_ones_tell(target: Target) -> None:
    options = {"drafter": "ngram", "use_cost_guard": False}
    expected = list(stream(target, "the cat sat on the cat", top_logprobs=2, **LENGTH, **options))

    async def main() -> list[StreamEvent]:
        async with engine_of(target) as engine:
            return [event async for event in engine.stream("the cat sat on the cat", top_logprobs=2, **LENGTH)]

    events = asyncio.run(main())
    assert "".join(event.text for event in events) == expected[-1].completion.text
    for event in events:
        assert "".join(piece.text for piece in event.pieces) == event.text
    for name in ("token_ids", "logprobs", "pieces"):
        got, want = ([each for event in told for each in getattr(event, name)] for told in (events, expected))
        assert got == (pytest.approx(want) if name == "logprobs" else want)
    assert [len(top) for event in events for top in event.top_logprobs] == [2] * 12
    assert events[-1].completion.num_draft_tokens == sum(event.num_draft_tokens for event in events)
    assert events[-1].completion.num_accepted_tokens == sum(event.num_accepted_tokens for event in events)


def test_many_at_once_have_the_answers_of_each_alone(target: Target) -> None:
    prompts = [[3 + token for token in prompt] for prompt in random_prompts(12, (3, 20))]
    sampling = [SamplingParams(temperature=float(i % 2), seed=i, n=1 + i % 3, **LENGTH) for i in range(len(prompts))]
    expected = [generate(target, prompt, sampling=each) for prompt, each in zip(prompts, sampling, strict=True)]

    async def main() -> list[list[Completion]]:
        async with engine_of(target, max_batch=4) as engine:
            both = asyncio.gather(
                *(engine.generate(prompt, sampling=each) for prompt, each in zip(prompts, sampling, strict=True))
            )
            together = await engine.generate(prompts, sampling=sampling)
            assert tokens(together) == [answer for alone in expected for answer in tokens(alone)]
            assert await engine.generate([]) == []
            return await both

    assert [tokens(alone) for alone in asyncio.run(main())] == [tokens(alone) for alone in expected]


def test_answers_share_their_passes(target: Target) -> None:
    async def main() -> list[float]:
        async with engine_of(target, drafter=SlowDrafter()) as engine:
            start = time.perf_counter()
            await engine.generate("the cat", **LENGTH)
            alone = time.perf_counter() - start
            start = time.perf_counter()
            await asyncio.gather(*(engine.generate("the cat", **LENGTH) for _ in range(8)))
            return [alone, time.perf_counter() - start]

    alone, together = asyncio.run(main())
    assert together < 4 * alone


@pytest.mark.parametrize("how", ["break", "task", "timeout", "aclosing", "generate", "group"])
def test_a_caller_who_leaves_ends_the_request(target: Target, how: str) -> None:
    async def read(engine: AsyncEngine, most: int = 10**6) -> int:
        count = 0
        async for _ in engine.stream("the cat", **ENDLESS):
            count += 1
            if count == most:
                break
        return count

    async def side_by_side(engine: AsyncEngine) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(read(engine))
            group.create_task(engine.generate(["the cat"] * 4, **ENDLESS))
            await until(lambda: engine.num_running == 5)
            raise RuntimeError("a neighbour fails")

    async def main() -> None:
        async with engine_of(target, drafter=SlowDrafter()) as engine:
            if how == "break":
                assert await read(engine, 2) == 2
            elif how == "aclosing":
                async with aclosing(engine.stream("the cat", **ENDLESS)) as events:
                    await anext(events)
            elif how == "timeout":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await read(engine)
            elif how == "group":
                with pytest.raises(ExceptionGroup, match="unhandled"):
                    await side_by_side(engine)
            else:
                work = read(engine) if how == "task" else engine.generate(["the cat"] * 3, n=2, **ENDLESS)
                task = asyncio.create_task(work)
                await until(lambda: engine.num_running == (1 if how == "task" else 6))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda: is_idle(engine))
            assert len(await engine.generate("the cat", max_new_tokens=2, ignore_eos=True)) == 1

    asyncio.run(main())


def test_a_stream_that_nobody_reads_asks_for_nothing(target: Target) -> None:
    async def main() -> None:
        async with engine_of(target) as engine:
            engine.stream("the cat", **ENDLESS)
            await asyncio.sleep(0.05)
            assert is_idle(engine)

    asyncio.run(main())


def test_closing_in_the_middle_ends_every_answer_with_a_sentence(target: Target) -> None:
    async def main() -> list[Any]:
        engine = engine_of(target, drafter=SlowDrafter(), max_batch=2)
        tasks = [asyncio.create_task(engine.generate("the cat", **ENDLESS)) for _ in range(4)]
        await until(lambda: engine.num_running == 2 and engine.num_waiting == 2)
        await engine.aclose()
        await engine.aclose()
        with pytest.raises(EngineClosed, match=CLOSED):
            await engine.generate("the cat")
        with pytest.raises(EngineClosed, match=CLOSED):
            await anext(engine.stream("the cat"))
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert [type(result) for result in results] == [EngineClosed] * 4
    assert {str(result) for result in results} == {CLOSED}


def test_an_error_in_the_block_closes_the_engine(target: Target) -> None:
    async def main() -> AsyncEngine:
        with pytest.raises(KeyError):
            async with engine_of(target) as engine:
                raise KeyError
        return engine

    engine = asyncio.run(main())
    with pytest.raises(EngineClosed, match=CLOSED):
        asyncio.run(engine.generate("the cat"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": "the cat", "max_tokens": 4}, "use max_new_tokens"),
        ({"prompts": ""}, "prompt 0 is empty"),
        ({"prompts": [[10**6]]}, "prompt 0 has token id 1000000"),
        ({"prompts": [5] * 300}, "prompt 0 has 300 tokens"),
        ({"prompts": None}, "prompts of type NoneType"),
        ({"prompts": "the cat", "top_logprobs": 10**6}, "num_top_logprobs=1000000"),
    ],
)
def test_mistakes_are_told_where_they_were_made(target: Target, options: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with engine_of(target) as engine:
            with pytest.raises((TypeError, ValueError), match=words):
                await engine.generate(**options)
            assert is_idle(engine)

    asyncio.run(main())


def test_a_wrong_drafter_or_target_is_told_at_once(target: Target) -> None:
    with pytest.raises(ValueError, match="drafter 'nrgam' is not known"):
        AsyncEngine(target, drafter="nrgam")
    with pytest.raises(TypeError, match="is not a Target"):
        AsyncEngine("smollm2")  # type: ignore[arg-type]


def test_an_answer_that_fails_raises_and_its_neighbours_go_on() -> None:
    broken = tiny_target()
    broken.tokenizer = BrokenTokenizer()

    async def main() -> None:
        async with AsyncEngine(broken) as engine:
            with pytest.raises(RuntimeError, match="no such piece"):
                await engine.generate([5, 6], **LENGTH)
            with pytest.raises(RuntimeError, match="no such piece"):
                async for _ in engine.stream([5, 6], **LENGTH):
                    pass
            broken.tokenizer = None
            assert len(tokens(await engine.generate([5, 6], **LENGTH))[0]) == 12

    asyncio.run(main())


def test_more_than_may_wait_are_refused(target: Target) -> None:
    async def main() -> None:
        async with engine_of(target, drafter=SlowDrafter(), max_batch=1, max_waiting=1) as engine:
            tasks = [asyncio.create_task(engine.generate("the cat", **LENGTH)) for _ in range(2)]
            await until(lambda: engine.num_running + engine.num_waiting == 2)
            with pytest.raises(EngineFull, match="2 requests are running or waiting"):
                await engine.generate("the cat", **LENGTH)
            assert len(await asyncio.gather(*tasks)) == 2

    asyncio.run(main())


def test_loops_of_several_threads_share_an_engine(target: Target) -> None:
    expected = tokens(generate(target, PROMPTS, **LENGTH))
    engine = engine_of(target)
    got: dict[int, list[list[int]]] = {}

    async def answer(number: int) -> None:
        answers = await asyncio.gather(*(engine.generate(prompt, **LENGTH) for prompt in PROMPTS))
        got[number] = [tokens(completions)[0] for completions in answers]

    threads = [threading.Thread(target=lambda number=number: asyncio.run(answer(number))) for number in range(3)]
    for thread in threads:
        thread.start()
    # And the target itself is free for others.
    assert tokens(generate(target, PROMPTS, drafter="ngram", **LENGTH)) == expected
    for thread in threads:
        thread.join()
    asyncio.run(engine.aclose())
    assert got == dict.fromkeys(range(3), expected)


# What is left of a task whose loop was closed complains when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_ends_before_its_answers_ends_them(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    """Without a word in the log: the tasks that it had were cancelled, or nobody can hear of them."""
    engine = engine_of(target, drafter=SlowDrafter())

    async def leave() -> None:
        asyncio.get_running_loop().create_task(engine.generate("the cat", **ENDLESS))
        await until(lambda: engine.num_running == 1)

    asyncio.run(leave())
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.generate("the cat", **ENDLESS))
    loop.run_until_complete(until(lambda: engine.num_running == 1))
    loop.close()

    async def wait() -> None:
        await until(lambda: is_idle(engine))
        assert len(await engine.generate("the cat", max_new_tokens=2, ignore_eos=True)) == 1
        await engine.aclose()

    asyncio.run(wait())
    assert not caplog.records
    del task
    gc.collect()


def test_the_pages_web_application(tiny_target_dir: Path) -> None:
    """The one of docs/python.md, with two clients at once."""
    fastapi = pytest.importorskip("fastapi", reason="the example needs fastapi: pip install 'selfspec[serve]'")
    httpx = pytest.importorskip("httpx", reason="the example's test needs httpx: pip install 'selfspec[app]'")
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    [code] = [block.partition("```")[0] for block in page.split("```python\n")[1:] if "FastAPI" in block.partition("```")[0]]
    assert len(code.splitlines()) < 30
    names: dict[str, Any] = {}
    exec(compile(code.replace("path-or-hub-id", str(tiny_target_dir)), "python.md", "exec"), names)
    app = names["app"]
    assert isinstance(app, fastapi.FastAPI)

    async def main() -> list[str]:
        transport = httpx.ASGITransport(app=app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            asked = [client.post("/answer", json={"prompt": prompt}) for prompt in ("the cat", "the dog")]
            return [response.raise_for_status().text for response in await asyncio.gather(*asked)]

    target = Target.from_pretrained(tiny_target_dir)
    assert asyncio.run(main()) == [answer.text for answer in generate(target, ["the cat", "the dog"], max_new_tokens=256)]
