"""Cameras that a request may leave out: black pictures, and masks that say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import InvalidRequest, load_policy
from reflex_runtime.robots.policy.decomposed import DecomposedPolicy
from reflex_runtime.robots.serving.question import ObservationReader
from robots.plain import plain
from robots.tiny import Bench, picture

CAMERAS = {"front": (4, 6), "wrist": (4, 6)}


def look(row: Any) -> Any:
    """(mask of the wrist camera, brightness of its picture)."""
    return [float(row.row("image_masks")[1]), row.row("wrist").mean()]


def two_cameras(**changes: Any) -> Any:
    return load_policy(plain(look, images=CAMERAS, optional_images=frozenset({"wrist"}), **changes))


def sent(*cameras: str, **more: Any) -> dict[str, Any]:
    fields = {"images": {name: picture(i) for i, name in enumerate(cameras)}, "state": [0.0, 0.0], "episode_id": "e"}
    return fields | more


def test_p20_a_camera_that_is_left_out_is_black_and_its_mask_false() -> None:
    bench = Bench(policy := two_cameras())
    both = bench.answer(policy.request(policy.prepare(**sent("front", "wrist"))))
    one = bench.answer(policy.request(policy.prepare(**sent("front"))))
    assert both.actions[0] == pytest.approx([1.0, picture(1).mean()])
    assert list(one.actions[0]) == [0.0, 0.0]
    masks = policy.prepare(**sent("front")).row("image_masks")
    assert (masks.tolist(), masks.dtype) == ([True, False], np.bool_)
    assert policy.fields.look({"front": picture(0, 80, 60)}) == 80 * 60 // 8  # only what is there is decoded


def test_p20_only_cameras_that_are_marked_may_be_left_out() -> None:
    policy = two_cameras()
    with pytest.raises(InvalidRequest, match=r"images\.front: missing, and this policy needs it"):
        policy.prepare(**sent("wrist"))
    with pytest.raises(InvalidRequest, match=r"images\.front: missing"):
        policy.fields.look({"wrist": picture(0)})


def test_p20_one_image_must_come_where_all_are_optional() -> None:
    policy = load_policy(plain(look, images=CAMERAS, optional_images=frozenset(CAMERAS)))
    assert policy.prepare(**sent("wrist")).present == {"front": False, "wrist": True}
    assert policy.prepare(**sent("front")).present == {"front": True, "wrist": False}
    for none in (policy.prepare, lambda images, **_: policy.fields.look(images)):
        with pytest.raises(InvalidRequest, match="images: one of front, wrist is needed"):
            none(**sent())


def test_p20_a_picture_of_no_camera_is_not_left_out_in_silence() -> None:
    policy = load_policy(plain(look, images=CAMERAS, optional_images=frozenset(CAMERAS)))
    reader, state = ObservationReader(policy.spec, None), {"state": np.zeros(2)}
    images, _, _ = reader.read({"observation/wrist": picture(0), **state})
    assert [camera for camera, _, _ in images] == ["wrist"]
    for seen in ({}, {"observation/wrist": picture(0), "observation/frnt": picture(1)}):
        with pytest.raises(InvalidRequest, match=r"front: missing; came: .*; expected: front, wrist, state"):
            reader.read(seen | state)


def test_p20_a_black_picture_is_not_a_missing_one_to_the_prefix_cache() -> None:
    policy = two_cameras(staged=True)
    assert isinstance(policy, DecomposedPolicy)
    bench = Bench(policy)
    black = {"front": picture(0), "wrist": np.zeros((4, 6, 3), np.uint8)}
    assert bench.answer(policy.request(policy.prepare(**sent("front")))).cache == "miss"
    with_black = bench.answer(policy.request(policy.prepare(**sent(images=black))))
    assert with_black.cache == "miss"
    assert with_black.actions[0] == pytest.approx([1.0, 0.0], abs=1e-6)
    assert bench.answer(policy.request(policy.prepare(**sent("front")))).cache == "hit"


def test_p20_a_spec_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match='optional_images: found "roof", expected names'):
        plain(look, images=CAMERAS, optional_images=frozenset({"roof"}))
    with pytest.raises(ConfigError, match="observation_steps: found 0"):
        plain(look, observation_steps=0)


def test_p20_masks_have_the_axis_of_history() -> None:
    seen: list[Any] = []

    def keep(row: Any) -> float:
        seen.append(row.row("image_masks").tolist())
        return 0.0

    changes: dict[str, Any] = {"optional_images": frozenset({"wrist"}), "observation_steps": 2}
    policy = load_policy(plain(keep, images=CAMERAS, **changes))
    bench = Bench(policy)
    for i, cameras in enumerate([("front",), ("front", "wrist")]):
        fields = sent(*cameras, request_id=f"r{i}", received=float(i))
        bench.answer(policy.request(policy.prepare(**fields)))
    assert seen[-2:] == [
        [[True, False], [True, False]],
        [[True, False], [True, True]],
    ]
