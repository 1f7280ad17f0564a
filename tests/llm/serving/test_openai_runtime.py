"""`LocalModel` and its streams, without HTTP: what a reader sees, what a slow one costs, and that whatever
happens every stream ends once and every block comes home.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Coroutine
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import pytest

from llm.steps import faults
from reflex_runtime.core.batch import Event, RequestQueued, RequestSettled
from reflex_runtime.core.errors import Cancelled, ConfigError, ProcessorError, QueueFull, ReflexError
from reflex_runtime.core.request import PRIORITIES, Priority, TicketState
from reflex_runtime.ipc.messages import GenerateParams
from reflex_runtime.ipc.streams import merged
from reflex_runtime.llm import EngineConfig, LLMEngine, LLMProcessor, SamplingParams
from reflex_runtime.llm.app import ModelServer
from reflex_runtime.llm.engine.toy import ByteTokenizer
from reflex_runtime.llm.server.local_model import GenerationStream, LocalModel, WorkerEngine
from reflex_runtime.run.audience import SLICE
from reflex_runtime.settings import LLMServeConfig
from serving.in_process import Caller
from serving.openai_toy import PATIENCE, Model, toy_model

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` that does not wait for ever."""

    async def limited() -> T:
        async with asyncio.timeout(60.0):
            return await main

    return asyncio.run(limited())


class Run:
    """A runtime of the toy in an async with statement: closed on the way out, with every block at home."""

    def __init__(
        self, runner: Model | None = None, unread: int = 64, patience: float = 120.0, **config: Any
    ) -> None:
        self.runner = runner or Model()
        self.processor = LLMProcessor(self.runner, ByteTokenizer(), EngineConfig(**config))
        self.events: list[Event] = []
        self.news = asyncio.Event()  # set with every event
        self.runtime = LocalModel(self.processor, unread=unread, patience=patience)
        self.runtime.add_sink(self._saw)

    def _saw(self, event: Event) -> None:
        self.events.append(event)
        self.news.set()

    async def __aenter__(self) -> Run:
        await self.runtime.start()
        return self

    async def __aexit__(self, kind: Any, *rest: Any) -> None:
        self.runner.go()
        assert await self.runtime.close(drain=kind is None)
        if kind is None:
            assert self.processor.pool.free_blocks == self.processor.pool.num_blocks
            assert not faults(self.processor.pool)
            self.settled_once()

    def settled_once(self) -> None:
        queued = [event.ticket for event in self.events if isinstance(event, RequestQueued)]
        settled = [event.ticket for event in self.events if isinstance(event, RequestSettled)]
        assert len(settled) == len(set(map(id, settled))) == len(queued)
        assert not self.runtime._streams

    def submit(self, prompt: str = "robots", max_tokens: int = 5, **more: Any) -> GenerationStream:
        return self.runtime.submit(self.processor.request(prompt, GenerateParams.greedy(max_tokens, **more)))


def engine_says(prompt: str, max_tokens: int) -> tuple[int, ...]:
    return LLMEngine().generate([prompt], SamplingParams.greedy(max_tokens))[0].token_ids


def test_l9_a_stream_gives_every_token_and_ends_with_the_last() -> None:
    async def main() -> None:
        async with Run() as it:
            stream = it.submit(max_tokens=6)
            found = [output async for output in stream]
            assert [output.token_id for output in found] == list(engine_says("robots", 6))
            assert [output.finish for output in found] == [None] * 5 + ["length"]
            assert (stream.prompt_tokens, stream.completion_tokens, stream.ended) == (6, 6, True)
            assert await stream.read() == []
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(main())


def test_l9_read_gives_all_that_has_come() -> None:
    async def main() -> None:
        async with Run() as it:
            first, second = it.submit(max_tokens=9), it.submit("cameras", max_tokens=4)
            assert [o async for o in second][-1].finish == "length"
            parts = []
            while part := await first.read():
                parts.append(part)
            assert sum(map(len, parts)) == 9
            assert len(parts[0]) >= 4  # those that came while the other one was read

    run(main())


