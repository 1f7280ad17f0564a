"""Keys for padded actions, missing cameras, history, prompts, norms and transforms: what graph and robot get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import DeviceOptions, Export, load_policy
from reflex_runtime.robots.policy.decomposed import DecomposedPolicy
from reflex_runtime.robots.policy.episodes import Rtc
from reflex_runtime.robots.sources.export_directory import OnnxStaged
from robots import means, tiny
from robots.means import CHUNK, HEIGHT, WIDTH
from robots.tiny import Bench, picture, run_alone

IMAGE = ("u", [HEIGHT, WIDTH, 3])
SIZE = [HEIGHT, WIDTH]
WORDS = {"open": 1, "door": 2, "task:": 3, "now": 4}


def answer(policy: Any, **sent: Any) -> Any:
    return run_alone(policy, policy.request(policy.prepare(**sent)))


def first(policy: Any, **sent: Any) -> Any:
    """The first action."""
    return answer(policy, **sent).actions[0]


def refused(root: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Export.load(root)


# -- padded actions ----------------------------------------------------------------------------------------------------


def test_p25_noise_has_x_dim_and_actions_the_first_of_it(tmp_path: Path) -> None:
    ports: Any = {"state": ("f", [2]), "noise": ("f", [CHUNK, 32])}
    root = means.write_export(tmp_path, ports, 32, action_dim=2, x_dim=32)
    policy = load_policy(root)
    chunk = answer(policy, state=[1.0, 3.0], seed=7)
    assert chunk.actions.shape == (CHUNK, 2)
    noise = np.random.default_rng(7).standard_normal((CHUNK, 32), dtype=np.float32)
    assert chunk.actions[0] == pytest.approx([2.0, noise.mean()], rel=1e-5)
    assert Export.load(root).action_dim == 2


def test_p25_noise_may_have_more_rows_than_a_chunk(tmp_path: Path) -> None:
    ports: Any = {"state": ("f", [2]), "noise": ("f", [CHUNK + 3, 2])}
    root = means.write_export(tmp_path / "a", ports, 2, horizon=CHUNK + 3)
    chunk = answer(load_policy(root), state=[1.0, 3.0], seed=7)
    noise = np.random.default_rng(7).standard_normal((CHUNK + 3, 2), dtype=np.float32)
    assert chunk.actions.shape == (CHUNK, 2)
    assert chunk.actions[0] == pytest.approx([2.0, noise.mean()], rel=1e-5)
    with pytest.raises(ConfigError, match=rf"input 'noise': found \[{CHUNK + 3}, 2\] .* expected \[{CHUNK}, 2\]"):
        load_policy(means.write_export(tmp_path / "b", ports, 2))
    tiny.write_export(tmp_path / "c", "decomposed", change=lambda c: c.update(horizon=9))
    refused(tmp_path / "c", r"horizon: found 9, expected none in a decomposed policy")


def staged_export(root: Path, x_dim: int = 5) -> Path:
    """tiny's decomposed export with an expert whose x has more columns than an action: they move towards the state."""
    from onnx import helper

    tiny.write_export(root, "decomposed", change=lambda c: c.update(x_dim=x_dim))
    columns = tiny._constant("pose_weights", np.eye(2, x_dim))
    nodes = [
        *tiny._POSE,
        *tiny._SCENE_AND_TIME,
        helper.make_node("Mul", ["kvt_term", "dt"], ["kvt_small"]),
        helper.make_node("Sub", ["pose_term", "x"], ["velocity"]),
        helper.make_node("Mul", ["velocity", "dt"], ["moved_x"]),
        helper.make_node("Add", ["x", "moved_x"], ["near"]),
        helper.make_node("Add", ["near", "kvt_small"], ["chunk"]),
    ]
    ports = {**tiny._PORTS, "x": (1, [tiny.CHUNK, x_dim]), "chunk": (1, [tiny.CHUNK, x_dim])}
    constants = [columns, *(c for c in tiny._CONSTANTS if c.name in ("one", "one_two", "dt"))]
    names = ["x", "t", "pose", "keys", "values"]
    values = [helper.make_tensor_value_info(n, ports[n][0], ["batch", *ports[n][1]]) for n in names]
    out = [helper.make_tensor_value_info("chunk", 1, ["batch", *ports["chunk"][1]])]
    graph = helper.make_graph(nodes, "wide", values, out, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", tiny.OPSET)], ir_version=tiny.IR)
    (root / "expert_denoise.onnx").write_bytes(model.SerializeToString())
    return root


def test_p25_a_decomposed_export_denoises_all_of_x_and_rtc_remembers_all_of_it(tmp_path: Path) -> None:
    model = Export.load(staged_export(tmp_path)).open(DeviceOptions())
    assert isinstance(model, OnnxStaged)
    policy = DecomposedPolicy(model, rtc=Rtc("ONES", 4), clock=lambda: 0.0)
    bench = Bench(policy)
    one = bench.answer(tiny.asked(policy, 1))
    assert one.actions.shape == (tiny.CHUNK, 2)
    assert policy.tails is not None
    anchor = policy.tails.anchor("episode-1", 1)
    assert anchor is not None
    assert anchor.target.shape == (tiny.CHUNK, 5)
    two = bench.answer(tiny.asked(policy, 1, request_id="next", executed=1))
    assert two.actions[:3] == pytest.approx(one.actions[1:], abs=1e-6)
    together = [bench.submit(tiny.asked(policy, i, episode_id=None)) for i in range(3)]
    bench.drain()
    for i, ticket in enumerate(together):
        alone = run_alone(policy, tiny.asked(policy, i, episode_id=None))
        assert np.abs(tiny.value(ticket).actions - alone.actions).max() <= 1e-6


def test_p25_x_narrower_than_an_action_is_refused_and_so_is_a_graph_of_another_width(tmp_path: Path) -> None:
    ports: Any = {"state": ("f", [2]), "noise": ("f", [CHUNK, 8])}
    refused(means.write_export(tmp_path / "a", ports, 8, x_dim=4), r"x_dim: found 4, expected at least action_dim, 8")
    root = means.write_export(tmp_path / "b", ports, 8, action_dim=2, x_dim=9)
    with pytest.raises(ConfigError, match=r"'noise': found \[3, 8\] after the batch axis, expected \[3, 9\]"):
        load_policy(root)


# -- missing cameras ---------------------------------------------------------------------------------------------------

TWO: Any = {"front": IMAGE, "wrist": IMAGE, "image_masks": ("i", [2])}


def test_p20_a_graph_gets_masks_of_the_cameras_that_were_sent(tmp_path: Path) -> None:
    images = {"front": SIZE, "wrist": SIZE}
    root = means.write_export(tmp_path, TWO, 3, images=images, optional_images=["wrist"])
    policy = load_policy(root)
    both = first(policy, images={"front": picture(1), "wrist": picture(2)})
    assert both == pytest.approx([picture(1).mean(), picture(2).mean(), 1.0], rel=1e-5)
    assert first(policy, images={"front": picture(1)}) == pytest.approx([picture(1).mean(), 0.0, 0.5], rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optional_images": ["roof"]}, r'optional_images: found "roof", expected names of `images`: front, wrist'),
        ({"optional_images": "wrist"}, "optional_images: found \"wrist\", expected a list"),
        ({"observation_steps": 0}, r"observation_steps: found 0, expected an integer in \[1, 64\]"),
        ({"x_dim": "wide"}, r"x_dim: found \"wide\""),
        ({"prompt": "{prompt}"}, "prompt: .* none, because `inputs` has no role tokens"),
        ({"action_transforms": [{"add_state": [True]}], "state_dim": 0}, "add_state: .* at most 0"),
    ],
)
def test_p20_wrong_keys_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    refused(means.write_export(tmp_path, TWO, 3, images={"front": SIZE, "wrist": SIZE}, **keys), message)


