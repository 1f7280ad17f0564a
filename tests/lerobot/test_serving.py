"""`reflex serve lerobot:DIR`: every answer is that of LeRobot's own `predict_action_chunk` and postprocessor."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import shutil
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lerobot.policies.factory", exc_type=ImportError)

import torch
from tiny_checkpoints import FAMILIES, OLD, STAGED, TASKS, TOP, WRIST, load

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import DecomposedPolicy, DeviceOptions, InvalidRequest, Policy, load_policy, read_source
from reflex_runtime.robots.analysis.doctor import examine
from reflex_runtime.robots.policy.episodes import Rtc
from reflex_runtime.robots.policy.observation import noise_of
from reflex_runtime.robots.serving.decode_pool import cameras_of
from reflex_runtime.robots.serving.question import ObservationReader
from reflex_runtime.robots.sources.lerobot_checkpoint import STEPS, LeRobotCheckpoint
from serving.harness import Server

pytestmark = pytest.mark.filterwarnings("default")  # LeRobot's and its dependencies' are not ours
BOUND = 1e-5
ROWS = 8


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def loaded(path: Path, **options: Any) -> Policy:
    return load_policy(f"lerobot:{path}", **options)


def asked(spec: Any, number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "images": {name: rng.integers(0, 256, (*size, 3), np.uint8) for name, size in spec.images.items()},
        "state": rng.uniform(-1, 1, spec.state_dim).astype(np.float32),
        "instruction": TASKS[number % 4] if spec.takes_text else None,
        "request_id": f"request-{number}",
    }


class Reference:
    """LeRobot's own answer to a request, from the same noise."""

    def __init__(self, policy: Policy) -> None:
        spec = policy.spec
        assert isinstance(spec, LeRobotCheckpoint)
        self._ours, self._spec = policy, spec
        self._policy, self._pre, self._post = load(spec.path)

    def answer(self, fields: dict[str, Any]) -> Any:
        seen = self._ours.prepare(**fields)
        raw: dict[str, Any] = {"task": fields["instruction"] or ""}
        for camera, name in self._spec.cameras.items():
            if camera not in fields["images"]:
                continue
            raw[name] = torch.from_numpy(fields["images"][camera]).permute(2, 0, 1).float() / 255
        place = 0
        for name, size in self._spec.states:
            raw[name], place = torch.from_numpy(fields["state"][place : place + size]), place + size
        noise = torch.from_numpy(noise_of(seen.seed, self._spec.horizon, self._spec.x_dim))[None]
        with torch.no_grad():
            return self._post(self._chunk(raw, noise, seen.seed)).numpy()[0]

    def _chunk(self, raw: dict[str, Any], noise: Any, seed: int) -> Any:
        kind, config = self._spec.model_type, self._policy.config
        if kind not in ("diffusion", "vqbet"):
            return self._policy.predict_action_chunk(self._pre(raw), **({} if kind == "act" else {"noise": noise}))
        n = config.n_obs_steps  # the first observation of an episode, n times
        together = {k: [v] if k == "task" else v[None].repeat(n, *[1] * v.ndim)[None] for k, v in raw.items()}
        batch = self._pre(together)
        if config.image_features:
            batch["observation.images"] = torch.stack([batch[name] for name in config.image_features], dim=-4)
        torch.manual_seed(seed % (1 << 63))
        if kind == "vqbet":
            return self._policy.vqbet(batch, rollout=True)[:, : config.action_chunk_size]
        return self._policy.diffusion.generate_actions(batch, noise=noise)