def test_l9_what_a_stream_said_is_read_before_its_error() -> None:
    async def main() -> None:
        async with Run() as it:
            it.runner.fails = lambda step: RuntimeError("broken") if len(it.runner.sizes) > 3 else None
            stream = it.submit(max_tokens=9)
            found = [await anext(stream) for _ in range(3)]
            assert [output.finish for output in found] == [None] * 3
            for _ in range(2):
                with pytest.raises(ProcessorError, match="broken"):
                    await anext(stream)
            it.runner.fails = lambda step: None

    run(main())


def test_l9_a_closed_stream_ends_as_cancelled_within_a_step() -> None:
    async def main() -> None:
        async with Run() as it:
            stream, other = it.submit(max_tokens=2000), it.submit("x", max_tokens=30)
            await anext(stream)
            stream.close()
            stream.close()
            with pytest.raises(Cancelled):
                await stream.read()
            made = stream.completion_tokens
            assert len([o async for o in other]) == 30
            assert stream.completion_tokens == made

    run(main())


def test_l9_what_was_closed_before_it_was_read_never_looks_like_a_whole_answer() -> None:
    async def main() -> None:
        async with Run() as it:
            ended, between = it.submit(max_tokens=3), it.submit(max_tokens=3)
            while min(ended.unread, between.unread) < 3:
                it.news.clear()
                await it.news.wait()
            ended.close()
            with pytest.raises(Cancelled):
                await ended.read()
            assert len(await between.read()) == 3
            between.close()
            assert await between.read() == []  # all of it was read: there was nothing to take back

            last, bell = it.processor.request("robots", SamplingParams.greedy(3)), asyncio.Event()
            stream = it.runtime.submit(last, bell)
            ticket = stream._ticket
            assert ticket is not None
            it.runtime.batcher.device.wake()
            while ticket.state is not TicketState.SETTLED:  # the loop has not turned: nobody was told
                os.sched_yield()
            assert not stream.ended
            stream.close()
            with pytest.raises(Cancelled):
                assert [part async for part in merged([stream], bell)] == []

    run(main())


def test_l9_an_unread_stream_is_held_at_its_bound_and_goes_on_when_read_down() -> None:
    async def main() -> None:
        async with Run(unread=8) as it:
            loop = asyncio.get_running_loop()
            # a step waits for a turn of the loop, which could otherwise be any number of steps late
            it.runner.fails = lambda step: asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE)
            slow, fast = it.submit(max_tokens=2000), it.submit("x", max_tokens=100)
            tickets = list(it.runtime._streams)
            assert len([o async for o in fast]) == 100
            assert slow.held
            assert it.runtime._holds.value >= 1
            assert slow.unread < 64  # the bound, and the steps made until the loop turned
            granted = tickets[0].granted
            assert len([o async for o in it.submit("y", max_tokens=50)]) == 50
            assert tickets[0].granted == granted
            while slow.unread > 4:
                assert slow.held
                await anext(slow)
            assert not slow.held
            it.runner.fails = lambda step: None
            rest = [output async for output in slow]
            assert slow.completion_tokens == 2000
            assert rest[-1].finish == "length"

    run(main())


def test_l9_a_reader_that_takes_nothing_for_too_long_is_taken_for_gone() -> None:
    async def main() -> None:
        async with Run(unread=4, patience=0.05, max_num_seqs=1) as it:
            stalled, waits = it.submit(max_tokens=2000), it.submit("x", max_tokens=3)
            assert len([o async for o in waits]) == 3  # it had no place before the other one lost its own
            with pytest.raises(Cancelled):
                await stalled.read()

    run(main())


