"""What is read of a checkpoint of openpi, without LeRobot. With its model: tests/lerobot/test_openpi_model.py."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import DecomposedPolicy, PolicySource, StagedModel, read_source
from reflex_runtime.robots.sources.openpi_checkpoint import CONFIGS
from reflex_runtime.web.errors import InvalidRequest
from robots.sources.openpi_files import Processor, stats, write

FLIPS = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])


@pytest.fixture(autouse=True)
def tokenizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=Processor))  # type: ignore[arg-type]
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path / "cache"))


def read(root: Path) -> PolicySource:
    return read_source(f"openpi:{root}")


def policy(root: Path) -> DecomposedPolicy:
    """It prepares requests; nothing computes."""
    return DecomposedPolicy(StagedModel(read(root)))


def text(row: Any) -> str:
    """What was tokenized, without the beginning of text."""
    assert row[0] == 2
    return bytes(int(i) - 10 for i in row[1:] if i).decode()


def test_p15_the_norms_and_sizes_of_a_checkpoint_are_part_of_its_configuration(tmp_path: Path) -> None:
    root = write(tmp_path / "pi0", "pi0_libero")
    changes = {
        "reflex_openpi.json": {"config": "pi0_libero", "delta_actions": False},
        "config.json": {"action_dim": 32, "action_horizon": 11},
        "assets/robot/norm_stats.json": stats("libero", padded=4),
    }
    seen = [read(root)]
    for name, content in changes.items():
        (root / name).write_text(json.dumps(content))
        seen.append(read(root))
    assert read(root).config_hash == seen[-1].config_hash
    assert len({spec.config_hash for spec in seen}) == len(seen)
    assert len({spec.model_hash for spec in seen}) == 1


# -- openpi's transforms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_p43_every_configuration_has_its_sizes_and_wire(config: str, tmp_path: Path) -> None:
    spec, trained = read(write(tmp_path / config, config)), CONFIGS[config]
    dims = {"libero": (8, 7), "droid": (8, 8), "aloha": (14, 14)}[trained.robot]
    assert (spec.state_dim, spec.action_dim, spec.x_dim, spec.chunk_size) == (*dims, 32, 12)
    assert (spec.model_type, spec.max_tokens) == (("pi05", 200) if config.startswith("pi05") else ("pi0", 48))
    assert spec.images == dict.fromkeys(("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"), (224, 224))
    assert spec.resize == "pad"
    wire = spec.wires["openpi"]
    first = {"libero": "observation/image", "droid": "observation/exterior_image_1_left", "aloha": "images/cam_high"}
    assert wire.images["base_0_rgb"] == first[trained.robot]
    assert ("right_wrist_0_rgb" in wire.images) == (trained.robot == "aloha")
    assert spec.takes_state == (config != "pi05_libero")


def test_p43_the_prompt_is_cleaned_and_its_newline_a_token_of_its_own(tmp_path: Path) -> None:
    preparing = policy(write(tmp_path / "a", "pi0_libero"))
    images = {name: np.full((30, 60, 3), 200, np.uint8) for name in ("base_0_rgb", "left_wrist_0_rgb")}
    seen = preparing.prepare(images=images, state=[0.0] * 8, instruction=" open the_drawer\nnow ")
    assert seen.tokens is not None
    assert seen.token_mask is not None
    assert text(seen.tokens) == "open the drawer now\n"
    assert seen.token_mask.sum() == len("open the drawer now\n") + 1
    assert seen.present == {"base_0_rgb": True, "left_wrist_0_rgb": True, "right_wrist_0_rgb": False}
    assert seen.images["base_0_rgb"][0].max() == 0  # black above and below
    assert seen.images["base_0_rgb"][112].min() == 200
    assert seen.images["right_wrist_0_rgb"].max() == 0
    with pytest.raises(InvalidRequest, match=r"left_wrist_0_rgb: missing"):
        preparing.prepare(images={"base_0_rgb": images["base_0_rgb"]}, state=[0.0] * 8, instruction="open")


def test_p43_the_state_of_pi05_is_in_the_prompt_by_its_quantiles(tmp_path: Path) -> None:
    root = write(tmp_path / "a", "pi05_droid")
    images = {name: np.zeros((224, 224, 3), np.uint8) for name in ("base_0_rgb", "left_wrist_0_rgb")}
    state = np.linspace(-1.5, 1.0, 8).astype(np.float32)
    seen = policy(root).prepare(images=images, state=state, instruction="wipe")
    norm = stats("droid")["norm_stats"]["state"]
    low, high = np.array(norm["q01"]), np.array(norm["q99"])
    normalised = (state - low) / (high - low + 1e-6) * 2.0 - 1.0
    bins = np.digitize(normalised, bins=np.linspace(-1, 1, 257)[:-1]) - 1
    assert text(seen.tokens) == f"Task: wipe, State: {' '.join(map(str, bins))};\nAction: "
    (root / "reflex_openpi.json").write_text('{"config": "pi05_droid", "state_in_prompt": false}')
    assert text(policy(root).prepare(images=images, instruction="wipe").tokens) == "wipe\n"


def test_p43_states_and_actions_of_aloha_go_there_and_back_as_openpi_has_them(tmp_path: Path) -> None:
    root = write(tmp_path / "a", "pi0_aloha")
    preparing, norms = policy(root), stats("aloha")["norm_stats"]
    state = np.linspace(0.1, 0.9, 14).astype(np.float32)
    image = np.zeros((224, 224, 3), np.uint8)
    seen = preparing.prepare(images={"base_0_rgb": image}, state=state, instruction="fold")
    inner = FLIPS * state.astype(np.float64)
    slide = inner[[6, 13]] * (0.058 - 0.01844) + 0.01844
    angle = np.arcsin((0.022**2 + slide**2 - 0.036**2) / (2 * 0.022 * slide))
    inner[[6, 13]] = (angle - 0.5476) / (1.6296 - 0.5476)
    mean, std = (np.array(norms["state"][name]) for name in ("mean", "std"))
    assert seen.state == pytest.approx((inner - mean) / (std + 1e-6), abs=1e-5)

    x = np.random.default_rng(5).standard_normal((1, 12, 32)).astype(np.float32)
    mean, std = (np.array(norms["actions"][name]) for name in ("mean", "std"))
    for delta in (True, False):
        keys = {"config": "pi0_aloha", "delta_actions": delta}
        (root / "reflex_openpi.json").write_text(json.dumps(keys))
        wanted = x[0, :, :14].astype(np.float64) * (std + 1e-6) + mean
        wanted += np.where(([True] * 6 + [False]) * 2, inner, 0.0) if delta else 0.0
        wanted = FLIPS * wanted
        wanted[:, [6, 13]] = (wanted[:, [6, 13]] + 0.5476 + 0.6213) / (1.4910 + 0.6213)
        assert policy(root).model.finish([seen], x)[0] == pytest.approx(wanted, abs=1e-5)
    (root / "reflex_openpi.json").write_text('{"config": "pi0_aloha_sim", "adapt_to_pi": false}')
    plain = policy(root).prepare(images={"base_0_rgb": image}, state=state, instruction="fold")
    wanted = x[0, :, :14].astype(np.float64) * (std + 1e-6) + mean
    assert policy(root).model.finish([plain], x)[0] == pytest.approx(wanted, abs=1e-5)


# -- what it does not say ----------------------------------------------------------------------------------------------


def without_tokenizer(root: Path) -> None:
    (root / "paligemma_tokenizer.model").unlink()


def with_two_assets(root: Path) -> None:
    shutil.copytree(root / "assets" / "robot", root / "assets" / "arms" / "other")


def in_jax(root: Path) -> None:
    (root / "model.safetensors").unlink()
    (root / "params").mkdir()


def with_short_norms(root: Path) -> None:
    file = root / "assets" / "robot" / "norm_stats.json"
    file.write_text(file.read_text().replace('"std": [', '"std": [0.5], "old": ['))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda root: (root / "reflex_openpi.json").unlink(), r"reflex_openpi.json: not found: .*\"config\": NAME"),
        ({"config": "pi06"}, "reflex_openpi.json: config: found \"pi06\", expected one of pi0_libero, "),
        ({"config": "pi0_libero"}, r"config: found pi0_libero, but model.safetensors is of π0.5"),
        ({"config": "pi05_libero", "delta": True}, "delta: "),
        ({"config": "pi05_libero", "delta_actions": 1}, "delta_actions: found 1, expected true or false"),
        ({"config": "pi05_libero", "adapt_to_pi": True}, "adapt_to_pi: found true, expected none"),
        ({"config": "pi05_libero", "asset_id": "x"}, 'asset_id: found "x", expected robot'),
        (with_two_assets, "one norm_stats.json, or asset_id in reflex_openpi.json: there are arms/other, robot"),
        (lambda root: shutil.rmtree(root / "assets"), "expected one norm_stats.json.*: copy assets"),
        (without_tokenizer, r"paligemma_tokenizer.model: not found, nor .*big_vision.* Copy it there from gs://"),
        (lambda root: (root / "paligemma_tokenizer.model").write_bytes(b"x"), "is no SentencePiece model"),
        (in_jax, r"has openpi's JAX weights .*convert_jax_model_to_pytorch.py --config_name pi05_libero"),
        (lambda root: (root / "model.safetensors").write_bytes(b"12"), "not safetensors .header too small"),
        (lambda root: shutil.rmtree(root), "not found, expected a PyTorch checkpoint of openpi"),
    ],
)
def test_p44_what_is_missing_or_wrong_is_one_line(change: Any, says: str, tmp_path: Path) -> None:
    root = write(tmp_path / "a", "pi05_libero")
    if callable(change):
        change(root)
    else:
        (root / "reflex_openpi.json").write_text(json.dumps(change))
    with pytest.raises(ConfigError, match=says) as raised:
        read(root)
    assert "\n" not in raised.value.message


def test_p44_norms_and_flags_must_fit_the_model(tmp_path: Path) -> None:
    root = write(tmp_path / "a", "pi0_droid")
    with_short_norms(root)
    with pytest.raises(ConfigError, match=r"norm_stats.state.std: .* expected a list of 8 finite numbers"):
        read(root)
    file = write(tmp_path / "c", "pi05_droid") / "assets" / "robot" / "norm_stats.json"
    told = json.loads(file.read_text())
    del told["norm_stats"]["actions"]["q99"]
    file.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"norm_stats.actions.q99: found nothing, expected a list of numbers"):
        read(tmp_path / "c")
    (write(tmp_path / "b", "pi0_droid") / "reflex_openpi.json").write_text(
        '{"config": "pi0_droid", "state_in_prompt": true}'
    )
    with pytest.raises(ConfigError, match="state_in_prompt: found true, expected false for π0"):
        read(tmp_path / "b")


def test_p44_the_tokenizer_may_be_where_openpi_keeps_it(tmp_path: Path) -> None:
    root = write(tmp_path / "a", "pi05_libero")
    (tmp_path / "cache" / "big_vision").mkdir(parents=True)
    (root / "paligemma_tokenizer.model").rename(tmp_path / "cache" / "big_vision" / "paligemma_tokenizer.model")
    assert read(root).tokenizer is not None


def test_p44_the_command_says_it_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "a", "pi05_libero")
    (root / "reflex_openpi.json").unlink()
    assert main(["serve", f"openpi:{root}", "--no-supervise", "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"reflex serve: {root}/reflex_openpi.json: not found")