def test_p20_an_image_has_no_name_of_a_role(tmp_path: Path) -> None:
    ports: Any = {"image_masks": IMAGE}
    root = means.write_export(tmp_path, ports, 2, images={"image_masks": SIZE})
    refused(root, 'images.image_masks: found "image_masks", expected a name other than tokens, token_mask')


# -- history -----------------------------------------------------------------------------------------------------------


def test_p21_a_graph_gets_images_and_states_with_an_axis_of_history(tmp_path: Path) -> None:
    ports: Any = {
        "front": ("u", [2, HEIGHT, WIDTH, 3]), "state": ("f", [2, 2]), "image_masks": ("b", [2, 1]),
    }  # fmt: skip
    root = means.write_export(tmp_path, ports, 3, images={"front": SIZE}, observation_steps=2)
    bench = Bench(policy := load_policy(root))
    for i in (1, 2, 3):
        sent = {"images": {"front": picture(i)}, "state": [i, i], "episode_id": "e", "request_id": f"r{i}"}
        chunk = bench.answer(policy.request(policy.prepare(**sent, received=float(i))))
        before = max(1, i - 1)
        pictures = np.mean([picture(before).mean(), picture(i).mean()])
        assert chunk.actions[0] == pytest.approx([pictures, (before + i) / 2, 1.0], rel=1e-5)
    assert policy.describe()["history"]["episodes"] == 1


