"""The front's side of streams: places, credits, ends. The messages are those that a connection would bring."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import pytest

from ipc.rpc import note
from ipc.runtime import run
from reflex_runtime.core.errors import Cancelled, ConfigError, Expired, ProcessorError, ReflexError
from reflex_runtime.ipc.frames import ProtocolError, error_of
from reflex_runtime.ipc.messages import Credit, ScoredToken, StreamId, TokenOutput
from reflex_runtime.ipc.peer import ConnectionLost
from reflex_runtime.ipc.streams import StreamHandle, StreamRegistry


class Front:
    """A registry, and what it said."""

    def __init__(self, limit: int = 4, window: int = 8) -> None:
        self.registry = StreamRegistry(limit, window)
        self.registry.say = lambda method, params: self.said.append((method, params))
        self.registry.on_room = lambda: self.room.append(self.registry.active_count())
        self.registry.on_event = lambda handle, event: self.events.append((handle.id, event))
        self.said: list[tuple[str, Any]] = []
        self.room: list[int] = []
        self.events: list[tuple[str, str]] = []

    def active(self, id: str = "s", **options: Any) -> StreamHandle:
        handle = self.registry.register(id, **options)
        self.registry.reserve(handle)
        return handle

    def note(self, method: str, **params: Any) -> None:
        self.registry.note(note(method, msgspec.Raw(msgspec.json.encode(params))))

    def chunk(self, id: str = "s", n: int = 1) -> None:
        tokens = [{"text": f"t{i}", "token_id": i} for i in range(n)]
        self.note("stream.chunk", stream_id=id, tokens=tokens, is_final=False)

    def event(self, event: str = "completed", id: str = "s", **more: Any) -> None:
        self.note("stream.event", stream_id=id, event=event, **more)

    @property
    def cancels(self) -> list[str]:
        return [params.stream_id for _, params in self.said if isinstance(params, StreamId)]

    @property
    def credits(self) -> list[int]:
        return [params.tokens for _, params in self.said if isinstance(params, Credit)]


@pytest.fixture
def front() -> Front:
    return Front()


def test_g15_chunks_stats_and_one_terminal_event_are_one_stream(front: Front) -> None:
    async def main() -> None:
        handle = front.active()
        front.note(
            "stream.chunk", stream_id="s", is_final=True,
            tokens=[{"text": "a", "token_id": 1, "logprob": -0.5, "top": [[1, -0.5]]}, {"text": "b", "token_id": 2}],
        )  # fmt: skip
        assert handle.completion_tokens == 2
        front.note(
            "stream.stats", stream_id="s", prompt_tokens=7, output_tokens=2, ttft_ms=3.5, duration_ms=9.0,
            cached_tokens=4,
        )  # fmt: skip
        front.event()
        tokens = [token async for token in handle]
        assert tokens == [TokenOutput("a", 1, -0.5, ((1, -0.5),)), TokenOutput("b", 2)]
        assert (handle.prompt_tokens, handle.cached_tokens, handle.completion_tokens, handle.ttft_ms) == (7, 4, 2, 3.5)
        assert handle.ended
        assert front.said == []

    run(main())


def test_l9_what_is_said_of_a_prompt_is_kept_for_the_reader_and_bounded(front: Front) -> None:
    async def main() -> None:
        handle, other = front.active(), front.active("t")
        handle.scores_left = 5
        front.note("stream.prompt", stream_id="s", tokens=[[7, -0.5, [[7, -0.5], [8, -1.5]]]])
        front.note("stream.prompt", stream_id="s", tokens=[[9, None], [3, -1.0]])
        first = ScoredToken(7, -0.5, ((7, -0.5), (8, -1.5)))
        assert handle.prompt_scores == [first, ScoredToken(9, None), ScoredToken(3, -1.0)]
        assert (handle.unread, front.cancels) == (0, [])
        front.note("stream.prompt", stream_id="s", tokens=[[4, -1.0]])  # one number more than may come
        front.note("stream.prompt", stream_id="t", tokens=[[4, -1.0]])  # it was not asked for
        assert front.cancels == ["s", "t"]
        for stream in (handle, other):
            with pytest.raises(ProtocolError, match="was not requested, or has more than 524288 numbers"):
                await anext(stream)

    run(main())


def test_g15_what_comes_after_the_terminal_event_is_ignored_and_counted(front: Front) -> None:
    async def main() -> None:
        handle = front.active()
        front.event()
        front.event("error")
        front.chunk()
        front.event("cancelled")
        assert handle.take() == []
        assert [token async for token in handle] == []
        assert front.registry.snapshot()["stray_notifications"] == {"unknown_stream": 3}
        assert front.registry.active_count() == 0

    run(main())


def test_g6_a_place_is_held_from_reserve_to_the_terminal_event(front: Front) -> None:
    async def main() -> None:
        registry = front.registry
        handle = registry.register("s")
        assert registry.capacity() == (0, 4), "who waits holds none"
        registry.reserve(handle)
        assert (registry.capacity(), handle.reserved) == ((1, 4), True)
        with pytest.raises(AssertionError):
            registry.reserve(handle)
        handle.close()
        assert registry.active_count() == 1, "its reader left; the runtime has not said that it stopped"
        assert front.cancels == ["s"]
        front.event("cancelled")
        assert (registry.active_count(), handle.reserved) == (0, False)
        assert front.room == [1, 0]

    run(main())


@pytest.mark.parametrize(
    ("event", "error", "kind"),
    [
        ("cancelled", None, Cancelled),
        ("error", Expired("too late"), Expired),
        ("error", None, ProcessorError),
    ],
)
def test_g15_a_stream_that_does_not_complete_raises_after_what_came(
    front: Front, event: str, error: ReflexError | None, kind: type[ReflexError]
) -> None:
    async def main() -> None:
        handle = front.active()
        front.chunk(n=2)
        front.event(event, **({} if error is None else {"error": msgspec.to_builtins(error_of(error))}))
        assert len(handle.take()) == 2
        with pytest.raises(kind, match=None if error is None else error.message):
            handle.take()

    run(main())


def test_g8_half_a_window_read_grants_as_many_tokens_again(front: Front) -> None:
    async def main() -> None:
        handle = front.active()
        front.chunk(n=8)
        handle.take(3)
        assert front.credits == []
        handle.take(1)
        assert front.credits == [4]
        await anext(handle)
        handle.take()
        assert front.credits == [4, 4]
        front.chunk(n=8)
        front.event()
        handle.take()
        assert front.credits == [4, 4], "a stream that ended needs none"

    run(main())


def test_g8_a_reader_that_left_grants_nothing(front: Front) -> None:
    async def main() -> None:
        handle = front.active()
        front.chunk(n=8)
        handle.close()
        front.chunk(n=8)
        assert handle.unread == 0
        assert front.credits == []

    run(main())


def test_g8_a_runtime_that_ignores_its_credits_cannot_fill_the_memory(front: Front) -> None:
    async def main() -> None:
        handle = front.active()
        for _ in range(4):
            front.chunk(n=8)
        assert (handle.unread, handle.ended) == (32, False), "four windows are borne"
        front.chunk(n=1)
        assert (handle.unread, handle.ended) == (32, True)
        assert front.cancels == ["s"]
        front.chunk(n=8)
        assert handle.unread == 32
        assert front.registry.stray["after_the_end"] == 1
        assert front.registry.active_count() == 1, "until the runtime says that it stopped"
        assert len(handle.take(8)) == 8
        assert front.credits == []
        front.event("cancelled")
        assert front.registry.active_count() == 0
        handle.take()
        with pytest.raises(ProtocolError, match="ahead"):
            handle.take()

    run(main())


def test_g6_the_runtime_has_nothing_to_say_of_a_stream_that_waits(front: Front) -> None:
    async def main() -> None:
        handle = front.registry.register("s")
        front.chunk()
        front.event()
        assert (handle.unread, handle.ended) == (0, False)
        assert front.registry.stray == {"unknown_stream": 2}

    run(main())


def test_g8_backpressure_and_slow_consumer_are_told_and_end_nothing(front: Front) -> None:
    async def main() -> None:
        handle = front.active()
        front.event("backpressure")
        front.event("slowConsumer")
        front.event("backpressure", id="unknown")
        assert front.events == [("s", "backpressure"), ("s", "slowConsumer")]
        assert not handle.ended

    run(main())


def test_g4_a_stream_that_came_to_its_end_is_told_once_with_the_pace_of_its_tokens(front: Front) -> None:
    async def main() -> None:
        told: list[tuple[str, float]] = []
        front.registry.on_completed = lambda handle: told.append((handle.id, handle.token_s))
        for id in ("whole", "one", "cancelled", "given up"):
            front.active(id)
        said = {"prompt_tokens": 3, "duration_ms": 42.0}
        front.note("stream.stats", stream_id="whole", output_tokens=11, ttft_ms=2.0, **said)
        front.event(id="whole")
        front.note("stream.stats", stream_id="one", output_tokens=1, ttft_ms=42.0, **said)
        front.event(id="one")
        front.event("cancelled", id="cancelled")
        front.registry.give_up(front.registry.find("given up"), Expired("too late"))  # type: ignore[arg-type]
        front.event(id="given up")
        assert told == [("whole", pytest.approx(0.004)), ("one", 0.0)]

    run(main())


def test_a_notification_that_cannot_be_read_ends_its_stream_and_no_other(front: Front) -> None:
    async def main() -> None:
        torn, other = front.active("torn"), front.active("other")
        front.note("stream.chunk", stream_id="torn", tokens="no list", is_final=False)
        front.note("stream.chunk", tokens=[], is_final=False)
        front.note("stream.event", stream_id="other", event="exploded")
        front.note("stream.event", stream_id="unknown", event="exploded")
        front.note("stream.unheard_of", stream_id="other")
        with pytest.raises(ProtocolError, match="tokens"):
            torn.take()
        with pytest.raises(ProtocolError, match="exploded"):
            other.take()
        assert front.cancels == ["torn", "other"]
        assert front.registry.stray == {"malformed": 4, "unknown_method": 1}

    run(main())


def test_g14_when_the_runtime_is_lost_what_it_fed_ends_and_what_waits_does_not(front: Front) -> None:
    async def main() -> None:
        fed, waits = front.active("fed"), front.registry.register("waits")
        front.chunk("fed", 2)
        front.registry.lost(ConnectionLost("gone"))
        assert len(fed.take()) == 2
        with pytest.raises(ConnectionLost):
            await fed.read()
        assert front.registry.active_count() == 0
        assert not waits.ended
        front.registry.reserve(waits)

    run(main())


def test_g9_release_returns_the_place_and_ends_the_stream_and_is_nothing_after_the_end(front: Front) -> None:
    async def main() -> None:
        handle = front.active()
        front.registry.release(handle, Expired("refused"))
        with pytest.raises(Expired):
            handle.take()
        front.registry.release(handle, Expired("refused"))
        again = front.active()
        front.registry.release(handle, Expired("refused"))
        front.registry.abandon(handle, Expired("refused"))
        assert (again.ended, front.registry.active_count()) == (False, 1), "another stream of the same name"
        assert front.cancels == []

    run(main())


def test_g14_abandon_tells_the_runtime_to_stop_and_does_not_wait_for_it(front: Front) -> None:
    async def main() -> None:
        handle = front.active()
        front.registry.abandon(handle, ProtocolError("a wrong answer"))
        assert front.cancels == ["s"]
        assert front.registry.active_count() == 0
        front.event("cancelled")
        assert front.registry.stray == {"unknown_stream": 1}
        with pytest.raises(ProtocolError):
            handle.take()
        waits = front.registry.register("waits")
        front.registry.abandon(waits, ProtocolError("never sent"))
        assert front.cancels == ["s"], "the runtime never heard of it"

    run(main())


def test_g7_closing_a_stream_that_waits_tells_who_queued_it_and_not_the_runtime(front: Front) -> None:
    async def main() -> None:
        left: list[str] = []
        handle, plain = front.registry.register("queued"), front.registry.register("plain")
        handle.on_left = lambda: left.append("queued")
        handle.close()
        plain.close()
        handle.close()
        assert left == ["queued"]
        assert front.said == []
        assert front.registry.find("plain") is None, "nobody queued it: it is gone"
        with pytest.raises(Cancelled):
            await plain.read()

    run(main())


def test_on_end_is_called_once_however_it_ends(front: Front) -> None:
    async def main() -> None:
        ends: list[str] = []
        handles = {id: front.active(id) for id in ("completed", "given up", "released", "lost")}
        for id, handle in handles.items():
            handle.on_end = lambda id=id: ends.append(id)
        front.event(id="completed")
        front.chunk("given up", 33)
        front.event("cancelled", id="given up")
        front.registry.release(handles["released"], Expired())
        front.registry.lost(ConnectionLost("gone"))
        assert ends == ["completed", "given up", "released", "lost"]

    run(main())


@pytest.mark.parametrize("id", ["", "x" * 201, "a\nb", "a\x00", 7])
def test_a_stream_id_is_bounded(front: Front, id: Any) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="1 to 200 printable"):
            front.registry.register(id)

    run(main())


def test_a_stream_id_is_free_again_after_the_end(front: Front) -> None:
    async def main() -> None:
        handle = front.active("x" * 200)
        with pytest.raises(ConfigError, match="in use"):
            front.registry.register(handle.id)
        front.event(id=handle.id)
        front.registry.register(handle.id)
        made_up = {front.registry.register().id for _ in range(3)}
        assert len(made_up) == 3
        assert all(len(id) <= 200 and id.isprintable() for id in made_up)

    run(main())


@pytest.mark.parametrize(("name", "value"), [("limit", 0), ("window", 0), ("limit", 2_000_000)])
def test_wrong_settings_are_named(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"StreamRegistry.{name}={value}: must be in \[1"):
        StreamRegistry(**{name: value})


def test_one_bell_for_several_streams(front: Front) -> None:
    async def main() -> None:
        bell = asyncio.Event()
        a, b = front.active("a", bell=bell), front.active("b", bell=bell)
        front.chunk("b")
        assert bell.is_set()
        assert (a.unread, b.unread) == (0, 1)
        assert front.registry.snapshot()["unread_tokens"] == 1

    run(main())


def test_nothing_is_left_of_a_stream_without_the_collector(front: Front) -> None:
    async def main() -> None:
        handle = front.active()
        handle.on_left = handle.on_end = handle.close  # as whoever queues it holds it
        front.chunk(n=3)
        front.event()
        own = [object()][0]  # this function, and until Python 3.14 the question
        assert sys.getrefcount(handle) == sys.getrefcount(own)

    run(main())
