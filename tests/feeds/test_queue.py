"""The queue between a source and its pipeline: two threads, and nobody waits longer than he must."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from feeds.fakes import PATIENCE, frame
from reflex_runtime.feeds.runtime.feed import FrameQueue


def test_f14_a_live_queue_drops_the_oldest_and_never_waits() -> None:
    queue = FrameQueue(2, drop_oldest=True)
    frames = [frame(i) for i in range(5)]
    assert [queue.put(f) for f in frames] == [None, None, *frames[:3]]
    assert [queue.get(0.0), queue.get(0.0), queue.get(0.0)] == [frames[3], frames[4], None]


def test_a_file_queue_waits_for_room() -> None:
    queue = FrameQueue(1, drop_oldest=False)
    first, second = frame(0), frame(1)
    assert queue.put(first) is None
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(queue.put, second)
        with pytest.raises(TimeoutError):
            putting.result(0.05)  # it waits
        assert queue.get(PATIENCE) is first
        assert putting.result(PATIENCE) is None
    assert queue.get(PATIENCE) is second


def test_get_waits_for_a_frame_and_no_longer_than_told() -> None:
    queue = FrameQueue(1, drop_oldest=True)
    only = frame()
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(queue.get, PATIENCE)
        queue.put(only)
        assert getting.result(PATIENCE) is only
    assert queue.get(0.001) is None
    assert not queue.closed


def test_close_wakes_whoever_takes() -> None:
    queue = FrameQueue(1, drop_oldest=True)
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(queue.get)
        assert queue.close() == []
        assert getting.result(PATIENCE) is None


def test_close_wakes_whoever_puts_and_hands_his_frame_back() -> None:
    queue = FrameQueue(1, drop_oldest=False)
    first, second = frame(0), frame(1)
    queue.put(first)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(queue.put, second)
        assert queue.close() == []
        assert putting.result(PATIENCE) is second
    assert queue.get() is first  # what it held may still be taken
    assert queue.get() is None


def test_a_discarding_close_hands_everything_back() -> None:
    queue = FrameQueue(3, drop_oldest=False)
    frames = [frame(i) for i in range(3)]
    for f in frames:
        queue.put(f)
    assert queue.close(discard=True) == frames
    assert queue.get() is None
    assert queue.put(frames[0]) is frames[0]


@pytest.mark.parametrize("drop_oldest", [True, False])
def test_every_frame_comes_out_once_and_in_order(drop_oldest: bool) -> None:
    queue = FrameQueue(3, drop_oldest)
    frames = [frame(i) for i in range(5_000)]

    def put() -> list[int]:
        lost = [left.sequence for f in frames if (left := queue.put(f)) is not None]
        queue.close()
        return lost

    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(put)
        taken = []
        while (got := queue.get(PATIENCE)) is not None:
            taken.append(got.sequence)
        lost = putting.result(PATIENCE)
    assert sorted(taken + lost) == list(range(5_000))
    assert taken == sorted(taken)
    assert drop_oldest or not lost
