"""Pictures between admission and the scheduler: fair order, bounds, and what happens when a request ends meanwhile."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from onnx import TensorProto, helper

from reflex_runtime.core.errors import QueueFull
from reflex_runtime.robots.serving.decode_pool import (
    FIRST_PACE,
    LIGHT_BYTES,
    LIGHT_S,
    LOOK_PIXELS,
    TURN_S,
    DecodeOrder,
    DecodePool,
    Job,
)
from reflex_runtime.web.errors import Overloaded
from reflex_runtime.web.pictures import MAX_IMAGE_PIXELS
from robots.tiny import write_export, write_graph
from serving.harness import Latch, Server

LARGE = 1 << 22  # pixels


# -- whose turn it is --------------------------------------------------------------------------------------------------


def job(client: Any, share: float = 1.0) -> Job:
    return Job(client, share, 0, lambda: 0, lambda: 0, lambda value, error: None)


def order(turns: DecodeOrder) -> list[Any]:
    found = []
    while (taken := turns.take()) is not None:
        found.append(taken.client)
    return found


def test_b21_a_small_request_goes_before_the_large_ones_of_others() -> None:
    turns = DecodeOrder()
    for i in range(16):
        turns.push(job(f"bomb {i}"), LARGE)
    turns.push(job("robot"), 100)
    assert order(turns)[0] == "robot"


def test_b21_pixels_are_shared_between_clients_however_many_requests_each_has() -> None:
    turns = DecodeOrder()
    for _ in range(30):
        turns.push(job("greedy"), LARGE)
    for _ in range(5):
        turns.push(job("modest"), 2 * LARGE)
    assert order(turns)[:15].count("modest") == 5


def test_b21_shares_weigh() -> None:
    turns = DecodeOrder()
    for _ in range(30):
        turns.push(job("default"), LARGE)
        turns.push(job("urgent", share=2.0), LARGE)
    assert order(turns)[:30].count("urgent") == 20


def test_a_large_request_does_not_starve_behind_small_ones_of_ever_new_clients() -> None:
    turns = DecodeOrder()
    turns.push(job("large"), LARGE)
    for i in range(1000):
        turns.push(job(f"small {i}"), LOOK_PIXELS)
        taken = turns.take()
        assert taken is not None
        if taken.client == "large":
            return
    raise AssertionError("it starves")


def test_beyond_the_bound_the_one_that_would_be_last_has_to_go() -> None:
    turns = DecodeOrder(most=4 * LARGE)
    greedy = [job("greedy") for _ in range(4)]
    assert [turns.push(each, LARGE) for each in greedy] == [None] * 4
    assert turns.push(job("modest"), LARGE) is greedy[-1]
    late = job("greedy")
    assert turns.push(late, LARGE) is late
    assert (turns.waiting_pixels, sorted(order(turns))) == (4 * LARGE, ["greedy"] * 3 + ["modest"])
    assert turns.push(job("alone"), 100 * LARGE) is None  # one is always taken


def test_clients_with_nothing_to_pay_are_forgotten() -> None:
    turns = DecodeOrder()
    for i in range(10_000):
        turns.push(job(i), 1)
        turns.take()
    assert len(turns._ends) <= 70


# -- the loop and the threads ------------------------------------------------------------------------------------------


class Gate:
    """Large pictures that are decoded when the test says so."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.loop = asyncio.get_running_loop()
        self.began: asyncio.Queue[Any] = asyncio.Queue()
        self.ended: asyncio.Queue[tuple[Any, Any, Exception | None]] = asyncio.Queue()
        self.threads: set[str] = set()

    def job(
        self, name: Any, pixels: int, client: Any = None, make: Callable[[], Any] | None = None, size: int = 0
    ) -> Job:
        def run() -> Any:
            self.threads.add(threading.current_thread().name)
            self.loop.call_soon_threadsafe(self.began.put_nowait, name)
            if pixels >= LARGE:
                assert self.open.wait(30.0)
            return name if make is None else make()

        return Job(client or name, 1.0, size, lambda: pixels, run, lambda v, e: self.ended.put_nowait((name, v, e)))


def run(test: Callable[[DecodePool, Gate], Any], **settings: Any) -> None:
    async def main() -> None:
        pool, gate = DecodePool(**settings), Gate()
        try:
            async with asyncio.timeout(30.0):
                await test(pool, gate)
        finally:
            gate.open.set()
            pool.close()

    asyncio.run(main())