def test_l9_alike_requests_wait_for_the_first_ones_prompt_and_enter_one_by_one() -> None:
    async def main() -> None:
        async with Run(max_queue=3) as it:
            prompt = "x" * 100

            def requests(n: int) -> list[Any]:
                return [it.processor.request(prompt, SamplingParams.greedy(2)) for _ in range(n)]

            it.runner.stop()
            busy = it.submit(max_tokens=1)
            await asyncio.to_thread(it.runner.wait_inside)
            entered: list[Any] = []
            with pytest.raises(QueueFull):
                entered.extend(it.runtime.submit_alike(requests(4)))
            for stream in entered:
                stream.close()
            it.runner.go()
            assert len([o async for o in busy]) == 1
            bell = asyncio.Event()
            streams = list(it.runtime.submit_alike(requests(3), bell))
            said: dict[int, list[int]] = {0: [], 1: [], 2: []}
            async for index, outputs in merged(streams, bell):
                said[index] += [output.token_id for output in outputs]
            assert said[0] == said[1] == said[2] == list(engine_says(prompt, 2))
            assert [stream.cached_tokens for stream in streams] == [0, 96, 96]

    run(main())


@pytest.mark.parametrize("scored", [0, None])
def test_l9_those_that_follow_wait_until_the_first_knows_what_is_said_of_the_prompt(scored: int | None) -> None:
    async def main() -> None:
        async with Run() as it:
            # of a prompt that is not worth caching
            asked = [GenerateParams.greedy(2, prompt_logprobs=of) for of in (scored, None)]
            first, second = it.runtime.submit_alike([it.processor.request("short", each) for each in asked])
            assert second.held is (scored is not None)
            assert len([o async for o in second]) == 2
            assert [len(stream.prompt_scores) for stream in (first, second)] == [0 if scored is None else 4, 0]
            assert len([o async for o in first]) == 2

    run(main())


def test_l9_those_that_follow_go_on_when_the_first_one_ends_early() -> None:
    async def main() -> None:
        async with Run(max_num_batched_tokens=16) as it:
            request = [it.processor.request("x" * 100, SamplingParams.greedy(2)) for _ in range(3)]
            first, second, third = it.runtime.submit_alike(request)
            third.close()
            first.close()
            assert len([o async for o in second]) == 2
            assert not second.held

    run(main())


def test_g1_a_request_of_another_process_is_queued_as_it_was_asked() -> None:
    async def main() -> None:
        async with Run() as it:
            engine = WorkerEngine(cast(Any, it.runtime))
            asked = GenerateParams(
                stream_id="s-1", prompt_token_ids=[1] * 40, max_tokens=3, priority="urgent", client="c",
                request_id="r", timeout_ms=5000.0, max_gap_ms=250.0,
            )  # fmt: skip
            leader = await engine.submit(asked, asyncio.Event(), None)
            assert leader._ticket is not None
            request = leader._ticket.request
            assert (request.id, request.client, request.priority) == ("r", "c", Priority.URGENT)
            assert (request.time_limit, request.max_gap) == (5.0, 0.25)
            asked = GenerateParams(stream_id="s-2", prompt_token_ids=[1] * 40)
            follower = await engine.submit(asked, asyncio.Event(), leader)
            assert follower.held
            assert follower._ticket is not None
            assert (follower._ticket.request.id, follower._ticket.request.time_limit) == ("s-2", None)
            assert (len([o async for o in leader]), len([o async for o in follower])) == (3, 16)

    run(main())


def test_l9_nobody_waits_for_one_that_has_begun() -> None:
    async def main() -> None:
        async with Run(unread=4) as it:
            first = it.submit("x" * 100, max_tokens=400)
            assert len([o async for o in it.submit("y" * 100, max_tokens=9)]) == 9
            assert first.held  # by its reader, who reads nothing
            asked = it.processor.request("x" * 100, SamplingParams.greedy(5))
            other = it.runtime.submit(asked, None, first)
            async with asyncio.timeout(PATIENCE):
                assert len([o async for o in other]) == 5
            first.close()

    run(main())


