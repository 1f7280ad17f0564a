"""The camera that misbehaves: alike for one seed, each fault as told, and no real time in its tests."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from feeds.chaos import ChaosSource, number_of
from feeds.fakes import PATIENCE
from reflex_runtime.feeds.runtime.pipeline import SourceError


class Virtual:
    """A clock that a wait moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        assert seconds > 0.0
        self.now += seconds
        return event.is_set()


def story(count: int, seed: int = 7, **options: Any) -> list[tuple[Any, ...]]:
    """What happens in `count` reads: when, what number, size and pts, or which fault. A lost source is opened again."""
    virtual = Virtual()
    source = ChaosSource(seed, clock=virtual.clock, wait=virtual.wait, **options)
    told: list[tuple[Any, ...]] = []
    source.open()
    for _ in range(count):
        try:
            read = source.read()
        except SourceError as error:
            told.append((virtual.now - 1000.0, str(error)))
            source.close()
            source.open()
            continue
        if read is None:
            break
        image, pts = read
        assert image.dtype == np.uint8
        told.append((virtual.now - 1000.0, number_of(image), image.shape[1::-1], pts))
    return told


EVERYTHING = {"freeze": 0.1, "bad_pts": 0.2, "resize": 0.1, "flood": 0.05, "lose": 0.05, "length": 400, "short": 0.5}


def test_f14_one_seed_is_one_story() -> None:
    assert story(500, **EVERYTHING) == story(500, **EVERYTHING)
    assert story(500, **EVERYTHING) != story(500, seed=8, **EVERYTHING)


def test_without_faults_it_is_a_camera() -> None:
    told = story(50, length=20)
    assert told == [(pytest.approx(i / 25), i, (64, 48), pytest.approx(i / 25)) for i in range(20)]


def test_one_option_changes_nothing_else() -> None:
    plain, more = story(200, resize=0.2), story(200, resize=0.2, bad_pts=0.5)
    assert [told[:3] for told in plain] == [told[:3] for told in more]
    assert [told[3] for told in plain] != [told[3] for told in more]


def test_f14_a_freeze_takes_its_time_and_then_goes_on() -> None:
    told = story(200, freeze=0.1, freeze_s=(0.5, 2.0))
    steps = np.diff([at for at, *_ in told])
    frozen = steps[steps > 0.041]
    assert 5 <= len(frozen) <= 40
    assert frozen.min() >= 0.5
    assert frozen.max() <= 2.05
    assert steps.min() > 0.039, "what was missed is not made up for"
    assert [told[1] for told in told] == list(range(200))


def test_f14_a_long_freeze_is_a_lost_camera() -> None:
    told = story(100, freeze=0.1, freeze_s=(10.0, 20.0), read_timeout=3.0)
    lost = [entry for entry in told if len(entry) == 2]
    assert lost
    assert {text for _, text in lost} == {"chaos:seed=7: no frame for 3 s"}
    assert [entry[1] for entry in told if len(entry) == 4] == list(range(len(told) - len(lost)))


def test_f14_a_lost_picture_is_not_given() -> None:
    told = story(200, lose=0.1)
    gone = [int(entry[1].rpartition(" ")[2]) for entry in told if len(entry) == 2]
    given = [entry[1] for entry in told if len(entry) == 4]
    assert len(gone) > 5
    assert sorted(gone + given) == list(range(200))


def test_f14_a_flood_comes_at_once() -> None:
    told = story(500, flood=0.01, flood_length=30)
    steps = np.diff([at for at, *_ in told])
    assert (steps == 0.0).sum() >= 30
    assert told[-1][0] < 499 / 25 * 0.95


def test_f14_sizes_and_pts_go_wrong() -> None:
    told = story(400, resize=0.1, bad_pts=0.3)
    sizes = {size for _, _, size, _ in told}
    assert len(sizes) > 20
    assert all(32 <= width <= 128 and 24 <= height <= 96 for width, height in sizes)
    pts = [pts for *_, pts in told]
    assert None in pts
    known = np.array([x for x in pts if x is not None])
    assert known.max() > 1e11
    assert (np.diff(known[known < 1e11]) < 0).any()


def test_f14_it_may_end_early() -> None:
    ends = [len(story(200, seed=seed, length=100, short=0.5)) for seed in range(40)]
    assert all(end <= 100 for end in ends)
    assert 8 <= sum(end < 100 for end in ends) <= 32
    source = ChaosSource(length=100, short=1.0, live=False)
    assert (source.total, source.live) == (100, False)


def test_it_may_refuse() -> None:
    source = ChaosSource(refuse=1.0)
    with pytest.raises(SourceError, match="refused") as caught:
        source.open()
    assert caught.value.retryable
    with pytest.raises(SourceError, match="not open"):
        source.read()


def test_a_freeze_can_be_interrupted() -> None:
    frozen = threading.Event()

    def wait(event: threading.Event, seconds: float) -> bool:
        frozen.set()
        return event.wait(seconds)

    source = ChaosSource(freeze=1.0, freeze_s=(60.0, 60.0), read_timeout=100.0, wait=wait)
    source.open()
    caught: list[SourceError] = []

    def read() -> None:
        try:
            source.read()
        except SourceError as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert frozen.wait(PATIENCE)
    source.interrupt()
    thread.join(PATIENCE / 2)
    assert not thread.is_alive(), "it waits for the end of the freeze"
    assert "interrupted" in str(caught[0])
    assert not caught[0].retryable
    with pytest.raises(SourceError, match="interrupted"):
        source.open()


def test_a_text_tells_everything() -> None:
    text = (
        "chaos:seed=7,length=200,short=0.1,size=32x16,fps=10,live=0,freeze=0.01,freeze_s=0.5-2,bad_pts=0.1,resize=0.1,"
        "flood=0.1,flood_length=3,lose=0.1,refuse=0.1,read_timeout=3"
    )
    source = ChaosSource.of(text)
    same = ChaosSource(
        7, length=200, short=0.1, size=(32, 16), fps=10.0, live=False, freeze=0.01, freeze_s=(0.5, 2.0), bad_pts=0.1,
        resize=0.1, flood=0.1, flood_length=3, lose=0.1, refuse=0.1, read_timeout=3.0,
    )
    plain = {name: value for name, value in vars(source).items() if isinstance(value, int | float | str | tuple)}
    assert plain == {name: vars(same)[name] for name in plain}
    assert source._random.getstate() == same._random.getstate()
    assert ChaosSource.of("chaos:freeze_s=3")._freeze_s == (3.0, 3.0)
