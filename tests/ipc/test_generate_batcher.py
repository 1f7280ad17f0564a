"""The generate batcher over a real connection to a scripted runtime."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ipc.runtime import Client, Runtime, Unavailable, World, outcome, run, world
from reflex_runtime.core.batch import RequestQueued, RequestSettled, SchedulerPaused
from reflex_runtime.core.errors import (
    Cancelled,
    Closed,
    ConfigError,
    CutShort,
    Displaced,
    Drained,
    Expired,
    ProcessorHung,
    QueueFull,
    Shed,
)
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.ipc.frames import ProtocolError, RpcError, error_of
from reflex_runtime.ipc.generate_batcher import OFF, GenerateBatcher, GenerateBatcherConfig
from reflex_runtime.ipc.generate_calls import MOST_PARTITIONS, BatchDispatched, BatcherStats
from reflex_runtime.ipc.messages import GenerateParams
from reflex_runtime.ipc.peer import ConnectionLost
from reflex_runtime.ipc.streams import StreamRegistry
from reflex_runtime.observe.metrics import GENERATE_BATCHER, SeriesSet

LONG = 20_000.0  # ms: a hold that only something else ends
OVER = 21.0  # s: longer than that
HELD = GenerateBatcherConfig(max_hold_ms=1000.0, background_extra_ms=1000.0)


async def computing(made: World) -> None:
    """The runtime computes a step that takes an hour: who comes is held."""
    gated, made.runtime.gated = made.runtime.gated, False
    made.batcher._steps.took(3600.0)
    await made.ask(priority="urgent")
    made.runtime.gated = gated
    made.runtime.messages.clear()


# -- one request -------------------------------------------------------------------------------------------------------


def test_g1_a_request_gets_its_own_response_and_its_stream_is_fed() -> None:
    async def main() -> None:
        async with world() as made:
            handle = made.registry.register("mine")
            answer = await made.ask("mine", max_tokens=5, stop=("x",), telemetry={"request_id": "r-1"})
            assert answer == {"stream_id": "mine", "prompt_tokens": 3}
            assert made.runtime.messages == [
                ("batch_generate", [{
                    "stream_id": "mine", "prompt": "hello", "max_tokens": 5, "stop": ["x"], "request_id": "r-1",
                }])
            ]  # fmt: skip
            assert handle.prompt_tokens == 3
            made.runtime.chunk("mine", 2, final=True)
            made.runtime.stats("mine", 3, 2)
            made.runtime.end("mine")
            assert [token.token_id async for token in handle] == [0, 1]
            assert (handle.completion_tokens, handle.cached_tokens) == (2, 2)
            assert made.registry.active_count() == 0

    run(main())


def test_g1_a_stream_is_registered_first_and_read_also_when_it_has_ended() -> None:
    async def main() -> None:
        async with world() as made:
            made.runtime.brief = True
            handle = made.registry.register("mine")
            assert (await made.ask("mine"))["stream_id"] == "mine"
            assert await handle.read() == []
            for id in ("", "unknown", "mine"):
                with pytest.raises(ConfigError, match=f"stream_id='{id}': not registered, or it has ended"):
                    await made.batcher.enqueue(GenerateParams(prompt="x", stream_id=id))

    run(main())


def test_g1_wrong_params_end_the_stream_they_were_for_and_no_other() -> None:
    async def main() -> None:
        async with world() as made:
            handle = made.registry.register("mine")
            with pytest.raises(ConfigError):
                await made.ask("mine", "whenever")
            with pytest.raises(ConfigError):
                await handle.read()
            assert made.registry.unfinished == 0
            await made.ask("lives")
            with pytest.raises(ConfigError):
                await made.ask("lives", "whenever")
            assert (made.registry.unfinished, made.runtime.cancels) == (1, [])

    run(main())


def test_g1_ten_gathered_requests_are_one_message_and_each_gets_its_own() -> None:
    async def main() -> None:
        async with world() as made:
            ids = [f"s{i}" for i in range(10)]
            made.runtime.refusing["s4"] = error_of(QueueFull("the engine is full"))
            answers = await asyncio.gather(*(outcome(made.ask(id)) for id in ids))
            assert made.runtime.sizes == [10]
            assert made.runtime.ids == ids
            for id, answer in zip(ids, answers, strict=True):
                if id == "s4":
                    assert isinstance(answer, QueueFull)
                    assert answer.message == "the engine is full"
                else:
                    assert answer["stream_id"] == id
            assert made.registry.active_count() == 9, "who was refused has no place"
            assert made.runtime.cancels == []

    run(main())


def test_g4_a_lone_request_is_written_in_the_turn_after_it_came() -> None:
    async def main() -> None:
        async with world() as made:
            for _ in range(3):
                asking = made.ask()
                await asyncio.sleep(0)  # its task begins
                await asyncio.sleep(0)  # the turn is over: it is on its way
                assert made.client.peer is not None
                assert made.batcher.get_stats()["messages_out"] == 1
                await asking
                await made.later(0.004)  # longer than max_hold: nobody came within it

    run(main())


@pytest.mark.parametrize(
    ("params", "options", "field"),
    [
        ({"max_tokens": 0}, {}, "max_tokens"),
        ({"credits": 0}, {}, "credits"),
        ({}, {"priority": "whenever"}, "priority"),
        ({}, {"timeout_ms": -1.0}, "timeout_ms"),
        ({}, {"timeout_ms": float("nan")}, "timeout_ms"),
        ({"timeout_ms": float("inf")}, {}, "timeout_ms"),
    ],
)
def test_g1_wrong_params_are_refused_before_they_queue(params: Any, options: Any, field: str) -> None:
    async def main() -> None:
        async with world() as made:
            with pytest.raises(ConfigError, match=field):
                await made.ask(**params, **options)
            assert made.registry.snapshot()["registered"] == 0
            assert made.batcher.get_stats()["enqueued_by_priority"]["default"] == 0

    run(main())


def test_g1_a_request_that_nobody_waits_for_ends_its_stream_with_its_error() -> None:
    async def main() -> None:
        async with world() as made:
            made.runtime.refusing["refused"] = error_of(QueueFull("no"))
            refused, good = made.registry.register("refused"), made.registry.register("good")
            for stream in (refused, good):
                made.batcher.submit(GenerateParams(stream_id=stream.id, prompt="x"))
            with pytest.raises(QueueFull):
                await refused.read()
            made.runtime.chunk("good", 1, final=True)
            made.runtime.end("good")
            assert len(await good.read()) == 1
            with pytest.raises(ConfigError, match="not registered"):
                made.batcher.submit(GenerateParams(stream_id="refused"))

    run(main())


def test_g1_one_stream_is_asked_for_once() -> None:
    async def main() -> None:
        async with world(gated=True) as made:
            first = made.ask("s")
            await made.round()
            for again in (made.ask("s"), made.ask("s")):
                with pytest.raises(ConfigError, match="in use"):
                    await again
            made.runtime.answer()
            assert (await first)["stream_id"] == "s"

    run(main())


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_g1_the_default_priority_is_default_and_a_short_timeout_is_urgent() -> None:
    async def main() -> None:
        async with world(HELD, gated=True) as made:
            await computing(made)
            default, background = made.ask("d"), made.ask("b", "background")
            await made.round()
            assert made.runtime.ids == [], "held"
            urgent = made.ask("t", timeout_ms=HELD.max_hold_ms)
            await made.runtime.until(lambda: made.runtime.ids)
            assert made.runtime.ids == ["t", "d", "b"], "taken urgent, default, background"
            sent = {one["stream_id"]: one.get("priority", "default") for one in made.runtime.messages[0][1]}
            assert sent == {"t": "default", "d": "default", "b": "background"}
            made.runtime.answer()
            await asyncio.gather(default, background, urgent)
            stats = made.batcher.get_stats()
            assert stats["urgent_flushes"] == 2, "that before included"
            assert stats["enqueued_by_priority"] == {"urgent": 1, "default": 2, "background": 1}

    run(main())


def test_g3_an_urgent_request_goes_at_once_also_while_a_call_is_out() -> None:
    async def main() -> None:
        async with world(HELD, gated=True) as made:
            await computing(made)
            first = made.ask("first", "urgent")
            await made.round()
            held = made.ask("held")
            await made.round()
            assert made.runtime.ids == ["first"]
            urgent = made.ask("urgent", "urgent")
            await made.round()
            assert made.runtime.ids == ["first", "urgent", "held"]
            made.runtime.answer(1)
            assert (await urgent)["stream_id"] == "urgent", "answers come in any order"
            made.runtime.answer()
            await asyncio.gather(first, held)

    run(main())


def test_g3_tiers_are_first_in_first_out_whatever_the_batches() -> None:
    async def main() -> None:
        config = GenerateBatcherConfig(max_batch_size=2, stream_limit=2, max_hold_ms=1000)  # nobody ages
        async with world(config) as made:
            tasks = [made.ask(f"{tier}{i}", tier) for i in range(4) for tier in ("background", "default", "urgent")]
            for n in range(2, 13, 2):
                await made.runtime.until(lambda n=n: len(made.runtime.ids) >= n)
                for id in list(made.runtime.live):
                    made.runtime.end(id)
            await asyncio.gather(*tasks)
            assert made.runtime.ids == [f"{t}{i}" for t in ("urgent", "default", "background") for i in range(4)]
            assert max(made.runtime.sizes) == 2

    run(main())


def test_g3_a_full_queue_refuses_and_an_urgent_one_displaces_the_newest_background() -> None:
    async def main() -> None:
        config = GenerateBatcherConfig(max_pending=3, stream_limit=1)
        async with world(config) as made:
            await made.ask("holds the place")
            waiting = {id: made.ask(id, "background") for id in ("b0", "b1", "b2")}
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await made.ask("default")
            urgent = made.ask("urgent", "urgent")
            with pytest.raises(Displaced):
                await waiting.pop("b2")
            assert made.registry.find("b2") is None
            assert made.registry.find("default") is None
            made.runtime.end("holds the place")
            assert (await urgent)["stream_id"] == "urgent"
            assert made.batcher.get_stats()["pending"] == 2
            assert made.batcher.get_stats()["refused"] == 1
            await made.batcher.close(drain=False)
            for task in waiting.values():
                assert isinstance(await outcome(task), Drained)

    run(main())


def test_g3_prompt_tokens_that_wait_are_bounded_too() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(max_pending_tokens=10, stream_limit=1)) as made:
            await made.ask("holds the place")
            texts = [{"prompt": "sixsix"}, {"prompt": None, "prompt_token_ids": [1, 2, 3]}]
            waiting = [made.ask(f"w{i}", **text) for i, text in enumerate(texts)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await made.ask("too long", prompt=None, messages=[{"role": "user", "content": "ab"}])
            assert made.batcher.get_stats()["pending"] == 2
            await made.batcher.close(drain=False)
            for task in waiting:
                assert isinstance(await outcome(task), Drained)

    run(main())


def test_g3_a_message_with_an_urgent_request_is_written_in_the_turn_that_decides() -> None:
    async def main() -> None:
        async with world() as made:
            frames: dict[str, int] = {}
            for priority in ("default", "urgent"):
                task = made.ask(priority, priority)
                before = made.client.peer.frames
                await asyncio.sleep(0)  # it is queued; the dispatcher decides at the end of this turn

                def look(priority: str = priority, before: int = before) -> None:
                    frames[priority] = made.client.peer.frames - before

                asyncio.get_running_loop().call_soon(look)
                await task
            assert frames == {"default": 0, "urgent": 1}

    run(main())


# -- room --------------------------------------------------------------------------------------------------------------


def test_g6_no_message_exceeds_the_places_and_a_freed_one_lets_the_next_go() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=3)) as made:
            tasks = [made.ask(f"s{i}") for i in range(5)]
            await asyncio.gather(*tasks[:3])
            await made.round()
            assert made.runtime.sizes == [3]
            assert made.registry.capacity() == (3, 3)
            assert made.batcher.get_stats()["pending"] == 2
            urgent = made.ask("urgent", "urgent")
            await made.round()
            made.runtime.end("s1")
            await urgent
            assert made.runtime.ids[3:] == ["urgent"], "the next place is for who is urgent"
            made.runtime.end("s0")
            made.runtime.end("urgent")
            await asyncio.gather(*tasks)
            assert made.registry.capacity() == (3, 3)

    run(main())


def test_g6_a_refused_request_gives_its_place_back_at_once() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=1)) as made:
            made.runtime.refusing["first"] = error_of(QueueFull("no"))
            first, second = made.ask("first"), made.ask("second")
            assert isinstance(await outcome(first), QueueFull)
            assert (await second)["stream_id"] == "second"

    run(main())


def test_g6_places_that_others_take_count() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=2)) as made:
            await made.ask("first")
            other = made.registry.register("other")
            made.registry.reserve(other)
            waits = made.ask("waits")
            await made.round()
            assert made.runtime.ids == ["first"]
            made.registry.release(other)
            await waits

    run(main())


# -- taking it back ----------------------------------------------------------------------------------------------------


WAYS = ("task", "event", "handle")


def take_back(way: str, task: asyncio.Task[Any], cancel: asyncio.Event, made: World, id: str) -> None:
    if way == "task":
        task.cancel()
    elif way == "event":
        cancel.set()
    else:
        handle = made.registry.find(id)
        assert handle is not None
        handle.close()


@pytest.mark.parametrize("way", WAYS)
def test_g7_taken_back_before_it_was_sent_the_runtime_never_sees_it(way: str) -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=1)) as made:
            await made.ask("first")
            cancel, handle = asyncio.Event(), made.registry.register("waits")
            task = made.ask("waits", cancel=cancel)
            await made.round()
            take_back(way, task, cancel, made, "waits")
            assert isinstance(await outcome(task), Cancelled)
            await made.round()
            with pytest.raises(Cancelled):
                await handle.read()
            made.runtime.end("first")
            await made.ask("next")
            assert made.runtime.ids == ["first", "next"]
            assert made.runtime.cancels == []
            stats = made.batcher.get_stats()
            assert (stats["aborted_requests"], stats["pending"]) == (1, 0)

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_g7_taken_back_while_it_is_out_the_runtime_is_told_and_its_place_comes_back_with_its_end(way: str) -> None:
    async def main() -> None:
        async with world(gated=True) as made:
            cancel, company = asyncio.Event(), made.ask("company")
            task = made.ask("s", cancel=cancel)
            await made.runtime.until(lambda: made.runtime.calls)
            take_back(way, task, cancel, made, "s")
            assert isinstance(await outcome(task), Cancelled), "at once, and not with the answer of its message"
            await made.round()
            assert made.runtime.cancels == ["s"]
            assert made.registry.active_count() == 2
            made.runtime.answer()
            assert (await company)["stream_id"] == "company"
            await made.round()
            assert made.registry.active_count() == 1
            assert made.batcher.get_stats()["aborted_requests"] == 1

    run(main())


@pytest.mark.parametrize("way", ["event", "handle"])
def test_g7_taken_back_after_its_response_it_is_stopped_as_well(way: str) -> None:
    async def main() -> None:
        async with world() as made:
            cancel = asyncio.Event()
            task = made.ask("s", cancel=cancel)
            await task
            take_back(way, task, cancel, made, "s")
            await made.round()
            assert made.runtime.cancels == ["s"]
            assert made.registry.active_count() == 0
            aborted = made.batcher.get_stats()["aborted_requests"]
            assert aborted == (way == "event"), "a reader that leaves an answered stream aborts no request"

    run(main())


def test_g7_a_response_that_comes_as_its_caller_leaves_stops_the_stream() -> None:
    async def main() -> None:
        async with world(gated=True) as made:
            settled = made.batcher._settled

            def just_then(ticket: Any) -> None:
                settled(ticket)
                task.cancel()  # the answer is there, and nobody has seen it

            made.batcher._settled = just_then  # type: ignore[method-assign]
            task = made.ask("s")
            await made.runtime.until(lambda: made.runtime.calls)
            made.runtime.answer()
            assert isinstance(await outcome(task), Cancelled)
            await made.round()
            assert made.runtime.cancels == ["s"]
            assert made.registry.active_count() == 0

    run(main())


def test_g7_an_error_that_comes_as_its_caller_leaves_is_nobodys_complaint() -> None:
    async def main() -> None:
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with world() as made:
            settled = made.batcher._settled

            def just_then(ticket: Any) -> None:
                settled(ticket)
                task.cancel()

            made.batcher._settled = just_then  # type: ignore[method-assign]
            made.runtime.refusing["s"] = error_of(QueueFull("no"))
            task = made.ask("s")
            assert isinstance(await outcome(task), Cancelled)
            gc.collect()
        assert problems == []

    run(main())


def test_g7_a_stream_that_was_taken_back_is_gone_at_once_and_its_name_is_free() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=1)) as made:
            await made.ask("first")
            task = made.ask("s")
            await made.round()
            task.cancel()
            await asyncio.sleep(0)
            again = made.ask("s")
            made.runtime.end("first")
            assert (await again)["stream_id"] == "s"
            assert made.runtime.ids == ["first", "s"]
            assert made.registry.active_count() == 1

    run(main())


def test_g7_of_a_thousand_that_leave_together_none_is_sent_into_a_place_that_gets_free() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=4)) as made:
            first = [made.ask(f"first {i}") for i in range(4)]
            await asyncio.gather(*first)
            tasks = [made.ask(f"s{i}") for i in range(1000)]
            await made.round()
            for id in list(made.runtime.live):
                made.runtime.end(id)
            for task in tasks:
                task.cancel()
            assert {type(await outcome(task)) for task in tasks} == {Cancelled}
            while made.registry.unfinished or made.batcher.get_stats()["pending"]:
                await made.round()
            assert made.runtime.ids == [f"first {i}" for i in range(4)]
            await made.ask("after")

    run(main())


def test_g7_cancelled_before_it_came_it_is_not_even_queued() -> None:
    async def main() -> None:
        async with world() as made:
            cancel = asyncio.Event()
            cancel.set()
            with pytest.raises(Cancelled):
                await made.ask("s", cancel=cancel)
            await made.round()
            assert made.runtime.messages == []
            assert made.registry.snapshot()["registered"] == 0

    run(main())


def test_g7_who_watches_for_a_cancel_stops_with_its_stream() -> None:
    async def main() -> None:
        async with world() as made:
            cancel = asyncio.Event()
            await made.ask("s", cancel=cancel)
            before = len(asyncio.all_tasks())
            made.runtime.end("s")
            await made.round()
            assert len(asyncio.all_tasks()) == before - 1

    run(main())


# -- backpressure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["backpressure", "slowConsumer"])
def test_g8_a_slow_reader_pauses_its_own_partition_and_no_other(event: str) -> None:
    async def main() -> None:
        paused: list[SchedulerPaused] = []

        def sink(said: Any) -> None:
            if isinstance(said, SchedulerPaused):
                paused.append(said)

        async with world(GenerateBatcherConfig(pause_on_backpressure_ms=5000.0), sinks=[sink]) as made:
            await made.ask("slow", model_id="a")
            made.runtime.say("stream.event", {"stream_id": "slow", "event": event})
            await made.round()
            waits = made.ask("waits", "urgent", model_id="a")
            await made.ask("other", model_id="b")
            await made.round()
            assert made.runtime.ids == ["slow", "other"]
            assert made.batcher.get_stats()["backpressure_pauses"] == 1
            (pause,) = paused
            assert pause.partition == ("a", "", "")
            assert pause.until - pause.at == pytest.approx(5.0)
            waits.cancel()

    run(main())


def test_g8_a_pause_ends_by_itself() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(pause_on_backpressure_ms=5.0)) as made:
            await made.ask("slow")
            made.runtime.say("stream.event", {"stream_id": "slow", "event": "backpressure"})
            await made.round()
            assert (await made.ask("waits"))["stream_id"] == "waits"

    run(main())


def test_g8_credits_of_a_request_are_its_window() -> None:
    async def main() -> None:
        async with world(window=8) as made:
            await made.ask("usual")
            own = made.registry.register("own")
            await made.ask("own", credits=4)
            assert [one.get("credits") for _, (one,) in made.runtime.messages] == [8, 4]
            made.runtime.chunk("own", 4)
            await own.read()
            await made.round()
            assert made.runtime.credits == {"own": 4}

    run(main())


# -- what may share a message ------------------------------------------------------------------------------------------


def test_g2_models_draft_models_and_guidance_modes_never_share_a_message() -> None:
    async def main() -> None:
        kinds: list[dict[str, Any]] = [
            {"model_id": "a"},
            {"model_id": "b"},
            {"model_id": "a", "draft_model": "d"},
            {"model_id": "a", "guidance": {"mode": "json"}},
            {"model_id": "a", "guidance": {"mode": "regex"}},
        ]
        async with world() as made:
            await asyncio.gather(*(made.ask(**kind) for _ in range(3) for kind in kinds))
            assert made.runtime.sizes == [3] * 5
            for _, requests in made.runtime.messages:
                assert len({str({**one, "stream_id": ""}) for one in requests}) == 1
            assert len(made.batcher.get_stats()["partitions"]) == 5

    run(main())


def single(made: World, n: int, reason: str) -> None:
    assert [method for method, _ in made.runtime.messages] == ["generate"] * n
    stats = made.batcher.get_stats()
    assert stats["fallbacks"] == {reason: n}
    assert stats["batches"] == n
    assert [lane["fallbacks"] for lane in stats["partitions"]] == [{reason: n}]
    assert stats["partitions"][0]["single"]


def test_g10_without_the_capability_single_calls_are_used() -> None:
    async def main() -> None:
        async with world() as made:
            made.client.capabilities = frozenset()
            await asyncio.gather(*(made.ask() for _ in range(3)))
            single(made, 3, "capability")
            assert made.batcher.get_stats()["batching"] is False

    run(main())


def test_g10_disabled_single_calls_are_used() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(enabled=False)) as made:
            await asyncio.gather(*(made.ask() for _ in range(3)))
            single(made, 3, "disabled")

    run(main())


@pytest.mark.parametrize(("value", "off"), [("1", True), ("0", False), ("", False)])
def test_g10_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch, value: str, off: bool) -> None:
    monkeypatch.setenv(OFF, value)

    async def main() -> None:
        async with world() as made:
            await asyncio.gather(*(made.ask() for _ in range(3)))
            if off:
                single(made, 3, "environment")
            else:
                assert made.runtime.sizes == [3]

    run(main())


def test_g10_options_that_cannot_be_grouped_go_by_themselves() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(ungroupable_options=("logprobs", "timeout_ms"))) as made:
            await asyncio.gather(made.ask(), made.ask(logprobs=2), made.ask(timeout_ms=LONG), made.ask(), made.ask())
            assert sorted(made.runtime.sizes) == [1, 1, 3]
            assert made.batcher.get_stats()["fallbacks"] == {"options": 2}

    run(main())


@pytest.mark.parametrize(
    "config",
    [
        replace(HELD, ungroupable_options=("follows",)),
        GenerateBatcherConfig(ungroupable_options=("prompt_logprobs",), pause_on_backpressure_ms=1000.0),
    ],
    ids=["the first is held", "messages of its kind pause"],
)
def test_g10_a_request_goes_behind_the_one_that_it_follows(config: GenerateBatcherConfig) -> None:
    async def main() -> None:
        async with world(config) as made:
            await computing(made)
            await made.ask("slow", prompt_logprobs=1)
            made.runtime.end("slow", "backpressure")
            await made.round()
            made.runtime.messages.clear()
            asked = [made.ask("first", prompt_logprobs=1), made.ask("second", follows="first")]
            await asyncio.gather(*asked)
            assert made.runtime.ids == ["first", "second"]

    run(main())


def test_g10_single_calls_keep_to_room_tiers_and_refusals() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(enabled=False, stream_limit=1, max_pending=3)) as made:
            await made.ask("first")
            made.runtime.refusing["refused"] = error_of(Shed("not in time"))
            refused, waits = made.ask("refused", "urgent"), made.ask("waits")
            await made.round()
            assert made.runtime.ids == ["first"]
            made.runtime.end("first")
            assert isinstance(await outcome(refused), Shed)
            assert (await waits)["stream_id"] == "waits"

    run(main())


def test_g9_what_could_be_too_large_together_goes_alone_and_only_what_is_too_large_fails() -> None:
    async def main() -> None:
        async with world() as made:
            assert made.client.peer is not None
            made.client.peer.most = 350_000
            large = [made.ask(f"s{i}", prompt="x" * 300_000) for i in range(2)]
            larger = made.ask("larger", prompt="x" * 400_000)
            assert [(await one)["stream_id"] for one in large] == ["s0", "s1"]
            assert "at most" in str(await outcome(larger))
            assert made.registry.active_count() == 2
            assert made.batcher.get_stats()["fallbacks"] == {"oversize": 3}

    run(main())


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 1])
def test_g14_an_answer_of_the_wrong_length_fails_its_message_and_stops_its_streams(wrong: int) -> None:
    async def main() -> None:
        async with world() as made:
            made.runtime.wrong = wrong
            answers = await asyncio.gather(*(outcome(made.ask(f"s{i}")) for i in range(3)))
            for answer in answers:
                assert isinstance(answer, ProtocolError)
                assert f"{3 + wrong} requests of 3" in answer.message
            assert len({id(answer) for answer in answers}) == 3, "each its own: tracebacks do not mix"
            assert made.registry.active_count() == 0
            await made.round()
            assert made.runtime.cancels == ["s0", "s1", "s2"]
            assert made.batcher.get_stats()["transport_errors"] == 1
            made.runtime.wrong = 0
            await made.ask("next")

    run(main())


def test_g9_an_answer_that_tells_of_another_stream_or_of_none_fails_that_request_alone() -> None:
    async def main() -> None:
        async with world(gated=True) as made:
            tasks = [outcome(made.ask(f"s{i}")) for i in range(4)]
            gathered = asyncio.gather(*tasks)
            await made.runtime.until(lambda: made.runtime.calls)
            request = made.runtime.calls.pop()
            assert made.runtime.peer is not None
            good = {"success": True, "result": {"stream_id": "s0", "prompt_tokens": 1}}
            made.runtime.peer.respond(request, {"results": [good, good, {"success": True}, {"success": False}]})
            answers = await gathered
            assert answers[0] == {"stream_id": "s0", "prompt_tokens": 1}
            assert [type(answer) for answer in answers[1:]] == [ProtocolError] * 3
            await made.round()
            assert made.runtime.cancels == ["s1", "s2"], "what was refused needs no cancel"
            assert made.registry.active_count() == 1

    run(main())


def test_g14_an_error_for_the_whole_message_is_every_callers() -> None:
    async def main() -> None:
        async with world(gated=True) as made:
            tasks = [made.ask(f"s{i}") for i in range(2)]
            await made.runtime.until(lambda: made.runtime.calls)
            made.runtime.fail(error_of(Closed("shutting down")))
            for task in tasks:
                assert isinstance(await outcome(task), Closed)
            assert made.registry.active_count() == 0

    run(main())


def test_g14_a_runtime_that_does_not_answer_in_time_fails_the_message_and_is_told_to_stop() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(call_timeout_ms=5.0), gated=True) as made:
            answers = await asyncio.gather(*(outcome(made.ask(f"s{i}")) for i in range(2)))
            assert [type(answer) for answer in answers] == [ProcessorHung] * 2
            assert "within 5 ms" in answers[0].message
            await made.round()
            assert made.runtime.cancels == ["s0", "s1"]
            assert made.registry.active_count() == 0
            made.runtime.answer()  # late: of no use to anybody
            await made.round()
            assert made.registry.snapshot()["stray_notifications"] == {"unknown_stream": 2}

    run(main())


def test_g14_a_dead_runtime_fails_its_callers_at_once_and_the_next_serves_what_comes() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=2), gated=True) as made:
            out = [made.ask(f"out{i}") for i in range(2)]
            await made.runtime.until(lambda: made.runtime.calls)
            waits = made.ask("waits")
            await made.round()
            made.runtime.die()
            for task in out:
                error = await outcome(task)
                assert isinstance(error, ConnectionLost)
                assert (error.code, error.retry_safe, error.written) == ("worker_lost", False, True)
            for task in (waits, made.ask("comes now")):
                error = await outcome(task)
                assert isinstance(error, Unavailable), "never written: a retry is safe"
                assert error.retry_safe
            assert made.registry.active_count() == 0
            await made.connect()
            made.runtime.gated = False
            await made.ask("next")
            assert made.runtime.ids == ["out0", "out1", "next"], "nothing is written twice"

    run(main())


def test_x2_without_a_runtime_a_request_is_refused_before_it_is_admitted() -> None:
    async def main() -> None:
        async with world() as made:
            made.runtime.die()
            await made.client.gone.wait()
            asking = made.ask("s")
            await asyncio.sleep(0)
            assert isinstance(asking.exception(), Unavailable)
            assert made.batcher.get_stats()["enqueued_by_priority"]["default"] == 0
            assert made.registry.find("s") is None

    run(main())


def test_g14_a_message_that_was_never_written_is_unavailable() -> None:
    async def main() -> None:
        async with world() as made:
            assert made.client.peer is not None
            made.client.lost = lambda peer, error: None  # type: ignore[method-assign]
            made.client.peer.abort()
            error = await outcome(made.ask())
            assert isinstance(error, Unavailable)
            assert made.registry.active_count() == 0
            made.client.peer = None

    run(main())


def test_x2_nothing_of_a_request_that_failed_lies_in_circles() -> None:
    """The collector stops the loop; what a request leaves behind is gone without it."""

    async def some(made: World, kinds: list[type[BaseException]]) -> None:
        left = asyncio.Event()
        for n in range(10):
            made.runtime.refusing[f"refused{n}"] = error_of(QueueFull("no"))
            task = made.ask(f"refused{n}")
            task.add_done_callback(lambda task: (kinds.append(type(task.exception())), left.set()))
            await left.wait()
            left.clear()
            made.runtime.wrong = 1
            task = made.ask(f"wrong{n}")
            task.add_done_callback(lambda task: (kinds.append(type(task.exception())), left.set()))
            await left.wait()
            left.clear()
            made.runtime.wrong = 0

    async def main() -> None:
        async with world() as made:
            kinds: list[type[BaseException]] = []
            await some(made, kinds)
            await made.round()
            gc.collect()
            gc.disable()
            try:
                await some(made, kinds)
                await made.round()
                assert gc.collect() < 10, "of twenty requests"
            finally:
                gc.enable()
            assert kinds == [QueueFull, ProtocolError] * 20

    run(main())


# -- time --------------------------------------------------------------------------------------------------------------


def test_g14_a_timeout_is_its_requests_own_while_it_waits() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=1)) as made:
            await made.ask("first")
            short, patient = made.ask("short", timeout_ms=LONG), made.ask("patient")
            await made.round()
            await made.later(OVER)
            assert isinstance(await outcome(short), Expired)
            made.runtime.end("first")
            await patient
            assert made.runtime.ids == ["first", "patient"]
            assert made.runtime.cancels == []
            assert made.batcher.get_stats()["expired_requests"] == 1

    run(main())


def test_g14_a_timeout_is_its_requests_own_while_it_is_out() -> None:
    async def main() -> None:
        async with world(gated=True) as made:
            short, patient = made.ask("short", timeout_ms=LONG), made.ask("patient")
            await made.runtime.until(lambda: made.runtime.calls)
            assert not short.done()
            await made.later(OVER)
            assert isinstance(await outcome(short), Expired)
            await made.round()
            assert made.runtime.cancels == ["short"]
            assert not patient.done()
            made.runtime.answer()
            await patient
            await made.round()
            assert made.registry.active_count() == 1
            stats = made.batcher.get_stats()
            assert (stats["expired_requests"], stats["aborted_requests"]) == (1, 0)

    run(main())


def test_g14_the_stream_of_a_request_whose_time_is_over_says_so_and_keeps_its_place_until_it_is_stopped() -> None:
    async def main() -> None:
        async with world(gated=True) as made:
            handle = made.registry.register("short")
            short = made.ask("short", timeout_ms=LONG)
            await made.runtime.until(lambda: made.runtime.calls)
            await made.later(OVER)
            assert isinstance(await outcome(short), Expired)
            with pytest.raises(Expired):
                await handle.read()
            assert (handle.ended, made.registry.active_count()) == (True, 1)
            made.runtime.answer()
            await made.round()
            assert (made.runtime.cancels, made.registry.active_count()) == (["short"], 0)

    run(main())


def test_g14_a_timeout_ends_with_the_response() -> None:
    async def main() -> None:
        async with world() as made:
            await made.ask("s", timeout_ms=LONG)
            await made.later(OVER)
            assert made.runtime.cancels == []

    run(main())


def test_g14_the_time_until_the_first_token_counts_from_when_it_came() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=1)) as made:
            await made.ask("first")
            task = made.ask("s", timeout_ms=LONG, model_id="m")
            made.registry.register("own")
            own = asyncio.ensure_future(made.batcher.enqueue(GenerateParams(stream_id="own", timeout_ms=LONG)))
            await made.round()
            await made.later(5.0)
            made.runtime.end("first")
            await task
            made.runtime.end("s")
            await own
            sent = {one["stream_id"]: one.get("timeout_ms") for _, (one,) in made.runtime.messages}
            assert sent["s"] is None, "that is for the response alone"
            assert 0 < sent["own"] <= LONG - 5_000

    run(main())


# -- the end -----------------------------------------------------------------------------------------------------------


def test_g14_closing_lets_what_waits_be_answered_and_admits_nothing_more() -> None:
    async def main() -> None:
        async with world(HELD, gated=True) as made:
            await computing(made)
            tasks = [made.ask(f"s{i}") for i in range(2)]
            await made.round()
            assert made.runtime.ids == []
            closing = asyncio.ensure_future(made.batcher.close())
            await made.runtime.until(lambda: made.runtime.calls)
            with pytest.raises(Closed):
                await made.ask("late")
            made.runtime.answer()
            await closing
            assert [(await task)["stream_id"] for task in tasks] == ["s0", "s1"]

    run(main())


def test_g14_closing_settles_every_caller_in_time() -> None:
    async def main() -> None:
        async with world(GenerateBatcherConfig(stream_limit=1), gated=True) as made:
            out, waits = made.ask("out"), made.ask("waits")
            await made.runtime.until(lambda: made.runtime.calls)
            await made.batcher.close(timeout=0.005)
            assert isinstance(await outcome(out), CutShort)
            assert isinstance(await outcome(waits), Drained)
            await made.round()
            assert made.runtime.cancels == ["out"]
            assert made.registry.active_count() == 0
            await made.batcher.close()

    run(main())


def test_g14_closing_as_a_message_leaves_waits_for_no_answer() -> None:
    async def main() -> None:
        async with world(gated=True) as made:
            task = made.ask()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert made.batcher.get_stats()["messages_out"] == 1
            await made.batcher.close(drain=False)
            assert isinstance(await outcome(task), CutShort)
            await made.round()
            assert made.client.peer is not None
            assert made.client.peer._waiting == {}

    run(main())


# -- what it tells -----------------------------------------------------------------------------------------------------


def test_g5_every_message_is_told_once_after_its_answer() -> None:
    async def main() -> None:
        told: list[BatchDispatched] = []
        async with world(gated=True, on_batch_dispatched=told.append) as made:
            made.runtime.refusing["b"] = error_of(Shed("no"))
            began = made.clock()
            tasks = [made.ask("a"), made.ask("b", "background"), made.ask("c", "urgent")]
            await made.runtime.until(lambda: made.runtime.calls)
            assert told == []
            made.runtime.answer()
            await asyncio.gather(*map(outcome, tasks))
            (info,) = told
            assert (info.size, info.rejections) == (3, 1)
            assert info.priority_mix == {"urgent": 1, "default": 1, "background": 1}
            assert min(info.hold_ms, info.duration_ms) > 0.0
            assert info.hold_ms + info.duration_ms < 1e3 * (made.clock() - began)
            task = made.ask("d")
            await made.runtime.until(lambda: made.runtime.calls)
            made.runtime.fail(RpcError(-32603, "broken"))
            await outcome(task)
            assert [one.rejections for one in told] == [1, 1]

    run(main())


def test_g5_a_hook_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        def hook(info: BatchDispatched) -> None:
            raise RuntimeError("the hook's own")

        async with world(on_batch_dispatched=hook) as made:
            await made.ask("a")

    run(main())
    assert "a sink failed on BatchFinished" in caplog.text
    assert "the hook's own" in caplog.text


def test_g4_a_step_begins_with_tokens_or_a_message_to_an_idle_runtime_and_takes_what_streams_that_ended_say() -> None:
    async def main() -> None:
        async with world() as made:
            began: list[float] = []
            steps = made.batcher._steps
            steps.begins = began.append  # type: ignore[method-assign]
            before = made.clock()
            await made.ask("first")
            await made.ask("second")
            assert len(began) == 1, "the runtime was idle before the first, and is not before the second"
            for id in ("first", "second"):
                made.runtime.chunk(id)
            await made.round()
            assert len(began) == 3
            assert before <= began[0] <= began[-1] <= made.clock()
            made.runtime.stats("first", 3, 2)
            made.runtime.stats("second", 3, 1)
            for id in ("first", "second"):
                made.runtime.end(id)
            await made.round()
            assert steps._step == pytest.approx(0.0005), "one token alone says nothing of a step"

    run(main())


def test_g4_who_comes_while_a_step_is_computed_shares_a_message_and_between_steps_leaves_alone() -> None:
    async def main() -> None:
        async with world(HELD) as made:
            made.batcher._steps.took(1.0)
            for round in range(2):
                await made.ask(f"{round} first")
                rest = [made.ask(f"{round} {i}") for i in range(3)]
                await made.later(0.2)
                assert made.runtime.sizes == [1, 3] * round + [1], "half of the step is not over"
                await made.later(0.3)
                await asyncio.gather(*rest)
                assert made.runtime.sizes == [1, 3] * (round + 1)
                for id in list(made.runtime.live):
                    made.runtime.end(id)
                await made.round()

    run(main())


def test_g13_stats_and_series_tell_what_was_done() -> None:
    async def main() -> None:
        registry = CollectorRegistry()
        series = SeriesSet(GENERATE_BATCHER, registry)
        async with world(GenerateBatcherConfig(stream_limit=4), series=series) as made:
            await asyncio.gather(
                made.ask(model_id="m"), made.ask(model_id="m"), made.ask(priority="urgent", model_id="m")
            )
            await made.ask(model_id="m")
            waits = [made.ask(priority=tier, model_id="m") for tier in ("default", "background", "background")]
            await made.round()
            stats = made.batcher.get_stats()
            assert (stats["pending"], stats["active_streams"], stats["stream_limit"]) == (3, 4, 4)
            (lane,) = stats["partitions"]
            assert (lane["model_id"], lane["draft_model"], lane["guidance"]) == ("m", "", "")
            assert lane["pending"] == {"urgent": 0, "default": 1, "background": 2}
            assert (lane["batches"], lane["last_batch"], lane["mean_batch"]) == (2, 1, 2.0)
            assert lane["priority_mix"] == {"urgent": 1, "default": 3, "background": 0}
            assert 0.0 < lane["queue_wait_p50_ms"] <= lane["queue_wait_p95_ms"]
            value = registry.get_sample_value
            name = "reflex_generate_batcher"
            assert value(f"{name}_batch_size_count") == 2
            assert value(f"{name}_batch_size_sum") == 4
            assert value(f"{name}_queue_wait_ms_count") == 4
            assert value(f"{name}_priority_mix_total", {"priority": "urgent"}) == 1
            assert value(f"{name}_fallback_total", {"reason": "capability"}) == 0
            made.client.capabilities = frozenset()
            last = made.ask()
            await made.round()
            assert value(f"{name}_fallback_total", {"reason": "capability"}) == 1
            for task in (*waits, last):
                task.cancel()

    run(main())


def test_g13_batchers_that_share_series_add_up() -> None:
    registry = CollectorRegistry()
    series = SeriesSet(GENERATE_BATCHER, registry)

    async def main() -> None:
        for _ in range(2):
            async with world(series=series) as made:
                await made.ask()

    run(main())
    assert registry.get_sample_value("reflex_generate_batcher_batch_size_count") == 2


def test_g3_background_that_waits_long_counts_as_default_and_is_counted() -> None:
    async def main() -> None:
        config = GenerateBatcherConfig(min_hold_ms=0.0, max_hold_ms=0.5, stream_limit=1)
        async with world(config) as made:
            await made.ask("first")
            background = made.ask("background", "background")
            await made.round()
            await made.later(0.01)  # over 10 x max_hold
            default = made.ask("default")
            await made.round()
            made.runtime.end("first")
            await background
            assert made.runtime.ids == ["first", "background"]
            assert made.batcher.get_stats()["promoted_background"] == 1
            made.runtime.end("background")
            await default

    run(main())


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_size", 1025),
        ("min_hold_ms", -0.1),
        ("max_hold_ms", 1001.0),
        ("background_extra_ms", float("nan")),
        ("pause_on_backpressure_ms", -1.0),
        ("max_pending", 0),
        ("max_pending_tokens", 0),
        ("stream_limit", 0),
        ("call_timeout_ms", 0.0),
    ],
)
def test_g11_a_setting_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"generate_batcher.{name}={value}: must be in \["):
        replace(GenerateBatcherConfig(), **{name: value})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_hold_ms": 3.5}, "min_hold_ms=3.5: must be at most max_hold_ms, which is 3.0"),
        ({"ungroupable_options": ("tempo",)}, "ungroupable_options='tempo': must be fields of a request"),
    ],
)
def test_g11_settings_that_do_not_fit_together_are_named(options: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        GenerateBatcherConfig(**options)


def test_g11_the_defaults_are_the_contracts() -> None:
    assert {field.name: field.default for field in fields(GenerateBatcherConfig)} == {
        "enabled": True,
        "max_batch_size": 16,
        "min_hold_ms": 0.75,
        "max_hold_ms": 3.0,
        "background_extra_ms": 2.0,
        "pause_on_backpressure_ms": 20.0,
        "max_pending": 1000,
        "max_pending_tokens": 1_000_000,
        "stream_limit": 64,
        "call_timeout_ms": 30_000.0,
        "ungroupable_options": (),
    }


def test_g11_the_settings_reach_the_scheduler() -> None:
    async def main() -> None:
        registry = StreamRegistry()
        config = GenerateBatcherConfig(
            max_batch_size=7, min_hold_ms=1.0, max_hold_ms=2.0, background_extra_ms=4.0, max_pending=9
        )
        batcher = GenerateBatcher(Client(registry), registry, config)
        group = batcher._dispatcher.scheduler._groups["generate"].config
        assert (group.flush.max_batch_size, group.capacity) == (7, 9)
        assert group.flush.hold_max == pytest.approx((0.0, 0.002, 0.006))
        assert group.promote_after == pytest.approx(0.02)
        assert batcher._steps._least == pytest.approx(0.001)
        assert Runtime().sizes == []

    run(main())


def test_g13_partitions_that_are_remembered_are_bounded_and_who_waits_is_not_forgotten() -> None:
    stats = BatcherStats(None, None)

    def queued(model: str) -> Ticket:
        ticket = Ticket(Request(SimpleNamespace(priority="default"), partition=(model, "", "")), 0, 0.0)
        stats(RequestQueued(0.0, ticket))
        return ticket

    queued("waits")
    for n in range(2 * MOST_PARTITIONS):
        stats(RequestSettled(0.0, queued(f"m{n}")))
    lanes = stats.lanes()
    assert len(lanes) == MOST_PARTITIONS
    assert [lane["model_id"] for lane in lanes if lane["pending"]["default"]] == ["waits"]


def test_g14_a_batcher_that_was_closed_before_anybody_asked_admits_nobody() -> None:
    async def main() -> None:
        async with world() as made:
            await made.batcher.close()
            assert isinstance(await outcome(made.ask("late")), Closed)
            assert made.runtime.ids == []

    run(main())


@pytest.mark.parametrize("n", [10, 11, 16, 20, 33, 64])
def test_g12_at_the_default_limits_nine_in_ten_messages_are_saved(n: int) -> None:
    """Every time, from the first burst on."""

    async def main() -> None:
        async with world() as made:
            for burst in range(6):
                before = len(made.runtime.messages)
                answers = await asyncio.gather(*(made.ask(f"{burst}-{i}") for i in range(n)))
                assert [answer["stream_id"] for answer in answers] == [f"{burst}-{i}" for i in range(n)]
                messages = len(made.runtime.messages) - before
                assert messages <= n * 0.1, (burst, messages)
                assert max(made.runtime.sizes) <= 16
                for id in list(made.runtime.live):
                    made.runtime.end(id)
                assert await made.registry.wait_idle(10.0)

    run(main())