def test_l9_a_choice_waits_for_the_first_also_where_a_step_begins_while_they_are_queued() -> None:
    async def main() -> None:
        async with Run(max_num_batched_tokens=64, long_prefill_token_threshold=16) as it:
            prompt, greedy = "robots and arms " * 8, SamplingParams.greedy(2)
            assert len([o async for o in it.submit(prompt, max_tokens=1)]) == 1  # the cache has the prompt now
            it.runner.stop()
            runs = it.submit("x", max_tokens=500)
            await asyncio.to_thread(it.runner.wait_inside)
            queue, queued = it.runtime.batcher.submit, []

            def then_step(*args: Any, **more: Any) -> Any:
                queued.append(queue(*args, **more))
                if len(queued) == 2:
                    it.runner.step()
                return queued[-1]

            it.runtime.batcher.submit = then_step  # type: ignore[method-assign]
            ways = [GenerateParams.of(greedy, prompt_logprobs=of) for of in (0, None)]
            asked = [it.processor.request(prompt, of) for of in ways]
            first, second = it.runtime.submit_alike(asked)
            it.runner.step()
            assert (second.completion_tokens, second.held) == (0, True)
            it.runner.go()
            assert await second.read()
            assert len(first.prompt_scores) == len(prompt) - 1
            for stream in (runs, first, second):
                stream.close()

    run(main())


def test_l9_merged_raises_the_first_error() -> None:
    async def main() -> None:
        async with Run() as it:
            bell = asyncio.Event()
            ask = it.processor.request
            streams = [it.runtime.submit(ask("x", SamplingParams.greedy(n)), bell) for n in (5, 500)]
            seen = []

            async def reads() -> None:
                async for index, outputs in merged(streams, bell):
                    seen.extend([index] * len(outputs))
                    if seen.count(0) == 5:
                        streams[1].close()

            with pytest.raises(Cancelled):
                await reads()
            assert seen.count(0) == 5

    run(main())


def test_l9_a_caller_that_leaves_while_it_is_answered_is_noticed() -> None:
    async def main() -> None:
        runner = Model()
        model = toy_model(runner)
        await model.start()
        app = ModelServer(model).app
        caller = Caller(app, "/v1/completions")
        caller.say(json.dumps({"model": "toy", "prompt": "x", "max_tokens": 8000, "stream": True}).encode())
        assert await caller.status() == 200
        caller.leave()
        app.close()
        await app.wait_idle()
        assert caller.body.count(b"data:") < 8000
        model.drain()
        assert await model.stop(asyncio.get_running_loop().time() + PATIENCE, app.wait_idle)
        assert isinstance(model.host, LocalModel)
        assert model.host.processor.pool.free_blocks == runner.num_blocks

    run(main())


@pytest.mark.parametrize("leaves", [False, True], ids=["", "a caller that leaves takes them back"])
def test_l9_thousands_of_choices_are_queued_in_slices_with_other_work_in_between(leaves: bool) -> None:
    async def main() -> None:
        runner = Model()
        model = toy_model(runner, LLMServeConfig(max_queue=2048))
        await model.start()
        app, generator = ModelServer(model).app, model.host
        runner.stop()
        caller = Caller(app, "/v1/completions")
        asked = {"model": "toy", "prompt": [f"{i}" for i in range(500)], "n": 4, "max_tokens": 1}
        caller.say(json.dumps(asked).encode())
        sizes = [0]
        while sizes[-1] < (1000 if leaves else 2000):
            await asyncio.sleep(0)  # a turn of the loop
            sizes.append(generator.waiting + generator.running)
        assert max(later - before for before, later in pairwise(sizes)) <= SLICE
        if leaves:
            caller.leave()
        runner.go()
        if not leaves:
            assert await caller.status() == 200
        app.close()
        await app.wait_idle()
        model.drain()
        assert await model.stop(asyncio.get_running_loop().time() + PATIENCE, app.wait_idle)
        assert generator.waiting + generator.running == 0
        assert generator.processor.pool.free_blocks == runner.num_blocks

    run(main())