def test_p21_history_without_anything_to_look_at_is_refused(tmp_path: Path) -> None:
    ports: Any = {"tokens": ("i", [3])}
    keys = {"tokenizer": WORDS, "max_tokens": 3, "observation_steps": 2}
    refused(means.write_export(tmp_path, ports, 1, **keys), "observation_steps: found 2, expected 1, because")


# -- text --------------------------------------------------------------------------------------------------------------


def test_p26_a_graph_gets_the_mask_of_the_tokens(tmp_path: Path) -> None:
    ports: Any = {"tokens": ("i", [4]), "token_mask": ("b", [4])}
    keys = {"tokenizer": WORDS, "max_tokens": 4}
    policy = load_policy(means.write_export(tmp_path, ports, 2, **keys))
    assert first(policy, instruction="open door") == pytest.approx([0.75, 0.5])
    assert first(policy, instruction="open open open open open open") == pytest.approx([1.0, 1.0])  # cut
    ports = {"state": ("f", [2]), "token_mask": ("b", [4])}
    refused(means.write_export(tmp_path / "b", ports, 2), "inputs.token_mask: .* none without the role tokens")


def test_p26_the_template_is_what_is_tokenized(tmp_path: Path) -> None:
    ports: Any = {"tokens": ("i", [4])}
    prompt = {"template": "task: {prompt} now", "clean": ["strip", "underscores"]}
    keys = {"tokenizer": WORDS, "max_tokens": 4, "prompt": prompt}
    policy = load_policy(means.write_export(tmp_path, ports, 1, **keys))
    seen = policy.prepare(instruction=" open_door ")
    assert seen.tokens is not None
    assert seen.tokens.tolist() == [3, 1, 2, 4]
    assert seen.instruction == " open_door "


def test_p26_the_state_in_the_prompt_is_needed_normalised_and_part_of_the_scene(tmp_path: Path) -> None:
    ports: Any = {"tokens": ("i", [8])}
    words = {"128": 5, "192": 6, "0": 7, "255": 8, "-1": 9, "open": 1, ";": 2}
    keys: dict[str, Any] = {
        "tokenizer": words, "max_tokens": 8, "prompt": "{prompt} ; {state_bins}",
        "state_norm": {"min": [0.0, 0.0], "max": [2.0, 4.0]},
    }  # fmt: skip
    policy = load_policy(means.write_export(tmp_path, ports, 1, **keys))
    seen = policy.prepare(instruction="open", state=[1.0, 3.0])  # 0 and 0.5, once normalised
    assert seen.tokens is not None
    assert seen.tokens.tolist() == [1, 2, 5, 6, 0, 0, 0, 0]
    low = policy.prepare(instruction="open", state=[-1.0, 9.0]).tokens  # below and above what was seen in training
    assert low is not None
    assert low.tolist() == [1, 2, 9, 8, 0, 0, 0, 0]
    with pytest.raises(Exception, match="state: missing, and this policy needs it"):
        policy.prepare(instruction="open")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("no place", r"prompt: found \"no place\", expected a text with {prompt} once"),
        ("{prompt} {prompt}", "expected a text with {prompt} once"),
        ("{prompt} {pose}", "expected a text with {prompt} once, and perhaps {state_bins}"),
        ({"template": "{prompt}", "clean": ["wash"]}, "prompt.clean: .* a list of strip, lower, underscores, newlines"),
        ({"templet": "{prompt}"}, "prompt.templet: no such key; did you mean template?"),
    ],
)
def test_p26_wrong_templates_are_refused(tmp_path: Path, prompt: Any, message: str) -> None:
    keys = {"tokenizer": WORDS, "max_tokens": 3, "prompt": prompt}
    refused(means.write_export(tmp_path, {"tokens": ("i", [3])}, 1, **keys), message)


