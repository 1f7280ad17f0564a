"""The runtime process behind a connection: a worker with an engine that a test drives, on real socket pairs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ipc.engines import BATCH_GENERATE, Ends, ends, params, play
from reflex_runtime.core.errors import (
    Cancelled,
    Closed,
    ConfigError,
    Drained,
    ProcessorError,
    QueueFull,
    ReflexError,
)
from reflex_runtime.ipc import messages, streams, worker
from reflex_runtime.ipc.frames import INVALID_PARAMS, METHOD_NOT_FOUND, ProtocolError
from reflex_runtime.ipc.messages import CHUNK, EVENT, PROMPT, STATS, ScoredToken, Started
from reflex_runtime.ipc.spawn import unheard
from reflex_runtime.version import __version__


async def refused(both: Ends, method: str, params: Any) -> ReflexError:
    with pytest.raises(ReflexError) as caught:
        await both.call(method, params)
    return caught.value


# -- G9: batches -------------------------------------------------------------------------------------------------------


def test_g9_a_batch_is_answered_in_order_and_its_streams_run() -> None:
    async def main() -> None:
        async with ends() as both:
            result = await both.batch(*(params(f"s{n}") for n in range(5)))
            assert [item.result for item in result.results] == [Started(f"s{n}", 3) for n in range(5)]
            assert (result.size, result.groups) == (5, {"m": 5})
            assert result.duration_ms > 0
            for n, stream in enumerate(both.engine.streams.values()):
                stream.say("a", f"b{n}", finish="stop")
            await both.front.until(lambda: both.front.ended(*(f"s{n}" for n in range(5))))
            for n in range(5):
                assert both.front.of(f"s{n}") == ["a", f"b{n}", "|", "stats", "<completed>"]

    play(main())


def test_g9_an_item_that_is_wrong_fails_alone() -> None:
    async def main() -> None:
        async with ends() as both:
            both.engine.faults |= {"full": QueueFull("full", waiting=9), "broken": ZeroDivisionError("oops")}
            result = await both.batch(
                params("first"),
                {"model_id": "m", "prompt": "no id"},
                params("first", max_tokens=7),
                17,
                params("full"),
                params("broken"),
                params(""),
                params("x" * 201),
                params("new\nline"),
                params("typed", max_tokens="many"),
                params("poor", credits=0),
                params("else", model_id="other"),
                params("last"),
            )
            codes = [item.error.code if item.error is not None else None for item in result.results]
            assert codes == [None, *[INVALID_PARAMS] * 3, -32000, -32000, *[INVALID_PARAMS] * 6, None]
            assert [item.success for item in result.results] == [code is None for code in codes]
            told = [item.error.message if item.error is not None else "" for item in result.results]
            assert "stream_id" in told[1]
            assert "twice in a batch" in told[2]
            assert "oops" in told[5]
            assert "max_tokens" in told[9]
            assert "credits=0" in told[10]
            assert "'other'" in told[11]
            assert both.engine.asked == ["first", "full", "broken", "last"]
            assert both.engine.streams["first"].params.max_tokens == 16  # the first of the two
            both.engine.streams["first"].say("x", finish="stop")
            await both.front.until(lambda: both.front.ended("first"))
            assert {note.stream_id for _, note in both.front.said} == {"first"}  # nothing of those that did not begin

    play(main())


def test_g9_the_first_of_duplicates_runs_and_an_id_in_use_is_refused_until_its_stream_ends() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a"))
            [item] = (await both.batch(params("a"))).results
            assert item.error is not None
            assert item.error.code == INVALID_PARAMS
            assert "has not ended" in item.error.message
            error = await refused(both, "generate", params("a"))
            assert isinstance(error, ProtocolError)
            both.engine.streams["a"].say("x", finish="stop")
            await both.front.until(lambda: both.front.ended("a"))
            assert (await both.batch(params("a"))).results[0].success

    play(main())


def test_g9_an_empty_batch_has_empty_results_and_one_that_is_no_list_fails() -> None:
    async def main() -> None:
        async with ends() as both:
            assert (await both.batch()).results == []
            for wrong in ({}, {"requests": {}}, [], {"requests": [params("a")] * (1025)}):
                error = await refused(both, BATCH_GENERATE, wrong)
                assert isinstance(error, ProtocolError)
                assert error.rpc_code == INVALID_PARAMS
            assert both.engine.asked == []

    play(main())


def test_g9_batches_are_reported() -> None:
    async def main() -> None:
        async with ends() as both:
            told = await both.batch(params("b"), params("c", model_id=""), params("d", draft_model="small"), 3)
            assert (told.size, told.groups) == (4, {"m": 1, "": 1, "m+small": 1})
            assert told.duration_ms > 0

    play(main())


def test_g9_one_that_takes_long_to_begin_does_not_keep_others_from_running() -> None:
    async def main() -> None:
        async with ends() as both:
            gate = both.engine.gates["slow"] = asyncio.Event()
            batch = asyncio.ensure_future(both.batch(params("slow"), params("fast")))
            while "fast" not in both.engine.streams:
                await both.settled()
            both.engine.streams["fast"].say("x", finish="stop")
            await both.front.until(lambda: both.front.ended("fast"))
            assert not batch.done()
            gate.set()
            assert [item.success for item in (await batch).results] == [True, True]

    play(main())


def test_g9_drafts_and_guidance_are_refused() -> None:
    async def main() -> None:
        asked = {"draft_model": "small"}, {"guidance": {"mode": "json"}}
        async with ends() as both:
            for more in asked:
                error = await refused(both, "generate", params("a", **more))
                assert isinstance(error, ProtocolError)
                assert error.rpc_code == INVALID_PARAMS
            error = await refused(both, "check_draft", {"model_id": "m"})
            assert isinstance(error, ProtocolError)
            assert error.rpc_code == INVALID_PARAMS
            assert both.engine.asked == []

    play(main())


# -- G15: what streams say ---------------------------------------------------------------------------------------------


def test_g15_chunks_then_stats_then_one_terminal_event() -> None:
    async def main() -> None:
        now = [5.0]
        async with ends(clock=lambda: now[0]) as both:
            await both.call("generate", params("a"))
            stream = both.engine.streams["a"]
            now[0] = 6.0
            stream.say("x")
            await both.front.until(lambda: both.front.of("a") == ["x"])
            now[0] = 7.5
            stream.say("y", "z", finish="length")
            await both.front.until(lambda: both.front.ended("a"))
            assert both.front.of("a") == ["x", "y", "z", "|", "stats", "<completed>"]
            [first, last] = [chunk for method, chunk in both.front.said if method == CHUNK]
            assert [(token.text, token.token_id, token.finish) for token in first.tokens + last.tokens] == [
                ("x", 1, None),
                ("y", 2, None),
                ("z", 3, "length"),
            ]
            stats = both.front.last(STATS, "a")
            assert (stats.prompt_tokens, stats.output_tokens, stats.cached_tokens) == (3, 3, 1)
            assert (stats.ttft_ms, stats.duration_ms) == (1000.0, 2500.0)
            assert await both.call("cancel", {"stream_id": "a"}) == {"cancelled": False}
            assert both.front.of("a").count("stats") == 1

    play(main())


def test_g15_a_stream_that_ends_without_a_last_token_is_final_all_the_same() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a"), params("b"))
            both.engine.streams["a"].end()
            both.engine.streams["b"].say("x")
            both.engine.streams["b"].end()
            await both.front.until(lambda: both.front.ended("a", "b"))
            assert both.front.of("a") == ["|", "stats", "<completed>"]
            assert both.front.of("b") == ["x", "|", "stats", "<completed>"]
            assert both.front.last(STATS, "a").ttft_ms is None

    play(main())


def test_l9_what_is_said_of_a_prompt_comes_in_parts_before_the_tokens_and_delays_no_other_stream(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SCORES_A_TURN", 6)

    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a", prompt_logprobs=1), params("b", follows="a"), params("c", prompt_logprobs=0))
            a, b, c = both.engine.streams.values()
            a.prompt_scores += [ScoredToken(n, -float(n), ((n, -float(n)),)) for n in range(10)]
            c.prompt_scores += [ScoredToken(n, -1.0) for n in range(3)]
            b.say("y", finish="stop")  # its prompt is that of the first, which has not been told of
            c.say("z", finish="stop")
            await both.front.until(lambda: both.front.ended("c"))
            assert both.front.of("c") == [3, "z", "|", "stats", "<completed>"]
            assert both.front.of("b") == []
            a.say("x", finish="stop")
            await both.front.until(lambda: both.front.ended("a", "b"))
            assert both.front.of("a") == [3, 3, 3, 1, "x", "|", "stats", "<completed>"]
            assert both.front.of("b") == ["y", "|", "stats", "<completed>"]
            parts = [said.tokens for name, said in both.front.said if name == PROMPT and said.stream_id == "a"]
            told = [token for part in parts for token in part]
            assert told == [ScoredToken(n, -float(n), ((n, -float(n)),)) for n in range(10)]
            order = [(name, said.stream_id) for name, said in both.front.said if name in (PROMPT, CHUNK)]
            assert order.index((CHUNK, "b")) > max(at for at, one in enumerate(order) if one == (PROMPT, "a"))

    play(main())


def test_l9_one_that_follows_goes_on_when_the_first_ends_untold() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a", prompt_logprobs=1), params("b", follows="a"))
            both.engine.streams["b"].say("y", finish="stop")
            await both.settled()
            assert both.front.of("b") == []
            both.peer.notify("cancel", {"stream_id": "a"})
            await both.front.until(lambda: both.front.ended("a", "b"))
            assert both.front.of("b") == ["y", "|", "stats", "<completed>"]

    play(main())


def test_g15_a_stream_whose_engine_fails_ends_with_that_error_after_what_it_said() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a"), params("b"), params("c"))
            failed, broken, well = both.engine.streams.values()
            failed.say("x")
            failed.end(ProcessorError("the step failed"))
            broken.say("x")
            broken.take = lambda most=None: 1 / 0  # type: ignore[method-assign, assignment, return-value]
            well.say("x", finish="stop")
            await both.front.until(lambda: both.front.ended("a", "b", "c"))
            assert both.front.of("a") == ["x", "stats", "<error>"]
            assert both.front.last(EVENT, "a").error.message == "the step failed"
            assert both.front.of("b") == ["stats", "<error>"]
            assert "ZeroDivisionError" in both.front.last(EVENT, "b").error.message
            assert broken.closed
            assert both.front.of("c") == ["x", "|", "stats", "<completed>"]

    play(main())


def test_g15_a_step_of_all_streams_is_one_frame() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(*(params(f"s{n}") for n in range(32)))
            await both.settled()
            before = both.theirs.frames
            for stream in both.engine.streams.values():
                stream.say("x")
            await both.front.until(lambda: len(both.front.said) == 32)
            assert both.theirs.frames == before + 1

    play(main())


# -- G7: cancelling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_call", [True, False])
def test_g7_cancel_of_a_stream_that_runs(as_call: bool) -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a"), params("b"))
            both.engine.streams["a"].say("x")
            await both.front.until(lambda: both.front.of("a") == ["x"])
            if as_call:
                assert await both.call("cancel", {"stream_id": "a"}) == {"cancelled": True}
            else:
                both.peer.notify("cancel", {"stream_id": "a"})
            await both.front.until(lambda: both.front.ended("a"))
            assert both.engine.streams["a"].closed
            assert not both.engine.streams["b"].closed
            both.engine.streams["a"].say("late")
            both.engine.streams["a"].end(Cancelled("taken back"))
            await both.settled()
            assert both.front.of("a") == ["x", "stats", "<cancelled>"]
            assert both.front.last(EVENT, "a").error is None

    play(main())


@pytest.mark.parametrize("single", [True, False])
def test_g7_cancel_before_the_submission_has_finished(single: bool) -> None:
    async def main() -> None:
        async with ends() as both:
            gate = both.engine.gates["a"] = asyncio.Event()
            if single:
                asked = both.peer.call("generate", params("a"))
            else:
                asked = both.peer.call(BATCH_GENERATE, {"requests": [params("a"), params("b")]})
            while both.engine.asked[:1] != ["a"]:
                await both.settled()
            for _ in range(2):
                assert await both.call("cancel", {"stream_id": "a"}) == {"cancelled": True}
            gate.set()
            if single:
                with pytest.raises(Cancelled):
                    await asked
            else:
                items = worker_items(await asked)
                assert [item["success"] for item in items] == [False, True]
                assert items[0]["error"]["data"]["type"] == "Cancelled"
            await both.settled()
            assert both.engine.asked[0] == "a"
            assert both.engine.streams["a"].closed  # as soon as it was there
            assert both.front.of("a") == []
            assert (await both.call("generate", params("a")))["stream_id"] == "a"  # and its name is free

    play(main())


def worker_items(answer: Any) -> list[dict[str, Any]]:
    from ipc.engines import _ANY

    items: list[dict[str, Any]] = _ANY.read(answer)["results"]
    return items


def test_g7_cancel_of_one_that_waits_for_its_leader_never_reaches_the_engine() -> None:
    async def main() -> None:
        async with ends() as both:
            gate = both.engine.gates["a"] = asyncio.Event()
            batch = asyncio.ensure_future(both.batch(params("a"), params("b", follows="a"), params("c", follows="a")))
            while both.engine.asked != ["a"]:
                await both.settled()
            assert await both.call("cancel", {"stream_id": "b"}) == {"cancelled": True}
            gate.set()
            assert [item.success for item in (await batch).results] == [True, False, True]
            assert both.engine.asked == ["a", "c"]

    play(main())


def test_g7_cancel_after_the_end_or_of_nobody_is_nothing() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a"))
            both.engine.streams["a"].say("x", finish="stop")
            await both.front.until(lambda: both.front.ended("a"))
            for name in ("a", "nobody"):
                assert await both.call("cancel", {"stream_id": name}) == {"cancelled": False}
            both.peer.notify("cancel", {"stream_id": "a"})
            both.peer.notify("cancel", {})  # wrong, and a notification is not answered
            await both.settled()
            assert both.front.of("a") == ["x", "|", "stats", "<completed>"]

    play(main())


def test_g7_cancel_in_the_same_frame_as_its_request() -> None:
    async def main() -> None:
        async with ends() as both:
            asked = both.peer.call("generate", params("a"))
            both.peer.notify("cancel", {"stream_id": "a"})
            with pytest.raises(Cancelled):
                await asked
            assert both.engine.asked == []

    play(main())


# -- following ---------------------------------------------------------------------------------------------------------


def test_one_that_follows_is_told_its_leader_once_that_is_there() -> None:
    async def main() -> None:
        async with ends() as both:
            gate = both.engine.gates["a"] = asyncio.Event()
            batch = asyncio.ensure_future(
                both.batch(
                    params("early", follows="a"),
                    params("a"),
                    params("b", follows="a"),
                    params("c", follows="nobody"),
                )
            )
            while len(both.engine.asked) < 3:
                await both.settled()
            gate.set()
            await batch
            streams = both.engine.streams
            assert streams["b"].leader is streams["a"]
            assert [streams[name].leader for name in ("early", "c")] == [None, None]
            streams["a"].say("x")
            await both.batch(params("late", follows="a"))
            assert streams["late"].leader is None  # the prompt is there

    play(main())


def test_one_whose_leader_fails_begins_by_itself() -> None:
    async def main() -> None:
        async with ends() as both:
            both.engine.faults["a"] = QueueFull("full")
            result = await both.batch(params("a"), params("b", follows="a"))
            assert [item.success for item in result.results] == [False, True]
            assert both.engine.streams["b"].leader is None

    play(main())


# -- G8: credits -------------------------------------------------------------------------------------------------------


def test_g8_credits_hold_one_stream_alone_and_nothing_goes_beyond_them() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("slow", credits=3), params("fast", credits=100))
            slow, fast = both.engine.streams.values()
            for n in range(20):
                slow.say(f"s{n}")
                fast.say(f"f{n}")
                await both.front.until(lambda n=n: f"f{n}" in both.front.of("fast"))  # type: ignore[misc]
            assert both.front.of("slow") == ["s0", "s1", "s2", "<backpressure>"]
            assert slow.unread == 17
            both.peer.notify("stream.credit", {"stream_id": "slow", "tokens": 2})
            await both.settled()
            assert both.front.of("slow") == ["s0", "s1", "s2", "<backpressure>", "s3", "s4"]
            both.peer.notify("stream.credit", {"stream_id": "slow", "tokens": 100})
            await both.settled()
            slow.say("end", finish="stop")
            await both.front.until(lambda: both.front.ended("slow"))
            told = both.front.of("slow")
            assert [word for word in told if word.startswith("s") and word != "stats"] == [f"s{n}" for n in range(20)]
            assert told[-4:] == ["end", "|", "stats", "<completed>"]

    play(main())


def test_g8_backpressure_is_told_once_for_each_stall() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a", credits=1))
            stream = both.engine.streams["a"]  # held at 8 unread, until they are 4
            stream.say("x")
            await both.settled()
            stream.say(*"1234567")
            await both.settled()
            assert both.front.of("a") == ["x"]  # no credits, and not held yet
            stream.say("8")
            await both.settled()
            stream.say("9")
            await both.settled()
            assert both.front.of("a") == ["x", "<backpressure>"]
            both.peer.notify("stream.credit", {"stream_id": "a", "tokens": 1})
            await both.settled()
            assert both.front.of("a") == ["x", "<backpressure>", "1"]  # still the same stall
            both.peer.notify("stream.credit", {"stream_id": "a", "tokens": 4})
            await both.settled()
            assert not stream.held
            stream.say(*"abcd")
            await both.settled()
            assert both.front.of("a") == ["x", "<backpressure>", *"12345", "<backpressure>"]
            both.peer.notify("stream.credit", {"stream_id": "a", "tokens": stream.unread})
            await both.settled()
            stream.say(*"ABCDEFGH")  # held again before anybody looked
            await both.settled()
            assert both.front.of("a")[2:] == [*"12345", "<backpressure>", *"6789abcd", "<backpressure>"]

    play(main())


def test_g8_the_end_needs_no_credits_but_what_was_said_before_it_does() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a", credits=1), params("b", credits=1), params("c", credits=1))
            a, b, c = both.engine.streams.values()
            a.say("x")
            a.end(ProcessorError("failed"))
            b.say("x", "y", finish="stop")
            c.say("x", "y")
            c.end(ProcessorError("failed"))
            await both.front.until(lambda: both.front.ended("a"))
            await both.settled()
            assert (both.front.of("b"), both.front.of("c")) == (["x"], ["x"])
            both.peer.notify("stream.credit", {"stream_id": "b", "tokens": 1})
            assert await both.call("cancel", {"stream_id": "c"}) == {"cancelled": True}
            await both.front.until(lambda: both.front.ended("b", "c"))
            assert both.front.of("b") == ["x", "y", "|", "stats", "<completed>"]
            assert both.front.of("c") == ["x", "stats", "<cancelled>"]

    play(main())


def test_g8_a_stream_that_its_engine_gave_up_for_its_reader_is_a_slow_consumer() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a", credits=1))
            stream = both.engine.streams["a"]
            stream.say(*"123456789")
            await both.settled()
            stream.close()
            stream.end(Cancelled("taken back"))
            await both.front.until(lambda: both.front.ended("a"))
            assert both.front.of("a") == ["1", "<backpressure>", "<slowConsumer>", "stats", "<error>"]
            assert both.front.last(EVENT, "a").error.data["type"] == "Cancelled"

    play(main())


@pytest.mark.parametrize("tokens", [0, -1, messages.MOST_CREDITS + 1, "many"])
def test_g8_credits_are_bounded(tokens: Any) -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a", credits=1))
            both.engine.streams["a"].say("x", "y")
            both.peer.notify("stream.credit", {"stream_id": "a", "tokens": tokens})
            both.peer.notify("stream.credit", {"stream_id": "nobody", "tokens": 1})
            await both.settled()
            assert both.front.of("a") == ["x"]

    play(main())


def test_g8_a_front_that_reads_nothing_holds_the_streams_at_their_engine() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a", credits=1_000_000))
            stream, transport = both.engine.streams["a"], both.peer._transport
            assert transport is not None
            transport.pause_reading()
            while not stream.unread:
                stream.say("x" * 50_000)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            said = stream.completion_tokens
            buffered = both.theirs.buffered
            for _ in range(5):
                stream.say("y")
                await asyncio.sleep(0)
            assert (stream.unread >= 5, both.theirs.buffered <= buffered) == (True, True)
            transport.resume_reading()
            stream.say("z", finish="stop")
            await both.front.until(lambda: both.front.ended("a"))
            assert len(both.front.of("a")) == said + 6 + 3

    play(main())


# -- models ------------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_and_asked() -> None:
    async def main() -> None:
        async with ends(loaded=False) as both:
            both.loading.set()
            info = await both.call("load_model", {"model_id": "m", "options": {"threads": 1}})
            assert info == {"context": 128, "options": {"threads": 1}}
            told = await both.call("runtime/info", {})
            assert (told["name"], told["version"], told["protocol"]) == ("reflex", __version__, 1)
            assert told["capabilities"] == ["batch_generate"]
            assert (await both.call("runtime/state", {}))["model"] == {"state": "ready"}
            assert await both.call("runtime/metrics", {}) == {"text": "streams 0\n"}

    play(main())


@pytest.mark.parametrize(
    ("method", "asked", "said"),
    [
        ("load_model", {"model_id": "n"}, "a process has one model, and 'm' is loaded"),
        ("load_model", {"model_id": ""}, "1 to 200"),
        ("load_model", {"model_id": "x\n"}, "1 to 200"),
        ("generate", {"stream_id": "a", "model_id": "x"}, "model_id='x': is not loaded here; 'm' is"),
        ("shutdown", {"timeout_s": -1}, "`float` >= 0.0 - at .*timeout_s"),
        ("shutdown", {"timeout_s": 1e9}, "`float` <= 3600.0 - at .*timeout_s"),
    ],
)
def test_wrong_params_are_told_with_the_field_and_the_value(method: str, asked: Any, said: str) -> None:
    async def main() -> None:
        async with ends() as both:
            with pytest.raises((ConfigError, ProtocolError), match=said):
                await both.call(method, asked)
            for wrong in ([], {"model_id": 1, "stream_id": 1, "timeout_s": "x"}):
                with pytest.raises(ProtocolError) as caught:
                    await both.call(method, wrong)
                assert caught.value.rpc_code == INVALID_PARAMS

    play(main())


def test_unknown_methods_and_notifications() -> None:
    async def main() -> None:
        async with ends() as both:
            for name in ("nonsense", "", "stream.credit", "__init__"):
                with pytest.raises(ProtocolError) as caught:
                    await both.call(name, {})
                assert caught.value.rpc_code == METHOD_NOT_FOUND
                both.peer.notify(name, {})
            await both.settled()

    play(main())


def test_a_model_that_cannot_be_loaded_may_be_loaded_again() -> None:
    async def main() -> None:
        async with ends(loaded=False) as both:
            both.loading.set()
            with pytest.raises(ConfigError, match="no model is"):
                await both.call("generate", params("a"))
            with pytest.raises(ProcessorError, match="FileNotFoundError: nowhere"):
                await both.call("load_model", {"model_id": "m", "path": "nowhere"})
            await both.call("load_model", {"model_id": "m"})

    play(main())


def test_nobody_loads_a_model_while_one_loads() -> None:
    async def main() -> None:
        async with ends(loaded=False) as both:
            loading = both.peer.call("load_model", {"model_id": "m"})
            with pytest.raises(ConfigError, match="'m' is loaded"):
                await both.call("load_model", {"model_id": "n"})
            assert (await both.call("runtime/state", {}))["loading"] is True
            both.loading.set()
            await loading

    play(main())


def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_STREAMS", 2)

    async def main() -> None:
        async with ends() as both:
            result = await both.batch(*(params(f"s{n}") for n in range(3)))
            assert [item.success for item in result.results] == [True, True, False]
            error = result.results[2].error
            assert error is not None
            assert error.data["type"] == "QueueFull"
            await both.call("cancel", {"stream_id": "s0"})
            await both.call("generate", params("s2"))

    play(main())


def test_an_engine_that_does_not_come_back_is_not_waited_for() -> None:
    async def main() -> None:
        async with ends(grace=0.01) as both:
            await both.batch(params("a"))
            both.engine.close_gate = asyncio.Event()
            assert await both.call("shutdown", {"drain": False, "timeout_s": 0}) == {"clean": False}
            assert both.front.of("a") == ["stats", "<error>"]

    play(main())


# -- the end -----------------------------------------------------------------------------------------------------------


def test_g14_shutdown_with_drain_lets_streams_finish_and_takes_nothing_more() -> None:
    async def main() -> None:
        async with ends() as both:
            gate = both.engine.gates["begins"] = asyncio.Event()
            await both.batch(params("a", credits=1))
            begins = both.peer.call("generate", params("begins"))
            await both.settled()
            shutdown = both.peer.call("shutdown", {"drain": True, "timeout_s": 60})
            for method, asked in (("generate", params("late")), ("load_model", {"model_id": "x"})):
                with pytest.raises(Closed):
                    await both.call(method, asked)
            assert (await both.call("runtime/state", {}))["closing"] is True
            gate.set()
            await begins
            both.engine.streams["begins"].say("x", finish="stop")
            both.engine.streams["a"].say("x", "y", finish="stop")
            await both.front.until(lambda: both.front.of("a") == ["x"])
            await both.settled()
            assert not shutdown.done()  # somebody may still read
            both.peer.notify("stream.credit", {"stream_id": "a", "tokens": 1})
            await shutdown
            assert await both.run is True
            assert both.worker.shutdown_called
            assert both.engine.closes[0][0] is True
            await both.front.until(lambda: bool(both.front.lost_with))
            for name in ("a", "begins"):
                assert both.front.of(name)[-3:] == ["|", "stats", "<completed>"]
            assert both.front.lost_with == [None]

    play(main())


@pytest.mark.parametrize(("drain", "timeout"), [(False, 60), (True, 0.05)])
def test_g14_shutdown_ends_what_does_not_finish_in_time(drain: bool, timeout: float) -> None:
    async def main() -> None:
        async with ends() as both:
            gate = both.engine.gates["begins"] = asyncio.Event()
            await both.batch(params("a"))
            begins = both.peer.call("generate", params("begins"))
            await both.settled()
            shutdowns = [both.peer.call("shutdown", {"drain": drain, "timeout_s": timeout}) for _ in range(2)]
            await both.front.until(lambda: both.front.ended("a"))
            assert both.front.of("a") == ["stats", "<error>"]
            gate.set()
            with pytest.raises(Drained):
                await begins
            await asyncio.gather(*shutdowns)
            assert await both.run is True

    play(main())


def test_g14_a_model_that_comes_while_the_process_shuts_down_is_closed() -> None:
    async def main() -> None:
        async with ends(loaded=False) as both:
            loading = both.peer.call("load_model", {"model_id": "m"})
            await both.settled()
            shutdown = both.peer.call("shutdown", {"drain": True, "timeout_s": 60})
            await both.settled()
            both.loading.set()
            with pytest.raises(Closed):
                await loading
            assert both.engine.closes == [(False, worker.GRACE)]
            await shutdown

    play(main())


@pytest.mark.parametrize(
    ("method", "asked"), [("generate", params("never")), ("load_model", {"model_id": "m"})], ids=["generate", "load"]
)
def test_g14_every_call_is_answered_before_the_connection_ends(method: str, asked: dict[str, Any]) -> None:
    async def main() -> None:
        async with ends(loaded=method == "generate", grace=0.05) as both:
            both.engine.gates["never"] = asyncio.Event()
            call = both.peer.call(method, asked)
            shutdown = unheard(both.peer.call("shutdown", {"drain": False}))
            with pytest.raises(Drained):
                await call
            await asyncio.wait({shutdown})
            assert await both.run is False  # something may still be at work

    play(main())


def test_g14_shutdown_without_drain_waits_for_no_engine_to_say_so() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a"))
            gate = both.engine.close_gate = asyncio.Event()
            shutdown = both.peer.call("shutdown", {"drain": False, "timeout_s": 3600})
            await both.front.until(lambda: both.front.ended("a"))
            assert not shutdown.done()
            gate.set()
            await shutdown

    play(main())


@pytest.mark.parametrize("how", ["close", "abort", "garbage"])
def test_g14_the_end_of_the_connection_ends_everything(how: str) -> None:
    async def main() -> None:
        async with ends() as both:
            both.engine.gates["begins"] = asyncio.Event()
            await both.batch(params("a"), params("b"))
            begins = both.peer.call("generate", params("begins"))
            await both.settled()
            if how == "garbage":
                assert both.peer._transport is not None
                both.peer._transport.write(b"GET / HTTP/1.1\r\n")
            else:
                getattr(both.peer, how)()
            assert await both.run is True
            assert all(stream.closed for stream in both.engine.streams.values())
            [(drain, timeout)] = both.engine.closes
            assert not drain
            assert worker.GRACE - 1 < timeout <= worker.GRACE
            assert not both.worker.shutdown_called
            with pytest.raises(ReflexError):
                await begins

    play(main())


def test_g14_the_end_of_the_connection_in_the_turn_of_a_request() -> None:
    async def main() -> None:
        async with ends() as both:
            calls = [
                both.peer.call("generate", params("a")),
                both.peer.call(BATCH_GENERATE, {"requests": [params("b"), params("c")]}),
                both.peer.call("runtime/metrics", {}),
            ]
            both.peer.flush()
            assert both.peer._transport is not None
            both.peer._transport.write(b"GET / HTTP/1.1\r\n")
            await both.run
            for call in calls:
                with pytest.raises(ReflexError):
                    await call
            assert all(stream.closed for stream in both.engine.streams.values())
            assert both.engine.closes

    play(main())


def test_g14_the_end_of_the_connection_ends_a_drain_too() -> None:
    async def main() -> None:
        async with ends() as both:
            await both.batch(params("a"))
            shutdown = both.peer.call("shutdown", {"drain": True, "timeout_s": 3600})
            await both.settled()
            both.peer.abort()
            assert await both.run is True
            assert both.engine.streams["a"].closed
            with pytest.raises(ReflexError):
                await shutdown

    play(main())


def test_g14_a_model_that_hangs_keeps_no_process_alive() -> None:
    async def main() -> None:
        async with ends(grace=0.05) as both:
            both.engine.close_gate = asyncio.Event()
            both.peer.abort()
            assert await both.run is False

    play(main())


def test_a_loading_that_was_cut_short_is_still_at_work() -> None:
    async def main() -> None:
        async with ends(loaded=False) as both:
            loading = both.peer.call("load_model", {"model_id": "m"})
            await both.settled()
            both.peer.abort()
            assert await both.run is False
            with pytest.raises(ReflexError):
                await loading

    play(main())