@pytest.mark.parametrize("seed", range(3))
def test_l9_of_two_requests_that_do_not_fit_together_the_first_is_queued(seed: int) -> None:
    async def main() -> None:
        runner = Model()
        model = toy_model(runner)
        await model.start()
        app, generator = ModelServer(model).app, model.host
        runner.stop()
        callers = [Caller(app, "/v1/completions") for _ in range(2)]
        for caller in callers:
            caller.say(json.dumps({"model": "toy", "prompt": ["x"] * (700 + seed), "max_tokens": 1}).encode())
        assert (await callers[1].answer()).status == 429
        runner.go()
        assert (await callers[0].answer()).status == 200
        app.close()
        await app.wait_idle()
        model.drain()
        assert await model.stop(asyncio.get_running_loop().time() + PATIENCE, app.wait_idle)
        assert generator.waiting + generator.running == 0

    run(main())


def test_l9_what_could_never_run_is_refused_before_it_is_queued() -> None:
    async def main() -> None:
        async with Run(Model(num_blocks=4)) as it:
            with pytest.raises(ReflexError, match="take 5 blocks of 16, the cache has 4") as caught:
                it.submit("x" * 60, max_tokens=6)
            assert caught.value.code == "too_large"
            with pytest.raises(ConfigError):
                it.submit("")
            assert len([o async for o in it.submit("x" * 60, max_tokens=5)]) == 5

    run(main())


@pytest.mark.parametrize("seed", range(4))
def test_l9_after_any_history_every_stream_has_ended_once_and_all_blocks_are_home(seed: int) -> None:
    """A thousand operations in all: submit, read some, read to the end, close, abandon the loop for a turn."""

    async def main() -> None:
        draw = random.Random(seed)
        small = {"max_num_batched_tokens": 32, "max_num_seqs": 6, "max_queue": 20}
        caching = seed % 2 == 0
        async with Run(Model(40, block_size=4), unread=6, **small, enable_prefix_caching=caching) as it:
            live: list[GenerationStream] = []
            ended: list[GenerationStream] = []
            broken = [False]
            it.runner.fails = lambda step: RuntimeError("broken") if broken[0] else None
            for _ in range(250):
                what = draw.random()
                if what < 0.4 or not live:
                    n = draw.choice((1, 1, 1, 2, 4))
                    prompt = draw.choice("ab") * draw.randrange(1, 30)
                    asked = {"priority": draw.choice(list(PRIORITIES)), "client": draw.choice("xyz")}
                    params = GenerateParams(max_tokens=draw.randrange(1, 40), seed=draw.randrange(9), **asked)
                    ask = partial(it.processor.request, prompt, params)
                    requests = [ask() for _ in range(n)]
                    with contextlib.suppress(QueueFull):
                        live += it.runtime.submit_alike(requests)
                elif what < 0.6:
                    stream = draw.choice(live)
                    if stream.unread:
                        await anext(stream)
                elif what < 0.75:
                    stream = live.pop(draw.randrange(len(live)))
                    stream.close()
                    ended.append(stream)
                elif what < 0.8:
                    broken[0] = not broken[0]
                else:  # wait for one, reading the others: those that are held have the places
                    stream = draw.choice(live)
                    while not (stream.unread or stream.ended):
                        it.news.clear()
                        for other in live:
                            if other is not stream:
                                quietly(other)
                        await it.news.wait()
            broken[0] = False
            await asyncio.gather(*map(finished, live))  # together: those that are held have the others' places
            await it.runtime.batcher.close(drain=True, timeout=PATIENCE)
            assert all(stream.ended for stream in live + ended)

    def quietly(stream: GenerationStream) -> None:
        """Read what has come, if it did not end with an error."""
        with contextlib.suppress(ReflexError):
            stream.take()

    async def finished(stream: GenerationStream) -> None:
        with contextlib.suppress(ReflexError):
            while await stream.read():
                pass

    run(main())