def test_p26_a_state_in_the_prompt_needs_one(tmp_path: Path) -> None:
    keys = {"tokenizer": WORDS, "max_tokens": 3, "prompt": "{prompt}{state_bins}", "state_dim": 0}
    refused(means.write_export(tmp_path, {"tokens": ("i", [3])}, 1, **keys), "state_dim: found 0, expected at least 1")


# -- norms and transforms ----------------------------------------------------------------------------------------------

STATE: Any = {"state": ("f", [2])}


def stated(root: Path, **keys: Any) -> Any:
    return load_policy(means.write_export(root, STATE, 2, **keys))


@pytest.mark.parametrize(
    ("norm", "state", "normalised"),
    [
        ({"mean": [1.0, 2.0], "std": [2.0, 4.0]}, [3.0, 2.0], [1.0, 0.0]),
        ({"mean": [1.0, 2.0], "std": [1.0, 0.0], "epsilon": 0.5}, [3.0, 3.0], [2 / 1.5, 2.0]),
        ({"min": [0.0, -2.0], "max": [4.0, 2.0]}, [1.0, 3.0], [-0.5, 1.5]),
        ({"q01": [0.0, 0.0], "q99": [1.0, 0.0], "epsilon": 1.0}, [1.0, 0.0], [0.0, -1.0]),
        ({"q10": [0.0, 0.0], "q90": [2.0, 4.0]}, [1.0, 4.0], [0.0, 1.0]),
    ],
)
def test_p27_every_affine_norm_goes_there_and_back(tmp_path: Path, norm: Any, state: Any, normalised: Any) -> None:
    there = stated(tmp_path / "a", state_norm=norm).prepare(state=state)
    assert there.state == pytest.approx(normalised, rel=1e-6, abs=1e-6)
    assert list(there.robot_state) == state
    export = Export.load(means.write_export(tmp_path / "b", STATE, 2, action_norm=norm))
    assert export.action_norm is not None
    assert export.action_norm.denormalise(np.float32(normalised)) == pytest.approx(state, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        ({"mean": [0.0, 0.0], "std": [1.0, 0.0]}, r"state_norm.std: found \[1.0, 0.0\], expected numbers > 0"),
        ({"min": [0.0, 0.0], "max": [1.0, 0.0]}, r"state_norm.max: .* expected numbers above min, or an epsilon"),
        ({"min": [0.0, 0.0], "q99": [1.0, 0.0]}, "state_norm: .* expected one pair of mean and std, min and max"),
        ({"min": [0.0, 0.0]}, "state_norm.max: found nothing, expected a list of 2 finite numbers"),
        ({"mean": [0.0, 0.0], "std": [1.0, 1.0], "epsilon": -1}, r"epsilon: found -1, expected a number in \[0, 1\]"),
        ({"maen": [0.0]}, "state_norm.maen: no such key; did you mean mean?"),
        ({}, "state_norm.mean: found nothing"),
    ],
)
def test_p27_wrong_norms_are_refused(tmp_path: Path, norm: Any, message: str) -> None:
    refused(means.write_export(tmp_path, STATE, 2, state_norm=norm), message)