@pytest.mark.parametrize("family", FAMILIES)
def test_p10_answers_are_those_of_lerobot(checkpoints: dict[str, Path], family: str) -> None:
    """Alone, in a batch of eight and, where there are steps, joined two at every step."""
    policy = loaded(checkpoints[family])
    reference = Reference(policy)
    fields = [asked(policy.spec, i) for i in range(ROWS)]
    expected = [reference.answer(f) for f in fields]
    assert max(np.abs(a - b).max() for a in expected for b in expected) > 0.05  # they are different requests
    ways: dict[str, list[int]] = {"together": [0] * ROWS}
    if policy.spec.staged:
        ways["joined"] = [i // 2 for i in range(ROWS)]
    for how, starts in ways.items():
        chunks = policy.answers([policy.request(policy.prepare(**f)) for f in fields], starts)
        worst = max(np.abs(chunk.actions - e).max() for chunk, e in zip(chunks, expected, strict=True))
        print(f"{family}: {how}: {worst:.1e}")
        assert worst <= BOUND, how
    for f, e in zip(fields, expected, strict=True):
        (chunk,) = policy.answers([policy.request(policy.prepare(**f))])
        assert np.abs(chunk.actions - e).max() <= BOUND


def test_p10_a_scheduler_that_adds_noise_answers_each_request_by_its_own_seed(checkpoints: dict[str, Path]) -> None:
    policy = loaded(checkpoints["diffusion-ddpm"])
    fields = [asked(policy.spec, i) for i in range(3)]
    together = policy.answers([policy.request(policy.prepare(**f)) for f in fields])
    torch.manual_seed(99)
    (alone,) = policy.answers([policy.request(policy.prepare(**fields[2]))])
    assert np.abs(alone.actions - together[2].actions).max() <= BOUND
    (other,) = policy.answers([policy.request(policy.prepare(**fields[2], seed=5))])
    assert np.abs(alone.actions - other.actions).max() > 0.01


@pytest.mark.parametrize("family", STAGED)
def test_p10_a_chunk_continues_at_the_places_the_old_one_went_to(checkpoints: dict[str, Path], family: str) -> None:
    """Real-time chunking, frozen wholly: also where actions are added to the state, and the state has moved."""
    policy = loaded(checkpoints[family], rtc=Rtc("ONES", 8))
    first, then = asked(policy.spec, 1), asked(policy.spec, 2)
    (old,) = policy.answers([policy.request(policy.prepare(**first, episode_id="e"))])
    (new,) = policy.answers([policy.request(policy.prepare(**then, episode_id="e", executed=3))])
    assert new.rtc is not None
    assert np.abs(new.actions[:5] - old.actions[3:]).max() <= BOUND
    assert np.abs(new.actions[5:] - old.actions[:3]).max() > 0.01


@pytest.mark.skipif(OLD, reason="LeRobot 0.4 has no relative actions")
def test_p10_a_device_thread_that_was_given_up_changes_no_later_answer(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back in the middle of another's `finish`, to finish its own."""
    from lerobot.processor import UnnormalizerProcessorStep

    policy = loaded(checkpoints["pi05-relative"])
    mine, others = (policy.prepare(**asked(policy.spec, i)) for i in (1, 2))
    x = np.zeros((1, 8, 32), np.float32)
    expected = policy.model.finish([mine], x)
    unnormalise, late = UnnormalizerProcessorStep.__call__, [others]

    def interrupted(step: Any, transition: Any) -> Any:
        if late:
            thread = threading.Thread(target=policy.model.finish, args=([late.pop()], x))
            thread.start()
            thread.join()
        return unnormalise(step, transition)

    monkeypatch.setattr(UnnormalizerProcessorStep, "__call__", interrupted)
    assert policy.model.finish([mine], x).tobytes() == expected.tobytes()
    assert not late


@pytest.mark.parametrize("family", STAGED)
def test_p10_threads_have_processors_of_their_own_and_one_tokenizer(checkpoints: dict[str, Path], family: str) -> None:
    """A copy of π0's tokenizer takes half a second and 360 MB."""
    policy = loaded(checkpoints[family])
    library = policy.model.loaded
    with ThreadPoolExecutor(1) as thread:
        (one, _), (other, _) = library._pair(), thread.submit(library._pair).result()
    steps = [(a, b) for a, b in zip(one.steps, other.steps, strict=True) if hasattr(a, "input_tokenizer")]
    assert one is not other
    assert [a is b for a, b in steps] == [False]
    assert [a.input_tokenizer is b.input_tokenizer for a, b in steps] == [True]
    fields = [asked(policy.spec, i) for i in range(4)]
    alone = [policy.prepare(**f).ready.tokens for f in fields]
    found: list[bool] = []

    def prepare(number: int) -> None:
        found.extend(torch.equal(policy.prepare(**fields[number]).ready.tokens, alone[number]) for _ in range(50))

    threads = [threading.Thread(target=prepare, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 200


@pytest.mark.parametrize("family", STAGED)
def test_p11_steps_copy_no_prefix_and_prefixes_keep_no_neighbours(
    checkpoints: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = loaded(checkpoints[family])
    assert isinstance(policy, DecomposedPolicy)
    packed: list[Any] = []
    pack = policy.model.pack
    monkeypatch.setattr(policy.model, "pack", lambda p, rows: (packed.append(pack(p, rows)), packed[-1])[1])
    fields = [asked(policy.spec, i) | {"episode_id": f"e{i}"} for i in range(3)]
    policy.answers([policy.request(policy.prepare(**f)) for f in fields])
    assert len(packed) == 1
    prefix = policy.request(policy.prepare(**fields[1])).payload.prefix
    keys = prefix.tensors["keys 0"]
    assert keys.shape[0] == 1
    assert keys.untyped_storage().nbytes() == keys.numel() * 4
    assert policy.cache is not None
    assert policy.cache.snapshot()["bytes"] >= prefix.nbytes
    if not OLD:
        before = [layer.keys.clone() for layer in packed[0].cache.layers]
        place = packed[0].cache.layers[0].keys.data_ptr()
        policy.model.step(packed[0], np.zeros((3, 8, 32), np.float32), np.array([0, 4, 9]), 10)
        assert all(torch.equal(a, b.keys) for a, b in zip(before, packed[0].cache.layers, strict=True))
        assert packed[0].cache.layers[0].keys.data_ptr() == place


@pytest.mark.parametrize("family", STAGED)
def test_p11_a_cached_prefix_answers_as_a_new_one(checkpoints: dict[str, Path], family: str) -> None:
    policy = loaded(checkpoints[family])
    fields = asked(policy.spec, 1) | {"episode_id": "e"}
    first, second = (policy.answers([policy.request(policy.prepare(**fields))])[0] for _ in range(2))
    assert (first.cache, second.cache) == ("miss", "hit")
    assert first.actions.tobytes() == second.actions.tobytes()
    moved = fields | {"state": fields["state"] + 0.3}
    (third,) = policy.answers([policy.request(policy.prepare(**moved))])
    assert third.cache == ("hit" if family == "pi0" else "miss")  # of the others the prefix reads the state
    (fresh,) = policy.answers([policy.request(policy.prepare(**{**moved, "episode_id": "other"}))])
    assert np.abs(third.actions - fresh.actions).max() <= BOUND


def test_p10_pictures_that_may_not_be_written_to_are_no_warning(checkpoints: dict[str, Path]) -> None:
    """As they come from a request: torch warns of each that it is given, once, on the server's terminal."""
    policy = loaded(checkpoints["act"])
    fields = asked(policy.spec, 1)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            before = policy.prepare(**fields).ready.batch
            for image in fields["images"].values():
                image.setflags(write=False)
            after = policy.prepare(**fields).ready.batch
    finally:
        torch.set_warn_always(False)
    assert all(torch.equal(before[name], after[name]) for name in policy.spec.cameras.values())


def test_p12_history_is_kept_by_episode_and_not_in_the_policy(checkpoints: dict[str, Path]) -> None:
    """Two robots in turns get what each would get alone."""
    policy = loaded(checkpoints["diffusion"])
    alone = {}
    for robot in (0, 1):
        steps = [asked(policy.spec, 10 * robot + i) | {"episode_id": f"alone-{robot}"} for i in range(3)]
        alone[robot] = [policy.answers([policy.request(policy.prepare(**f))])[0].actions for f in steps]
    for i in range(3):
        for robot in (0, 1):
            fields = asked(policy.spec, 10 * robot + i) | {"episode_id": f"turns-{robot}"}
            (chunk,) = policy.answers([policy.request(policy.prepare(**fields))])
            assert np.abs(chunk.actions - alone[robot][i]).max() <= BOUND
    (first,) = policy.answers([policy.request(policy.prepare(**asked(policy.spec, 2)))])
    assert np.abs(first.actions - alone[0][2]).max() > 1e-3  # the observation before it counts


def test_p13_what_the_checkpoint_says_is_what_requests_need(checkpoints: dict[str, Path]) -> None:
    spec = read_source(f"lerobot:{checkpoints['smolvla']}")
    assert read_source(str(checkpoints["smolvla"])).source == str(checkpoints["smolvla"])  # without lerobot: too
    assert (spec.images, spec.state_dim, spec.takes_text) == ({"top": (48, 64), "wrist": (48, 64)}, 6, True)
    assert (spec.action_dim, spec.x_dim, spec.chunk_size, spec.num_denoising_steps) == (6, 32, 8, 10)
    act = read_source(f"lerobot:{checkpoints['act']}")
    assert (act.takes_text, act.takes_noise, act.wires["vla-eval"].execute) == (False, False, 5)
    state = read_source(f"lerobot:{checkpoints['act-state']}")
    assert (state.images, state.state_dim) == ({}, 11)  # its state and that of its environment, one after the other


def _without(name: str) -> Any:
    return lambda root: (root / name).unlink()


def _config(**values: Any) -> Any:
    def change(root: Path) -> None:
        file = root / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def _short(root: Path) -> None:
    file = root / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _nan(root: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(root / "model.safetensors")
    next(w for w in weights.values() if w.is_floating_point() and w.numel())[...] = float("nan")
    save_file(weights, root / "model.safetensors")


def _tensors(change: Any) -> Any:
    """Change the stored weights."""

    def changed(root: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(root / "model.safetensors")
        change(weights)
        save_file(weights, root / "model.safetensors")

    return changed


def _foreign_step(root: Path) -> None:
    file = root / "policy_preprocessor.json"
    told = json.loads(file.read_text())
    told["steps"].insert(0, {"class": "subprocess.Popen", "config": {"args": ["touch", str(root / "ran")]}})
    file.write_text(json.dumps(told))


def _own_function(root: Path) -> None:
    """LeRobot's, but no step: it would be called as well."""
    file = root / "policy_postprocessor.json"
    told = json.loads(file.read_text())
    told["steps"].insert(0, {"class": "lerobot.processor.pipeline.hf_hub_download", "config": {"repo_id": "a/b"}})
    file.write_text(json.dumps(told))


def _action_tokens(root: Path) -> None:
    file = root / "policy_preprocessor.json"
    told = json.loads(file.read_text())
    step = {"registry_name": "action_tokenizer_processor", "config": {"action_tokenizer_name": "some/body"}}
    file.write_text(json.dumps(told | {"steps": [*told["steps"], step]}))


def _statistics(name: str, change: Any) -> Any:
    """Change the stored statistics of a processor: "pre" or "post"."""

    def changed(root: Path) -> None:
        from safetensors.torch import load_file, save_file

        (file,) = root.glob(f"policy_{name}processor*.safetensors")
        save_file(change(load_file(file)), file)

    return changed


def _of_a_data_set(stats: dict[str, Any]) -> dict[str, Any]:
    """As a base checkpoint of many data sets has them."""
    return {f"so100.buffer.{name}": tensor for name, tensor in stats.items()}


def _processor(name: str, change: Any) -> Any:
    """Change the steps of a processor."""

    def changed(root: Path) -> None:
        file = root / f"policy_{name}processor.json"
        told = json.loads(file.read_text())
        file.write_text(json.dumps(told | {"steps": change(told["steps"])}))

    return changed


def _other_step(name: str, **config: Any) -> Any:
    return lambda steps: [*steps, {"registry_name": name, "config": config}]


def _renamed(**names: str) -> Any:
    return lambda steps: [{"registry_name": "rename_observations_processor", "config": {"rename_map": names}}, *steps]


def _without_action(steps: list[Any]) -> list[Any]:
    for step in steps:
        step["config"].get("features", {}).pop("action", None)
    return steps


def _adapter(root: Path) -> None:
    (root / "adapter_config.json").write_text("{}")


WRONG: dict[str, tuple[Any, str]] = {
    "no weights": (_without("model.safetensors"), "model.safetensors: not found: copy the whole directory"),
    "half of the weights": (_short, "is truncated, damaged, or not safetensors (incomplete metadata"),
    "no processors": (_without("policy_preprocessor.json"), "saved by LeRobot before 0.4. Convert it: python -m"),
    "unknown type": (_config(type="nosuch"), "type nosuch is not known to predict chunks without keeping"),
    "streaming type": (_config(type="lingbot_va"), "type lingbot_va is not known to predict chunks without keeping"),
    "a tensor missing": (_tensors(lambda w: w.pop("model.action_head.weight")), "the file has no weights model.act"),
    "foreign step": (_foreign_step, "names the class 'subprocess.Popen'; only steps of LeRobot itself are run"),
    "no step": (_own_function, "names the class 'lerobot.processor.pipeline.hf_hub_download'; only steps"),
    "code for tokens": (_action_tokens, 'config.action_tokenizer_name: found "some/body", expected lerobot/fast-'),
    "code for text": (_config(text_tokenizer_name="a/b"), 'config.json: text_tokenizer_name: found "a/b", expected'),
    "code for a model": (_config(type="groot"), "type groot is not known to predict chunks without keeping"),
    "tdmpc": (_config(type="tdmpc"), "type tdmpc is not known to predict chunks without keeping"),
    "two channels": (
        _config(input_features={"observation.images.top": {"type": "VISUAL", "shape": [2, 8, 8]}}),
        "input_features.observation.images.top.shape: found [2, 8, 8], expected [3, height, width]",
    ),
    "no action": (_config(output_features={}), "output_features: found {}, expected a feature action"),
    "another size": (
        _config(output_features={"action": {"type": "ACTION", "shape": [9]}}), "LeRobot cannot load it",
    ),
    "NaN": (_nan, "hold NaN or infinite values: the training diverged"),
    "adapter": (_adapter, "holds a PEFT adapter, not a whole policy"),
    "actions by data set": (
        _statistics("post", _of_a_data_set), "unnormalizer_processor has no min of action, which is MIN_MAX (there"
    ),
    "states by data set": (_statistics("pre", _of_a_data_set), "those of so100.buffer.observation.state): LeR"),
    "no ENV": (
        _statistics("pre", lambda s: {n: t for n, t in s.items() if not n.endswith("environment_state.std")}),
        "normalizer_processor has no std of observation.environment_state, which is MEAN_STD",
    ),
    "statistics of one joint": (
        _statistics("post", lambda s: s | {"action.max": s["action.max"][:1].clone()}),
        "the max of action has 1 numbers, expected 6",
    ),
    "no unnormaliser": (_processor("post", lambda steps: steps[1:]), "no step normalises action, which is MIN_MAX in"),
    "normalised twice": (
        _processor("post", lambda s: [s[0] | {"registry_name": "normalizer_processor"}, *s[1:]]),
        "no step normalises action, which is MIN_MAX in",
    ),
    "state elsewhere": (
        _processor("post", lambda s: [s[0] | {"state_file": f"../checkpoint/{s[0]['state_file']}"}, *s[1:]]),
        "steps[0].state_file: ../checkpoint/policy_postprocessor_step_0_unnormalizer_processor.safetensors is not the",
    ),
    "not among its features": (_processor("post", _without_action), "action, which is MIN_MAX, is not in the features"),
    "unknown step": (_processor("pre", _other_step("some_new_step")), "some_new_step is not applied: only steps that"),
    "crops": (_processor("pre", _other_step("image_crop_resize_processor")), "image_crop_resize_processor is not app"),
    "other actions": (_processor("post", _other_step("xvla_rotation_6d_to_axis_angle")), "axis_angle is not applied"),
    "unknown key of a step": (
        _processor("post", lambda steps: [*steps[:1], steps[1] | {"enabled": False}]), "steps[1]: Object contains unkn",
    ),
    "unknown mode": (
        _processor("post", lambda s: [s[0] | {"config": s[0]["config"] | {"norm_map": {"ACTION": "MAGIC"}}}, *s[1:]]),
        "'MAGIC' is not a valid NormalizationMode",
    ),
    "features exchanged": (
        _processor("pre", _renamed(**{"observation.state": "observation.environment_state"})),
        "a feature of the policy, observation.state, is renamed to observation.environment_state",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_p14_a_wrong_checkpoint_is_one_line(checkpoints: dict[str, Path], tmp_path: Path, what: str) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(checkpoints["act-state"], root)
    change, told = WRONG[what]
    change(root)
    with pytest.raises(ConfigError) as error:
        read_source(f"lerobot:{root}").open(DeviceOptions())
    assert told in error.value.message
    assert "\n" not in error.value.message
    assert not (root / "ran").exists()


def test_p14_the_doctor_does_not_find_statistics_of_another_name_fit(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(checkpoints["smolvla"], root)
    _statistics("post", _of_a_data_set)(root)
    found = examine(f"lerobot:{root}")
    assert found.exit_code == 1
    failed = [check.actual for check in found.checks if check.status == "fail"]
    assert "unnormalizer_processor has no mean of action, which is MEAN_STD" in failed[0]


@pytest.mark.skipif(OLD, reason="LeRobot 0.4 has fewer steps")
def test_p14_every_step_that_lerobot_has_is_applied_or_refused() -> None:
    """Those that are refused are for robots, simulators and training, but for the first two."""
    import lerobot.policies

    for module in pkgutil.walk_packages(lerobot.policies.__path__, "lerobot.policies."):
        if ".processor_" in module.name:
            importlib.import_module(module.name)
    import lerobot.processor

    others = set(lerobot.processor.ProcessorStepRegistry.list()) - STEPS
    theirs = {name for name in others if name.startswith(("groot_", "wall_x_"))}
    assert others - theirs <= {
        "image_crop_resize_processor", "xvla_rotation_6d_to_axis_angle",
        "map_tensor_to_delta_action_dict", "map_delta_action_to_robot_action", "reward_classifier_processor",
        "policy_action_to_robot_action_processor", "robot_action_to_policy_action_processor",
        "add_teleop_action_as_complementary_data", "libero_processor",
        "add_teleop_action_as_info", "torch2numpy_action_processor", "numpy2torch_action_processor",
        "observation_processor", "render_messages_processor", "isaaclab_arena_processor", "time_limit_processor",
        "gym_hil_adapter_processor", "gripper_penalty_processor", "intervention_action_processor",
    }  # fmt: skip


@pytest.mark.parametrize("family", STAGED)
def test_p10_any_of_its_cameras_is_enough_and_the_answer_is_lerobots(checkpoints: dict[str, Path], family: str) -> None:
    """Requests that show other cameras share batches; none is taken for a black picture."""
    policy = loaded(checkpoints[family])
    reference = Reference(policy)
    every = [asked(policy.spec, i) for i in range(6)]
    for fields, cameras in zip(every, [("top",), ("wrist",), ("top", "wrist")] * 2, strict=True):
        fields["images"] = {name: fields["images"][name] for name in cameras}
    expected = [reference.answer(fields) for fields in every]
    for starts in ([0] * 6, [0, 0, 1, 1, 2, 2]):
        chunks = policy.answers([policy.request(policy.prepare(**fields)) for fields in every], starts)
        assert max(np.abs(c.actions - e).max() for c, e in zip(chunks, expected, strict=True)) <= BOUND
    black = every[0] | {"images": every[0]["images"] | {"wrist": np.zeros((48, 64, 3), np.uint8)}}
    (chunk,) = policy.answers([policy.request(policy.prepare(**black))])
    assert np.abs(chunk.actions - expected[0]).max() > 1e-3
    found = {check.id: check for check in examine(f"lerobot:{checkpoints[family]}").checks}
    assert (found["cameras"].status, found["cameras"].actual) == ("pass", "finite without wrist")


def test_p10_a_renamed_camera_has_both_names(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """LeRobot renames what a robot calls front to top, and takes top as well; so does every wire."""
    root = tmp_path / "checkpoint"
    shutil.copytree(checkpoints["act"], root)
    names = {"observation.images.front": TOP, "observation.images.x": "observation.images.y"}
    _processor("pre", _renamed(**names))(root)
    policy = loaded(root)
    fields = asked(policy.spec, 0)
    (expected,) = policy.answers([policy.request(policy.prepare(**fields))])
    sent = {"front": fields["images"]["top"], "wrist": fields["images"]["wrist"]}
    (chunk,) = policy.answers([policy.request(policy.prepare(**fields | {"images": sent}))])
    assert np.array_equal(chunk.actions, expected.actions)
    reader = ObservationReader(policy.spec, None)
    seen = {f"observation.images.{name}": image for name, image in sent.items()}
    images, _, _ = reader.read({**seen, "observation.state": fields["state"]})
    assert [(camera, name) for camera, name, _ in images] == [
        ("top", "observation.images.front"), ("wrist", WRIST),
    ]  # fmt: skip
    assert cameras_of([policy.spec]) == {"top", "front", "wrist"}
    with pytest.raises(InvalidRequest, match=r"images.front: is top, which was sent as well"):
        policy.prepare(**fields | {"images": fields["images"] | {"front": fields["images"]["top"]}})


@pytest.mark.parametrize("family", STAGED)
def test_p14_weights_that_are_missing_or_of_another_shape_are_no_random_ones(
    checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """LeRobot itself goes on with random weights, after a line in the log."""
    name = "model.action_out_proj.weight" if family == "smolvla" else "action_out_proj.weight"
    changes = (lambda w: w.pop(_named(w, name)), lambda w: w.update({_named(w, name): torch.ones(3)}))
    for i, change in enumerate(changes):
        root = tmp_path / str(i)
        shutil.copytree(checkpoints[family], root)
        _tensors(change)(root)
        with pytest.raises(ConfigError, match=r"action_out_proj|size mismatch"):
            loaded(root)


@pytest.mark.parametrize("family", [name for name in STAGED if name.startswith("pi")])
def test_p14_weights_that_lerobot_failed_to_read_are_no_random_ones(
    checkpoints: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints the error, and returns the policy as it was made."""

    def fails(*args: Any, **options: Any) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("safetensors.torch.load_file", fails)
    with pytest.raises(ConfigError, match="LeRobot could not read the weights model"):
        loaded(checkpoints[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_p10_an_unloaded_policy_leaves_memory_without_the_collector(checkpoints: dict[str, Path], family: str) -> None:
    """A server never collects what it had when it was ready, and other cycles seldom."""
    policy = loaded(checkpoints[family])
    policy.answers([policy.request(policy.prepare(**asked(policy.spec, 1), episode_id="e"))])
    gc.collect()
    gc.disable()
    try:
        module = weakref.ref(policy.model.loaded.policy)
        del policy
        assert module() is None
    finally:
        gc.enable()


def test_p10_a_call_row_by_row_has_all_that_the_preprocessor_made(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some types read the task, or what a step of their own made, whose names do not begin with observation."""
    policy = loaded(checkpoints["vqbet"])
    called: list[Any] = []
    whole = policy.model._vqbet
    monkeypatch.setattr(policy.model, "_vqbet", lambda batch: (called.append(dict(batch)), whole(batch))[1])
    seen = [policy.prepare(**asked(policy.spec, i) | {"instruction": f"task {i}"}) for i in range(2)]
    policy.answers([policy.request(one) for one in seen])
    assert [batch["task"] for batch in called] == [["task 0"], ["task 1"]]


@pytest.mark.parametrize("family", STAGED)
def test_p14_what_is_missing_of_a_hub_is_named_with_the_command_to_get_it(
    checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(checkpoints[family], root)
    if family == "smolvla":
        _config(vlm_model_name="nobody/nothing")(root)
    file = root / "policy_preprocessor.json"
    told = json.loads(file.read_text())
    for step in told["steps"]:
        if "tokenizer_name" in step["config"]:
            step["config"]["tokenizer_name"] = "nobody/nothing"
    file.write_text(json.dumps(told))
    with pytest.raises(ConfigError) as error:
        loaded(root)
    assert "hf download nobody/nothing --exclude '*.safetensors'" in error.value.message
    assert "\n" not in error.value.message


def _named(weights: dict[str, Any], end: str) -> str:
    return next(name for name in weights if name.endswith(end.removeprefix("model.")))


def test_p14_weights_that_the_checkpoint_has_are_not_asked_of_a_hub(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Those of the backbone, and the 2 GB of SmolVLA's VLM, are what most users' checkpoints name."""
    for family, named in (
        ("act", {"pretrained_backbone_weights": "ResNet18_Weights.IMAGENET1K_V1"}),
        ("smolvla", {"load_vlm_weights": True}),
    ):
        root = tmp_path / family
        shutil.copytree(checkpoints[family], root)
        _config(**named)(root)
        assert loaded(root).spec.model_type == family


@pytest.mark.skipif(OLD, reason="LeRobot 0.4 has no relative actions")
def test_p10_relative_actions_are_relative_to_the_state_of_their_own_request(checkpoints: dict[str, Path]) -> None:
    """Other requests are prepared on other threads while an answer is finished."""
    policy = loaded(checkpoints["pi05-relative"])
    reference = Reference(policy)
    fields = asked(policy.spec, 0)
    expected = reference.answer(fields)
    seen = policy.prepare(**fields)
    (chunk,) = policy.answers([policy.request(seen)])
    assert np.abs(chunk.actions - expected).max() <= BOUND
    x = np.zeros((1, 8, 32), np.float32)
    first = policy.model.finish([seen], x)
    other = asked(policy.spec, 1)
    stop = threading.Event()

    def prepare() -> None:
        while not stop.is_set():
            policy.prepare(**other)

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(np.array_equal(policy.model.finish([seen], x), first) for _ in range(2000))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_p14_options_without_effect_are_refused(checkpoints: dict[str, Path]) -> None:
    spec = read_source(f"lerobot:{checkpoints['act-state']}")
    for device, told in (
        (DeviceOptions(compile=True), "--compile: is for python:module:make"),
        (DeviceOptions(captured_sizes=(1,)), "--cuda-graphs: captures the steps of smolvla, pi0, pi05"),
        (DeviceOptions(provider="CUDAExecutionProvider"), "PyTorch sees no GPU here"),
        (DeviceOptions(provider="OpenVINO"), "PyTorch policies run on cpu or cuda"),
    ):
        with pytest.raises(ConfigError, match=told):
            spec.open(device)


def test_p10_dtype_is_the_type_of_the_weights(checkpoints: dict[str, Path]) -> None:
    half = loaded(checkpoints["act-state"], device=DeviceOptions(dtype="bfloat16"))
    assert half.model.half


@pytest.mark.parametrize("family", ["act", "smolvla"])
def test_p6_the_doctor_finds_a_checkpoint_fit(checkpoints: dict[str, Path], family: str) -> None:
    found = {check.id: check for check in examine(f"lerobot:{checkpoints[family]}").checks}
    assert [name for name, finding in found.items() if finding.status == "fail"] == []
    assert found["batch_parity"].status == "pass"


def test_p13_a_stock_openpi_client_gets_batched_answers_from_a_checkpoint(checkpoints: dict[str, Path]) -> None:
    client = pytest.importorskip("openpi_client.websocket_client_policy")
    policy = loaded(checkpoints["smolvla"])
    fields = asked(policy.spec, 3)
    (expected,) = policy.answers([policy.request(policy.prepare(**fields))])
    env = {name: os.environ[name] for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE")}
    with Server(f"lerobot:{checkpoints['smolvla']}", env=env, supervised=True, cold=True) as server:
        robot = client.WebsocketClientPolicy("127.0.0.1", server.port)
        observation = {
            "observation/images/top": fields["images"]["top"],
            "observation.images.wrist": fields["images"]["wrist"],
            "observation/state": fields["state"],
            "prompt": fields["instruction"],
            "reflex/request_id": fields["request_id"],
        }
        answer = robot.infer(observation)
        assert np.abs(answer["actions"] - expected.actions).max() <= BOUND
        assert server.get("/health").json["inference_mode"] == "decomposed"
