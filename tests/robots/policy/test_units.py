"""Norms, transforms and prompts against numbers that openpi's and LeRobot's own code gives.

openpi: commit 15a9616a, `transforms.Normalize`, `Unnormalize`, `PadStatesAndActions`, `AbsoluteActions`, `AlohaInputs`,
`AlohaOutputs` and `PaligemmaTokenizer.tokenize`, run by hand. LeRobot 0.6.1: `NormalizerProcessorStep`,
`UnnormalizerProcessorStep`, `to_absolute_actions`. Both compute in float64 or float32; the bound is float32's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import DecomposedPolicy, DeviceOptions, Export, load_policy
from reflex_runtime.robots.policy.episodes import Rtc
from reflex_runtime.robots.policy.tokenizer import PromptTemplate
from reflex_runtime.robots.policy.units import AddState, Norm, Scaled, shift_of
from robots import means
from robots.plain import plain
from robots.tiny import run_alone

EXPORTS = Path(__file__).parents[3] / "docs" / "exports.md"
STATE = {"state": ("f", [3])}

# Quantiles, slice of 32 padded actions, changes to targets but for the gripper: openpi's DROID in joint positions.
DROID: dict[str, Any] = {
    "q01": [-1.8394, -0.9617, -1.0469, -1.4352, -0.8022, -1.709, -1.4143, -0.8031],
    "q99": [1.0707, 1.5699, 1.4188, 1.9115, 1.9875, 1.5855, 1.7133, 0.7293],
    "state": [0.4258, 0.6952, -0.1975, 0.1065, -0.041, 0.917, -0.3654, -0.1958],
    "normalised": [0.5567845, 0.308974, -0.3110276, -0.0786748, -0.4542784, 0.5941716, -0.3292623, -0.2073876],
    "x": [0.732007, 0.739058, 0.036781, -0.514077, -1.070566, -0.279915, -0.219664, -1.09134],
    "actions": [1.1065577, 1.9348005, 0.0337959, -0.5155805, -0.9416291, 0.3941604, -0.5594101, -0.8730847],
}  # fmt: skip
# Mean and std, joint flips, the grippers' geometry, changes to targets: openpi's ALOHA with adapt_to_pi.
ALOHA: dict[str, Any] = {
    "state": [
        -0.9982, -0.1596, 0.2629, 0.8699, 0.8474, -0.3453, 0.1,
        -0.6247, 0.6465, -0.6855, -0.1898, -0.8531, 0.7161, 0.9,
    ],
    "mean": [
        -0.3602, 0.0271, -0.2419, -0.0082, 0.0532, -0.3937, 0.3644,
        -0.2213, -0.0529, -0.4427, -0.4973, -0.3048, -0.1583, 0.4281,
    ],
    "std": [
        0.9008, 0.5325, 0.5093, 0.7003, 0.8729, 0.4036, 0.8143,
        0.4591, 0.6346, 0.7637, 0.5512, 0.7217, 0.7276, 0.1051,
    ],
    "amean": [
        -0.4609, -0.351, -0.2864, -0.2968, -0.451, -0.2828, 0.1009,
        0.3861, -0.1505, -0.1336, -0.0833, 0.1803, 0.2853, 0.441,
    ],
    "astd": [
        0.4381, 0.7361, 0.4075, 0.8416, 0.3076, 0.8839, 0.5546,
        0.7528, 0.5815, 0.3845, 0.5449, 0.1454, 0.1387, 0.577,
    ],
    "x": [
        -0.045651, 0.666275, -0.959755, 0.113768, -0.018726, 0.195994, 0.459157,
        0.049481, 0.126076, -0.016432, 0.230414, -0.503746, 0.105227, 0.344774,
    ],
    "normalised": [
        -0.7082585, 0.2488258, -0.041233, 1.2538894, 0.9098397, 0.1199204, -1.4327392,
        -0.8786738, -0.9353909, 1.4772797, 0.5578727, -0.7597329, 1.2017576, 0.6997094,
    ],
    "actions": [
        -1.4790997, -0.2990457, 0.9404011, 0.6688473, 0.3906399, -0.4548607, 0.721701,
        -0.2013507, 0.7236867, -0.5455819, -0.1475472, -0.7460452, 1.0159951, 0.8563343,
    ],
}  # fmt: skip


def served(root: Path, golden: dict[str, Any], **keys: Any) -> tuple[Any, Any]:
    """(normalised state, first action) of an export with these keys, whose model answers the golden x, padded to 32."""
    dim = len(golden["state"])
    ports: Any = {"state": ("f", [dim])}
    root = means.write_export(root, ports, 32, action_dim=dim, state_dim=dim, x_dim=32, **keys)
    export = Export.load(root)
    fields = {
        name: getattr(export, name)
        for name in ("state_norm", "action_norm", "state_transforms", "action_transforms", "x_dim")
    }
    x = np.concatenate([golden["x"], np.full(32 - dim, 9.0)])
    policy = load_policy(plain(lambda row: x, images={}, state_dim=dim, action_dim=dim, **fields))
    seen = policy.prepare(state=golden["state"])
    return seen.state, run_alone(policy, policy.request(seen)).actions[0]


def test_p28_droid_gets_what_openpi_gives(tmp_path: Path) -> None:
    norm = {"q01": DROID["q01"], "q99": DROID["q99"], "epsilon": 1e-6}
    transforms = [{"add_state": [True] * 7 + [False]}]
    state, action = served(tmp_path, DROID, state_norm=norm, action_norm=norm, action_transforms=transforms)
    assert state == pytest.approx(DROID["normalised"], abs=1e-6)
    assert action == pytest.approx(DROID["actions"], abs=1e-6)


def test_p28_aloha_gets_what_openpi_gives_with_the_keys_on_the_page(tmp_path: Path) -> None:
    (shown,) = re.findall(r'```json\n("state_transforms".*?)```', EXPORTS.read_text(encoding="utf-8"), re.DOTALL)
    state, action = served(
        tmp_path,
        ALOHA,
        state_norm={"mean": ALOHA["mean"], "std": ALOHA["std"], "epsilon": 1e-6},
        action_norm={"mean": ALOHA["amean"], "std": ALOHA["astd"], "epsilon": 1e-6},
        **json.loads("{" + shown + "}"),
    )
    assert state == pytest.approx(ALOHA["normalised"], abs=2e-6)
    assert action == pytest.approx(ALOHA["actions"], abs=2e-6)


MEAN_STD, RANGE = {"mean": [0.25, -1.5, 2.0], "std": [0.5, 2.0, 0.0]}, ([-1.0, 0.0, 0.5], [3.0, 0.2, 0.5])


@pytest.mark.parametrize(
    ("norm", "state", "actions"),
    [
        (MEAN_STD, [0.89999998, -0.375, -150000000.0], [0.40000001, -3.0999999, 2.0]),
        ({"min": RANGE[0], "max": RANGE[1]}, [-0.14999998, -23.5, -1.0], [1.5999999, 0.02, 0.5]),
        ({"q01": RANGE[0], "q99": RANGE[1]}, [-0.14999998, -23.5, -1.0], [1.5999999, 0.02, 0.5]),
        ({"q10": RANGE[0], "q90": RANGE[1]}, [-0.14999998, -23.5, -1.0], [1.5999999, 0.02, 0.5]),
    ],
)
def test_p27_norms_are_those_of_lerobot(tmp_path: Path, norm: Any, state: Any, actions: Any) -> None:
    """With dimensions that never varied."""
    keys = {"state_norm": norm | {"epsilon": 1e-8}, "action_norm": norm | {"epsilon": 1e-8}, "state_dim": 3}
    export = Export.load(means.write_export(tmp_path, STATE, 3, **keys))  # type: ignore[arg-type]
    assert export.state_norm is not None
    assert export.action_norm is not None
    assert export.state_norm.normalise(np.float32([0.7, -2.25, 0.5])) == pytest.approx(state, rel=2e-6)
    assert export.action_norm.denormalise(np.float32([0.3, -0.8, 1.2])) == pytest.approx(actions, rel=2e-6, abs=2e-8)


def test_p26_the_prompt_is_that_of_pi05() -> None:
    """Bins of values below, at the edges of and above the range; PaligemmaTokenizer's text for this instruction."""
    (shown,) = re.findall(r'```json\n"prompt": (.*?)\n```', EXPORTS.read_text(encoding="utf-8"), re.DOTALL)
    keys = json.loads(shown)
    template = PromptTemplate(keys["template"], tuple(keys["clean"]))
    state = np.float32([-1.2, -1.0, -0.5, 0.0, 0.25, 0.999, 1.0, 1.5])
    text = template.render(" pick_up the\nblock ", state)
    assert text == "Task: pick up the block, State: -1 0 64 128 160 255 255 255;\nAction: "