def test_p28_transforms_run_in_their_order_around_the_norms(tmp_path: Path) -> None:
    policy = stated(
        tmp_path,
        state_transforms=[{"scale": [1.0, -1.0]}],
        state_norm={"mean": [1.0, 1.0], "std": [2.0, 2.0]},
        action_norm={"mean": [0.0, 0.0], "std": [3.0, 1.0]},
        action_transforms=[{"add_state": [True, False]}, {"scale": [1.0, 2.0], "offset": [0.5, 0.0]}],
    )
    # the graph gives the mean of the normalised state in column 0, and zeros in column 1
    normalised = (np.array([4.0, -6.0]) - 1.0) / 2.0
    assert first(policy, state=[4.0, 6.0]) == pytest.approx([normalised.mean() * 3.0 + 4.0 + 0.5, 0.0], rel=1e-6)


def test_p28_the_gripper_opens_or_closes(tmp_path: Path) -> None:
    binarise = {"binarise": {"dims": [0], "threshold": 0.5, "below": -1, "above": 1}}
    policy = stated(tmp_path, action_transforms=[binarise])
    assert [first(policy, state=[v, v])[0] for v in (0.4, 0.5, 0.6)] == [-1, -1, 1]
    from reflex_runtime.robots.policy.units import Binarised

    odd = Binarised((0,), 0.5, -1.0, 1.0)(np.float32([[np.nan], [np.inf], [1.0]]), None)
    assert np.isnan(odd[0, 0])  # the action guard must see it
    assert np.isinf(odd[1, 0])
    assert odd[2, 0] == 1


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([{}], r"action_transforms\[0\]: found {}, expected one of scale and offset, add_state, binarise"),
        ([{"scale": [1, 1], "add_state": [True]}], r"action_transforms\[0\]: .* expected one of"),
        ([{"scale": [1]}], r"action_transforms\[0\].scale: found \[1\], expected a list of 2 finite numbers"),
        ([{"add_state": [True] * 3}], r"add_state: .* at most 2, one for each"),
        ([{"add_state": [1]}], "add_state: .* a list of true and false"),
        ([{"binarise": {"dims": [2], "threshold": 0, "below": 0, "above": 1}}], r"dims: .* integers in \[0, 1\]"),
        ([{"binarise": {"dims": [0], "threshold": 0, "below": 0}}], "binarise.above: found nothing, expected a number"),
        ([{"turn": [1]}], r"action_transforms\[0\].turn: no such key"),
        ({"scale": [1, 1]}, "action_transforms: .* a list of at most 16 objects"),
        ([[1]], r"action_transforms\[0\]: found \[1\], expected an object"),
    ],
)
def test_p28_wrong_transforms_are_refused(tmp_path: Path, transforms: Any, message: str) -> None:
    refused(means.write_export(tmp_path, STATE, 2, action_transforms=transforms), message)


def test_p28_adding_the_state_needs_one_whatever_the_graph_reads(tmp_path: Path) -> None:
    ports: Any = {"front": IMAGE}
    keys = {"images": {"front": SIZE}, "action_transforms": [{"add_state": [True]}]}
    policy = load_policy(means.write_export(tmp_path / "a", ports, 2, **keys))
    flat = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    assert list(first(policy, images={"front": flat}, state=[0.25, 9.0])) == [0.25, 0.0]
    with pytest.raises(Exception, match="state: missing"):
        policy.prepare(images={"front": flat})


def test_old_exports_are_read_as_before(tmp_path: Path) -> None:
    export = Export.load(tiny.write_export(tmp_path))
    assert (export.x_dim, export.observation_steps, export.optional_images) == (2, 1, frozenset())
    assert (export.prompt, export.state_transforms, export.action_transforms) == (None, (), ())
    norm = json.loads((tmp_path / "reflex_config.json").read_text())["action_norm"]
    assert export.action_norm is not None
    value = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    old = (value * np.float32(norm["std"]) + np.float32(norm["mean"])).astype(np.float32)
    assert export.action_norm.denormalise(value).tobytes() == old.tobytes()