def test_small_pictures_are_decoded_on_the_loop_while_large_ones_hold_every_thread() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        for i in range(6):
            pool.add(gate.job(f"large {i}", LARGE))
        for i in range(50):
            pool.add(gate.job(i, 100, client="robot"))
            assert await gate.ended.get() == (i, i, None)
        assert {name for name in gate.threads if not name.startswith("reflex-decode")} == {"MainThread"}
        gate.open.set()
        assert {(await gate.ended.get())[0] for _ in range(6)} == {f"large {i}" for i in range(6)}

    run(test, workers=2)


def test_without_a_thread_a_large_picture_is_refused_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test(pool: DecodePool, gate: Gate) -> None:
        gate.open.set()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            for size in (0, LIGHT_BYTES + 1):  # by its pixels, in a turn of the loop, and by its bytes at once
                pool.add(gate.job("large", LARGE, size=size))
                name, value, error = await gate.ended.get()
                assert (name, value, type(error)) == ("large", None, Overloaded)
        pool.add(gate.job("next", LARGE))
        assert await gate.ended.get() == ("next", "next", None)

    run(test, workers=1)


class PanicException(BaseException):
    """As a decoder in Rust raises it."""


@pytest.mark.parametrize("pixels", [100, LARGE])
@pytest.mark.parametrize("where", ["look", "make"])
def test_a_decoder_that_panics_fails_its_picture_alone(pixels: int, where: str) -> None:
    def panics() -> Any:
        raise PanicException("unwrap")

    async def test(pool: DecodePool, gate: Gate) -> None:
        gate.open.set()
        bad = gate.job("bad", pixels, make=panics)
        if where == "look":
            bad.look, bad.make = panics, int
        pool.add(bad)
        name, value, error = await gate.ended.get()
        assert (name, value, str(error)) == ("bad", None, "PanicException: unwrap")
        pool.add(gate.job("good", pixels))
        assert await gate.ended.get() == ("good", "good", None)

    run(test, workers=1)


def test_many_small_pictures_let_other_work_of_the_loop_have_its_turns() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        def slow() -> None:
            until = time.perf_counter() + TURN_S / 2
            while time.perf_counter() < until:
                pass

        for i in range(20):
            pool.add(gate.job(i, 100, make=slow))
        turns = 0
        while gate.ended.qsize() < 20:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 8  # two or three of them in each

    run(test, workers=1)


def test_what_is_large_by_its_bytes_is_not_even_looked_at_on_the_loop() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        looked: list[str] = []
        heavy = gate.job("heavy", 100, size=LIGHT_BYTES + 1)
        look, heavy.look = heavy.look, lambda: looked.append(threading.current_thread().name) or look()
        pool.add(heavy)
        assert await gate.ended.get() == ("heavy", "heavy", None)
        assert looked
        assert all(name.startswith("reflex-decode") for name in looked)

    run(test, workers=1)


