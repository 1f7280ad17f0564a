"""`reflex export` of checkpoints that LeRobot itself made and saved. Runs where LeRobot can be imported.

This folder is no package: it would be imported in LeRobot's place.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lerobot.policies.factory", exc_type=ImportError)
pytest.importorskip("onnxscript", exc_type=ImportError)

import numpy as np
import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import load_policy
from reflex_runtime.robots.sources.lerobot_checkpoint import LeRobotCheckpoint
from reflex_runtime.robots.sources.lerobot_export import NotTheSame, export_checkpoint
from reflex_runtime.robots.sources.lerobot_graphs import TracedPolicy, TracedSmolVla

pytestmark = pytest.mark.filterwarnings("default")  # LeRobot's and its dependencies' are not ours

EXACT = 1e-5  # in the unit of normalisation: what float32 and another order of sums leave
RESNET = {"vision_backbone": "resnet18", "pretrained_backbone_weights": None}
ACT = {
    "type": "act", "chunk_size": 8, "n_action_steps": 4, "dim_model": 32, "n_heads": 2, "dim_feedforward": 64,
    "n_encoder_layers": 1, "n_decoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 8,
}  # fmt: skip
DIFFUSION = {
    "type": "diffusion", "n_obs_steps": 2, "horizon": 8, "n_action_steps": 6, "down_dims": (8, 16), "n_groups": 4,
    "diffusion_step_embed_dim": 16, "num_train_timesteps": 20, "num_inference_steps": 5, "drop_n_last_frames": 1,
    "noise_scheduler_type": "DDIM",
}  # fmt: skip


def saved(path: Path, cameras: int = 0, norm: str = "MEAN_STD", **config: Any) -> Path:
    """A checkpoint with random weights. The last numbers of state and action never varied in its training data."""
    torch.manual_seed(1)
    inputs = {f"observation.images.{n}": PolicyFeature(FeatureType.VISUAL, (3, 48, 64)) for n in ("top", "wrist")}
    inputs = dict(list(inputs.items())[:cameras])
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (3,))
    if not cameras:
        inputs["observation.environment_state"] = PolicyFeature(FeatureType.ENV, (2,))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (3,))}
    mode = NormalizationMode[norm]
    modes = {"VISUAL": NormalizationMode.MEAN_STD, "STATE": mode, "ENV": mode, "ACTION": mode}
    kind = config.pop("type")
    made = make_policy_config(
        kind, input_features=inputs, output_features=outputs, normalization_mapping=modes, device="cpu",
        push_to_hub=False, **(RESNET if cameras else {}), **config,
    )  # fmt: skip
    policy = get_policy_class(kind)(made)
    stats = {}
    for name, feature in {**inputs, **outputs}.items():
        shape = (3, 1, 1) if feature.type is FeatureType.VISUAL else feature.shape
        low, width = torch.rand(shape) * 4 - 2, torch.rand(shape) + 0.5
        if feature.type is not FeatureType.VISUAL:
            width[-1] = 0.0
        stats[name] = {
            "min": low, "max": low + width, "mean": low + width * 0.5, "std": width * 0.3,
            "q01": low, "q99": low + width,
        }  # fmt: skip
    pre, post = make_pre_post_processors(policy.config, dataset_stats=stats)
    policy.eval().save_pretrained(path)
    pre.save_pretrained(path)
    post.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "config",
    [
        {**ACT, "cameras": 2},
        {**ACT, "norm": "MIN_MAX"},
        {**ACT, "norm": "QUANTILES"},
        {**ACT, "norm": "IDENTITY"},
        {**DIFFUSION, "cameras": 1, "crop_shape": (40, 56), "spatial_softmax_num_keypoints": 4, "norm": "MIN_MAX"},
        {**DIFFUSION, "n_obs_steps": 1},
    ],
    ids=["act-cameras", "act-min-max", "act-quantiles", "act-identity", "diffusion-camera", "diffusion-one-step"],
)
def test_p40_an_export_answers_as_lerobot_does(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = saved(tmp_path / "checkpoint", **config), tmp_path / "out"
    assert main(["export", f"lerobot:{path}", str(out)]) == 0
    said = capsys.readouterr().out
    (found,) = re.findall(r"in units of normalisation (\S+) ", said)
    with capsys.disabled():
        print(said.splitlines()[-2])
    assert float(found) <= EXACT
    assert main(["doctor", str(out), "--format", "json"]) == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert counts["fail"] == 0


def test_p40_two_stages_of_smolvla_answer_as_lerobot_does(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    found = export_checkpoint(str(checkpoints["smolvla"]), out)
    with capsys.disabled():
        print(found)
    assert found.compared == 24  # those at different steps, too
    assert found.in_units <= 5e-5  # as large as the weights are random
    assert main(["doctor", str(out)]) == 0
    policy = load_policy(out)
    spec = policy.spec
    assert (spec.staged, spec.x_dim, spec.action_dim) == (True, 32, 6)
    assert (spec.images, spec.optional_images) == ({"top": (32, 32), "wrist": (32, 32)}, {"top", "wrist"})
    original = TracedSmolVla(LeRobotCheckpoint.load(str(checkpoints["smolvla"])))
    rng, state = np.random.default_rng(0), np.zeros(6, np.float32)
    for size in ((72, 128), (48, 64), (20, 20)):  # of cameras, not of the config or the graph
        fields = {"images": {"top": rng.integers(0, 256, (*size, 3), np.uint8)}, "state": state, "instruction": "wipe"}
        chunks = [p.answers([p.request(p.prepare(**fields, seed=5))])[0].actions for p in (policy, original.policy)]
        assert (np.abs(chunks[0] - chunks[1]) / original.unit).max() <= 1e-4, size

    monkeypatch.setattr(TracedSmolVla, "_step", lambda self, given: given["x"] * 0.9 + 0.0 * given["time"].sum())
    with pytest.raises((NotTheSame, ConfigError)):
        export_checkpoint(str(checkpoints["smolvla"]), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_p40_a_graph_with_another_normalisation_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "checkpoint", **ACT)
    monkeypatch.setattr(TracedPolicy, "_denormalised", lambda self, actions: actions)
    assert main(["export", str(path), str(tmp_path / "out")]) == 1
    assert "the export's answers differ from the checkpoint's" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_p40_large_weights_are_a_file_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx_program = pytest.importorskip("torch.onnx._internal.exporter._onnx_program")
    monkeypatch.setattr(onnx_program, "_LARGE_MODEL_THRESHOLD", 10_000)
    out = tmp_path / "out"
    export_checkpoint(str(saved(tmp_path / "checkpoint", **ACT)), out, opset=20)
    assert (out / "model.onnx.data").stat().st_size > 10_000
    assert main(["doctor", str(out)]) == 0


def test_p41_a_processor_that_the_graph_would_lack_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "checkpoint", **ACT)
    file = path / "policy_postprocessor.json"
    pipeline = json.loads(file.read_text())
    pipeline["steps"].append({"registry_name": "to_batch_processor_action", "config": {}})
    file.write_text(json.dumps(pipeline))
    assert main(["export", str(path), str(tmp_path / "out")]) == 2
    assert "its processors have a AddBatchDimensionActionStep" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