# -- everything at once, decomposed ------------------------------------------------------------------------------------


def everything(root: Path) -> Path:
    """A prefix that reads two cameras of two observations, masks, text and state, and an expert whose x is wider than
    an action and ends at the means of all that."""
    from onnx import TensorProto, helper

    images = {"front": SIZE, "wrist": SIZE}
    ports: Any = {
        "front": ("u", [2, *SIZE, 3]), "wrist": ("u", [2, *SIZE, 3]), "tokens": ("i", [6]), "state": ("f", [2, 2]),
        "token_mask": ("b", [6]), "image_masks": ("f", [2, 2]),
    }  # fmt: skip
    means.write_export(
        root, ports, 8, images=images, optional_images=["wrist"], observation_steps=2, x_dim=8, action_dim=7,
        export_kind="decomposed", num_denoising_steps=2, tokenizer={"go": 1, "128": 5}, max_tokens=6,
        prompt="{prompt} {state_bins}", state_norm={"q01": [-1, -1], "q99": [1, 1]},
        inputs={name.replace("__", "/"): name for name in ports} | {"noise": "x", "time": "t"},
        decomposed={
            "vlm_prefix_onnx": "prefix.onnx", "expert_denoise_onnx": "expert.onnx",
            "past_kv_tensor_names": ["kv"], "expert_takes_state": False,
        },
    )  # fmt: skip
    means.write_means(root / "prefix.onnx", ports, 8, "kv")
    (root / "model.onnx").unlink()
    nodes = [  # at t = 0 half of the way, at t = 1/2 all of it: x + (kv − x) · (t + 1/2)
        helper.make_node("Sub", ["kv", "x"], ["way"]),
        helper.make_node("Add", ["t", "half"], ["share"]),
        helper.make_node("Unsqueeze", ["share", "one_two"], ["share_term"]),
        helper.make_node("Mul", ["way", "share_term"], ["moved"]),
        helper.make_node("Add", ["x", "moved"], ["chunk"]),
    ]
    wide = [means.CHUNK, 8]
    inputs = [("x", wide), ("t", []), ("kv", wide)]
    graph = helper.make_graph(
        nodes,
        "expert",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *dims]) for name, dims in inputs],
        [helper.make_tensor_value_info("chunk", TensorProto.FLOAT, ["batch", *wide])],
        [tiny._constant("half", 0.5), tiny._constant("one_two", [1, 2], np.int64)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", means.OPSET)], ir_version=means.IR)
    (root / "expert.onnx").write_bytes(model.SerializeToString())
    return root


def test_p25_a_decomposed_export_with_all_of_it_batches_and_caches(tmp_path: Path) -> None:
    bench = Bench(policy := load_policy(everything(tmp_path)))

    def ask(i: int, robot: int, *cameras: str, **more: Any) -> Any:
        pictures = {name: picture(10 * robot + i) for name in cameras}
        fields = {"images": pictures, "instruction": "go", "state": [0.0, 0.25 * i], "received": float(i)}
        return policy.request(policy.prepare(**fields, episode_id=f"e{robot}", request_id=f"{robot}-{i}", **more))

    for robot in (1, 2):
        bench.answer(ask(1, robot, "front"))
    tickets = [bench.submit(ask(2, robot, "front", "wrist")) for robot in (1, 2)]
    bench.drain()
    assert max(len(batch) for batch in bench.batches) == 2
    for robot, ticket in zip((1, 2), tickets, strict=True):
        before, now = picture(10 * robot + 1).mean(), picture(10 * robot + 2).mean()
        tokens = [1, 5, 0, 0, 0, 0]  # 0.5 is bin 192, which is no word here
        assert tiny.value(ticket).actions[0] == pytest.approx(
            [(before + now) / 2, now / 2, np.mean(tokens), np.mean([0.0, 0.25, 0.0, 0.5]), 0.5, 0.75, 0.0], rel=1e-4
        )
    assert bench.answer(ask(3, 1, "front")).cache == "miss"
    assert bench.answer(ask(3, 1, "front")).cache == "hit"  # asked again: the same past, so the same prefix