def test_p26_a_template_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompt: .* none without a tokenizer"):
        plain(lambda row: 0.0, takes_text=True, prompt=PromptTemplate())
    with pytest.raises(ConfigError, match="takes_state: found false, expected True, because"):
        plain(lambda row: 0.0, takes_state=False, action_transforms=[AddState(np.float32([1.0]))])


@pytest.mark.parametrize(
    ("clean", "text"),
    [
        ((), " Pick_up\nit "),
        (("strip", "lower"), "pick_up\nit"),
        (("underscores", "newlines"), " Pick up it "),
        (("strip", "end_newline"), "Pick_up\nit\n"),
        (("strip", "end_newline", "end_newline"), "Pick_up\nit\n"),
    ],
)
def test_p26_instructions_are_cleaned_in_the_order_that_is_written(clean: Any, text: str) -> None:
    assert PromptTemplate(clean=clean).render(" Pick_up\nit ", None) == text


def test_p26_a_placeholder_in_an_instruction_is_only_text() -> None:
    template = PromptTemplate("{prompt} {state_bins}")
    assert template.render("{state_bins} {prompt}", np.float32([0.0])) == "{state_bins} {prompt} 128"


# -- transforms and chunks that continue -------------------------------------------------------------------------------


@pytest.mark.parametrize("flip", [False, True])
def test_p28_a_chunk_of_changes_continues_at_the_places_that_the_old_one_went_to(flip: bool) -> None:
    """The robot has moved meanwhile: the same changes from there would be other places."""
    before = (Scaled(np.float32([-2.0, 1.0]), np.float32([0.5, 0.0])),) if flip else ()
    after = (Scaled(np.float32([3.0, 1.0]), np.float32([1.0, 0.0])),)
    spec = plain(
        lambda row: [0.5, 0.25, 7.0],
        staged=True,
        chunk_size=4,
        x_dim=3,
        action_norm=Norm(np.float32([0.1, 0.2]), np.float32([0.5, 2.0])),
        action_transforms=(*before, AddState(np.float32([1.0, 0.0])), *after),
    )
    policy = DecomposedPolicy(spec.open(DeviceOptions()), rtc=Rtc("ONES", 4), clock=lambda: 0.0)  # type: ignore[arg-type]

    def ask(state: list[float], name: str, **more: Any) -> Any:
        image = {"front": np.zeros((4, 6, 3), np.uint8)}
        seen = policy.prepare(images=image, state=state, episode_id="e", request_id=name, **more)
        return run_alone(policy, policy.request(seen))

    first = ask([1.0, 5.0], "first")
    second = ask([4.0, -5.0], "second", executed=1)
    assert second.rtc is not None
    assert second.actions[:3] == pytest.approx(first.actions[1:], abs=1e-5)
    alone = ask([4.0, -5.0], "second", executed=9)  # nothing of the old chunk is left
    assert np.abs(alone.actions[:3, 0] - first.actions[1:, 0]).max() > 1.0


def test_p28_actions_that_are_no_changes_are_carried_over_as_they_are() -> None:
    norm = Norm(np.float32([0.0, 0.0]), np.float32([1.0, 0.5]))
    moved = np.float32([2.0, 3.0])
    assert shift_of(norm, (Scaled(np.float32([2.0, 2.0]), np.float32([0.0, 0.0])),), moved, 2) is None
    flat = (Scaled(np.float32([1.0, 0.0]), np.float32([0.0, 0.0])), AddState(np.float32([1.0, 1.0])))
    shift = shift_of(norm, flat, moved, 2)
    assert shift is not None
    assert shift.tolist() == [-2.0, 0.0]