def test_the_pace_is_learned_and_decides_where_a_picture_is_decoded() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        pixels = int(LIGHT_S / FIRST_PACE) * 2
        pool.add(gate.job("before", pixels))
        assert (await gate.ended.get())[0] == "before"
        assert "MainThread" not in gate.threads
        for i in range(30):  # as good as nothing
            pool.add(gate.job(i, pixels // 2))
            await gate.ended.get()
        gate.threads.clear()
        pool.add(gate.job("after", pixels))
        await gate.ended.get()
        assert gate.threads == {"MainThread"}

    run(test, workers=1)


def test_a_thread_that_waits_for_its_core_makes_no_picture_large() -> None:
    """While a batch runs on the same core a picture takes twice as long, and no more work."""

    async def test(pool: DecodePool, gate: Gate) -> None:
        pixels, wait = 2 * LOOK_PIXELS, threading.Event()
        for i in range(30):
            pool.add(gate.job(i, pixels, make=lambda: wait.wait(2.0 * LIGHT_S)))
            await gate.ended.get()
        assert gate.threads == {"MainThread"}

    run(test, workers=1)


def test_what_was_looked_at_on_the_loop_is_not_looked_at_again() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        looked: list[str] = []
        large = gate.job("large", LARGE)
        look, large.look = large.look, lambda: looked.append(threading.current_thread().name) or look()
        gate.open.set()
        pool.add(large)
        assert await gate.ended.get() == ("large", "large", None)
        assert looked == ["MainThread"]

    run(test, workers=1)


def test_one_that_cannot_go_on_leaves_the_others_alone() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        def fails(value: Any, error: Exception | None) -> None:
            raise RuntimeError("drill")

        for pixels in (100, LARGE):
            bad = gate.job("bad", pixels)
            bad.done = fails
            gate.open.set()
            pool.add(bad)
            pool.add(gate.job("good", pixels))
            assert await gate.ended.get() == ("good", "good", None)

    run(test, workers=1)


def test_what_is_discarded_is_not_decoded_and_not_told() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        first, second, third = (gate.job(f"large {i}", LARGE) for i in range(3))
        pool.add(first)
        assert await gate.began.get() == "large 0"
        pool.add(second)
        pool.add(third)
        pool.discard(second)
        pool.discard(first)  # it is decoded to its end, for nobody
        small = gate.job("small", 100)
        pool.add(small)
        pool.discard(small)
        gate.open.set()
        assert await gate.ended.get() == ("large 2", "large 2", None)
        assert await gate.began.get() == "large 2"
        assert gate.began.empty()
        assert len(pool._light) == len(pool._large) == 0

    run(test, workers=1)


def test_an_error_is_told_and_the_next_is_decoded() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        def broken() -> Any:
            raise ValueError("no picture")

        for size in (0, LIGHT_BYTES + 1):
            pool.add(gate.job("broken", 100, make=broken, size=size))
            name, value, error = await gate.ended.get()
            assert (name, value, str(error)) == ("broken", None, "no picture")
            pool.add(gate.job("good", 100, size=size))
            assert await gate.ended.get() == ("good", "good", None)

    run(test, workers=1)


def test_a_small_request_waits_for_no_more_than_the_large_one_that_is_being_decoded() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        for i in range(3):
            pool.add(gate.job(f"large {i}", LARGE, client="greedy"))
        assert await gate.began.get() == "large 0"
        pool.add(gate.job("small", LARGE // 8, client="modest", size=LIGHT_BYTES + 1))
        gate.open.set()
        assert [(await gate.ended.get())[0] for _ in range(4)] == ["large 0", "small", "large 1", "large 2"]

    run(test, workers=1)


def test_too_many_large_pictures_are_refused_and_say_when_to_come_again() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        pool.add(gate.job("first", LARGE))
        assert await gate.began.get() == "first"
        jobs = {f"large {i}": gate.job(f"large {i}", LARGE, client="greedy") for i in range(7)}
        for each in jobs.values():
            pool.add(each)
        for _ in range(3):
            name, value, error = await gate.ended.get()
            del jobs[name]
            assert value is None
            assert isinstance(error, QueueFull)
            assert (error.code, error.http_status, error.retry_after) == ("queue_full", 503, 1.0)
            assert error.details["waiting_pixels"] == 4 * LARGE
        pool.discard(jobs.popitem()[1])  # its pixels wait no more
        pool.add(gate.job("late", LARGE, client="greedy"))
        gate.open.set()
        assert [(await gate.ended.get())[2] for _ in range(5)] == [None] * 5

    run(test, workers=1, most=4 * LARGE)


def test_a_picture_of_few_bytes_and_very_many_pixels_waits_by_its_pixels() -> None:
    async def test(pool: DecodePool, gate: Gate) -> None:
        pool.add(gate.job("first", LARGE))
        assert await gate.began.get() == "first"
        for i in range(3):
            pool.add(gate.job(f"bomb {i}", 3 * LARGE, client="bomber", size=LIGHT_BYTES + 1))
        gate.open.set()
        found = {name: error for name, _, error in [await gate.ended.get() for _ in range(4)]}
        assert found["first"] is None
        assert any(isinstance(error, QueueFull) for error in found.values())

    run(test, workers=1, most=4 * LARGE)


# -- a server ----------------------------------------------------------------------------------------------------------

HELD = '''
import reflex_runtime.robots.policy.observation as policy

decode = policy.decode_image
def held(data, *how, **named):
    image = decode(data, *how, **named)
    if policy.pixels_of(data) > 1 << 20:
        with open({began!r}, "a") as began:
            began.write("x")
        {wait}
    return image
policy.decode_image = held
'''


def png(size: tuple[int, int], mode: str = "RGB") -> str:
    data = io.BytesIO()
    PIL.Image.new(mode, size, 1).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


SMALL, BIG = png((6, 4)), png((1500, 1000))
ASKED = {"instruction": "open the door", "state": [0.1, -0.2]}


class Held:
    """A server whose large pictures are decoded when the test says so."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._latch, self._began = Latch(folder / "latch"), folder / "began"
        self._latch.shut()
        before = HELD.format(began=str(self._began), wait=self._latch.wait)
        self.server = Server(write_export(folder / "export"), *options, before=before, takes="0.001")

    @property
    def began(self) -> int:
        """Large pictures whose decoding has begun."""
        return len(self._began.read_text()) if self._began.exists() else 0

    def release(self) -> None:
        self._latch.close()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    with made.server:
        yield made
        made.release()


def waiting(server: Server, n: int) -> None:
    server.reach(lambda m: m("reflex_policy_runtime_queue_depth") == n)


def test_a_robot_is_answered_while_the_large_pictures_of_eight_others_are_decoded(held: Held) -> None:
    server = held.server
    with server.burst([ASKED | {"image": BIG, "robot_id": f"other {i}"} for i in range(8)]) as others:
        others.send()
        waiting(server, 8)
        for _ in range(20):
            assert server.post(ASKED | {"image": SMALL}).status == 200
        assert server.metrics()("reflex_policy_runtime_queue_depth") == 8
        assert held.began <= 4  # as many as there are threads
        held.release()
        assert {answer.status for answer in others.answers(range(8))} == {200}
    assert held.began == 8


def test_b13_requests_take_their_place_before_their_pictures_are_decoded(tmp_path: Path) -> None:
    held = Held(tmp_path, "--max-queue", "3")
    with held.server as server, server.burst([ASKED | {"image": BIG}] * 3) as others:
        others.send()
        waiting(server, 3)
        answer = server.post(ASKED | {"image": SMALL})
        assert (answer.status, answer.json["error"], answer.json["max_queue"]) == (503, "queue_full", 3)
        held.release()
        assert [a.status for a in others.answers(range(3))] == [200] * 3


def test_b21_the_cap_of_a_client_counts_what_is_not_decoded_yet(tmp_path: Path) -> None:
    held = Held(tmp_path, "--max-in-flight-per-client", "1")
    with held.server as server, server.burst([ASKED | {"image": BIG, "robot_id": "r"}]) as first:
        first.send()
        waiting(server, 1)
        answer = server.post(ASKED | {"image": SMALL, "robot_id": "r"})
        assert (answer.status, answer.json["error"]) == (429, "client_at_capacity")
        held.release()
        assert first.answers([0])[0].status == 200


def test_b17_the_deadline_runs_and_what_expires_is_not_decoded(held: Held) -> None:
    server = held.server
    with server.burst([ASKED | {"image": BIG}] * 4) as others:  # one for each thread, at least
        others.send()
        waiting(server, 4)
        answer = server.post(ASKED | {"image": BIG, "deadline_ms": 200})
        assert (answer.status, answer.json["error"]) == (504, "deadline_exceeded")
        held.release()
        assert [a.status for a in others.answers()] == [200] * 4
        assert server.post(ASKED | {"image": SMALL}).status == 200
    assert held.began == 4


def test_b16_a_caller_that_leaves_is_forgotten_undecoded(held: Held) -> None:
    server = held.server
    with server.burst([ASKED | {"image": BIG, "robot_id": f"{i}"} for i in range(6)]) as others:
        others.send()
        waiting(server, 6)
        others.hang_up(range(6))
        waiting(server, 0)
        server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 6)
        held.release()
        assert server.post(ASKED | {"image": BIG, "robot_id": "after"}).status == 200  # they had come before it
    assert held.began <= 5


def test_b22_a_newer_request_replaces_one_whose_pictures_wait(tmp_path: Path) -> None:
    held = Held(tmp_path, "--latest-only")
    with held.server as server, server.burst([ASKED | {"image": BIG, "robot_id": "r"}]) as old:
        old.send()
        waiting(server, 1)
        assert server.post(ASKED | {"image": SMALL, "robot_id": "r"}).status == 200
        answer = old.answers([0])[0]
        assert (answer.status, answer.json["error"]) == (409, "superseded")
        held.release()


def test_b20_what_was_admitted_is_decoded_and_answered_before_the_end(held: Held) -> None:
    server = held.server
    with server.burst([ASKED | {"image": BIG, "robot_id": f"{i}"} for i in range(3)]) as others:
        others.send()
        waiting(server, 3)
        server.process.terminate()
        server.wait_log("draining: 3 requests")
        held.release()
        assert [answer.status for answer in others.answers(range(3))] == [200] * 3
    assert server.wait() == 0


def test_a_request_waits_for_its_pictures_and_the_time_is_counted(held: Held) -> None:
    server = held.server
    with server.burst([ASKED | {"image": BIG}]) as one:
        one.send()
        waiting(server, 1)
        seen = time.monotonic()
        assert server.metrics()("reflex_prepare_seconds_count") == 0
        waited = time.monotonic() - seen
        held.release()
        assert one.answers([0])[0].status == 200
    assert server.metrics()("reflex_prepare_seconds_count") == 1
    assert server.metrics()("reflex_prepare_seconds_sum") > waited


# -- what a request may cost -------------------------------------------------------------------------------------------


def peak(server: Server) -> int:
    """Bytes of memory the server has had at most."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def test_names_without_a_camera_are_refused_before_anything_is_decoded(held: Held) -> None:
    server, bomb = held.server, png((4096, 4096), "1")
    assert server.post(ASKED | {"image": SMALL}).status == 200
    before = peak(server)
    answer = server.post(ASKED | {"image": SMALL, "images": {f"camera {i}": bomb for i in range(25)}})
    assert (answer.status, answer.json["field"]) == (422, "images.camera 0")
    assert "(there are: front, image)" in answer.json["message"]
    assert peak(server) - before < 16 << 20
    assert held.began == 0


def cameras(root: Path, *more: str) -> Path:
    """An export that looks at "front" and these."""

    def change(settings: dict[str, Any]) -> None:
        for name in more:
            settings["images"][name] = [4, 6]
            settings["inputs"][name] = name

    write_export(root, change=change)
    names = {"rgb": "a", **dict(zip(more, "bc", strict=False))}
    nodes = [
        *(helper.make_node("Cast", [name], [f"{short}_pixels"], to=TensorProto.FLOAT) for name, short in names.items()),
        *(
            helper.make_node("ReduceMean", [f"{short}_pixels"], [short], axes=[1, 2, 3], keepdims=0)
            for short in names.values()
        ),
        helper.make_node("Sum", list(names.values()), ["grey"]),
        helper.make_node("Unsqueeze", ["grey", "one_two"], ["wide"]),
        helper.make_node("ReduceSum", ["ids", "one"], ["words"], keepdims=0),
        helper.make_node("ReduceSum", ["pose", "one"], ["moved"], keepdims=0),
        helper.make_node("Add", ["x", "wide"], ["chunk"]),
    ]
    write_graph(root / "model.onnx", nodes, [*names, "ids", "pose", "x"], ["chunk"])
    return root


def test_one_picture_at_a_time_is_held_at_full_size(tmp_path: Path) -> None:
    """The memory of a request is that of its largest picture in the mode of its file, however many there are."""
    with Server(cameras(tmp_path / "export", "left")) as server:
        assert server.post(ASKED | {"images": {"front": SMALL, "left": SMALL}}).status == 200
        before = peak(server)
        bomb = png((4096, 4096), "1")
        assert server.post(ASKED | {"images": {"front": bomb, "left": bomb}}).status == 200
        assert peak(server) - before < 2 * MAX_IMAGE_PIXELS  # decoded 16 MB, and the resampler's


def test_a_request_of_too_many_pixels_in_all_is_refused(tmp_path: Path) -> None:
    with Server(cameras(tmp_path / "export", "left", "right")) as server:
        bomb = png((4096, 4096), "1")
        answer = server.post(ASKED | {"images": {"front": bomb, "left": bomb, "right": bomb}})
        assert (answer.status, answer.json["field"]) == (422, "images")
        assert "50,331,648 pixels" in answer.json["message"]


def test_a_jpeg_is_decoded_at_the_fraction_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from reflex_runtime.robots.policy.observation import decode_image

    flat = np.zeros((4096, 4096, 3), np.uint8)
    flat[:, 2048:] = 200
    data = io.BytesIO()
    PIL.Image.fromarray(flat).save(data, "JPEG")
    seen, resize = [], PIL.Image.Image.resize

    def noted(image: PIL.Image.Image, *args: Any, **more: Any) -> PIL.Image.Image:
        seen.append(image.size)
        return resize(image, *args, **more)

    monkeypatch.setattr(PIL.Image.Image, "resize", noted)
    small = decode_image(data.getvalue(), "image", (64, 64))
    assert seen == [(512, 512)]
    assert small.shape == (64, 64, 3)
    assert abs(int(small[10, 10, 0])) <= 3
    assert abs(int(small[10, 50, 0]) - 200) <= 3
