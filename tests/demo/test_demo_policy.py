"""The bundled policy and its earlier version keep the export contract, and are small."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_support import one_thread
from numpy.typing import NDArray

from demo.ab import V1
from demo.tasks import INSTRUCTIONS
from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import POLICY, SCRIBE, policy_source, write_policy
from reflex_runtime.feeds.sources.shapes import DETECTOR
from reflex_runtime.robots.sources.export_directory import Export
from reflex_runtime.robots.sources.load import load_policy
from robots.analysis.fleet import png
from serving.harness import Server

VERSIONS = {"v1": V1, "v2": POLICY}


def config_of(directory: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((directory / "reflex_config.json").read_text())
    return loaded


def some_rows(config: dict[str, Any], count: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (count, *config["image_size"], 3), np.uint8),
        "tokens": rng.integers(0, len(config["tokenizer"]) + 1, (count, config["max_tokens"]), np.int64),
        "state": rng.standard_normal((count, config["state_dim"])).astype(np.float32),
        "noise": rng.standard_normal((count, config["chunk_size"], config["action_dim"])).astype(np.float32),
    }


def test_an_export_is_complete_and_all_bundled_models_are_small() -> None:
    for directory in VERSIONS.values():
        names = {"vlm_prefix.onnx", "expert_denoise.onnx", "reflex_config.json", "embodiment.json"}
        assert {file.name for file in directory.iterdir()} == names
    files = [DETECTOR, *(file for directory in (POLICY, SCRIBE) for file in directory.iterdir() if file.is_file())]
    assert sum(file.stat().st_size for file in files) < 4.2e6


@pytest.mark.parametrize("version", VERSIONS)
def test_the_config_says_what_the_graphs_are(version: str) -> None:
    config = config_of(VERSIONS[version])
    assert config["model_id"] == f"demo-metaworld-{version}"
    assert config["export_kind"] == "decomposed"
    assert config["images"] == {"image": config["image_size"]}
    for what, size in (("state_norm", config["state_dim"]), ("action_norm", config["action_dim"])):
        assert len(config[what]["mean"]) == len(config[what]["std"]) == size
        assert min(config[what]["std"]) > 0
    graphs = [one_thread(file) for file in sorted(VERSIONS[version].glob("*.onnx"))]
    inputs = {i.name for graph in graphs for i in graph.get_inputs()}
    outputs = {o.name for graph in graphs for o in graph.get_outputs()}
    assert set(config["inputs"].values()) == inputs
    assert set(config["outputs"].values()) == outputs
    for tensor in (t for graph in graphs for t in (*graph.get_inputs(), *graph.get_outputs())):
        assert isinstance(tensor.shape[0], str), f"{tensor.name}: the leading axis is the batch"
        assert all(isinstance(size, int) for size in tensor.shape[1:]), f"{tensor.name}: and no other is free"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_runtime_loads_it(version: str) -> None:
    policy = load_policy(VERSIONS[version])
    assert policy.spec.model_id == f"demo-metaworld-{version}"
    assert policy.spec.embodiment.name == "metaworld-sawyer"


def test_versions_have_different_hashes() -> None:
    assert Export.load(V1).model_hash != Export.load(POLICY).model_hash


@pytest.mark.parametrize("version", VERSIONS)
def test_words_and_actions_are_those_of_the_robots(version: str) -> None:
    directory = VERSIONS[version]
    config = config_of(directory)
    assert {w for text in INSTRUCTIONS.values() for w in text.split()} == set(config["tokenizer"])
    assert 0 not in config["tokenizer"].values(), "0 is padding"
    assert max(len(text.split()) for text in INSTRUCTIONS.values()) <= config["max_tokens"]
    embodiment = json.loads((directory / "embodiment.json").read_text())
    assert len(embodiment["action_names"]) == len(embodiment["action_ranges"]) == config["action_dim"]
    assert embodiment["action_names"][embodiment["gripper_index"]] == "gripper"
    assert set(embodiment["cameras"]) == set(config["images"])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_does_not_depend_on_its_batch_and_rows_at_different_flow_times_share_a_call(version: str) -> None:
    """What lets a robot join a running batch at a step boundary."""
    config, directory = config_of(VERSIONS[version]), VERSIONS[version]
    prefix, expert = one_thread(directory / "vlm_prefix.onnx"), one_thread(directory / "expert_denoise.onnx")
    rows = some_rows(config, 17)
    seen = {"image": rows["image"], "tokens": rows["tokens"]}
    past_kv = prefix.run(None, seen)[0]
    time = (np.arange(17) % 5 / 5).astype(np.float32)
    feeds = {"x": rows["noise"], "time": time, "state": rows["state"], "past_kv": past_kv}
    together = expert.run(None, feeds)[0]
    assert together.shape == (17, 16, 4)
    for i in (0, 8, 16):
        alone = prefix.run(None, {k: v[i : i + 1] for k, v in seen.items()})[0]
        np.testing.assert_allclose(past_kv[i : i + 1], alone, atol=1e-5, rtol=0)
        alone = expert.run(None, {k: v[i : i + 1] for k, v in feeds.items()})[0]
        np.testing.assert_allclose(together[i : i + 1], alone, atol=1e-5, rtol=0)


def test_write_policy_copies_all_and_refuses_a_full_directory(tmp_path: Path) -> None:
    target = write_policy(tmp_path / "deep" / "policy")
    assert {f.name: f.read_bytes() for f in target.iterdir()} == {f.name: f.read_bytes() for f in POLICY.iterdir()}
    with pytest.raises(ConfigError, match="not empty"):
        write_policy(target)


def test_write_policy_by_force_leaves_no_graph_of_another_export(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.onnx").write_text("old")
    write_policy(tmp_path, force=True)
    assert {file.name for file in tmp_path.iterdir()} == {f.name for f in POLICY.iterdir()} | {"notes.txt"}


def test_write_policy_onto_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        write_policy(tmp_path / "taken")


def test_demo_names_the_bundled_policy_unless_a_directory_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert policy_source("demo") == str(POLICY)
    assert policy_source("other") == "other"
    (tmp_path / "demo").mkdir()
    assert policy_source("demo") == "demo"


@pytest.mark.parametrize(("name", "bundled"), [("demo", POLICY), ("scribe", SCRIBE)])
def test_a_directory_that_is_called_like_a_bundled_model_is_told_apart(
    name: str, bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bundled, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with Server(name) as server:
        listening = next(line for line in server.log if "listening on" in line)
    assert listening.endswith(f", loading ./{name}, the directory here, not the bundled model")
    assert sum("tools are refused" in line for line in server.log) == (name == "scribe")  # it has a tokenizer
    for file in (tmp_path / name).iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert main(["serve", name, "--port", "0", "--no-supervise"]) == 2
    assert "; the bundled model of this name is served only if no directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["demo"], [f"--policy-a={V1}", "--policy-b=demo", "--no-rtc", "--split=0"]])
def test_the_bundled_policy_is_served_by_its_name(words: list[str]) -> None:
    with Server(*words) as server:
        image = base64.b64encode(png(np.zeros((64, 64, 3), np.uint8))).decode()
        answer = server.act(image=image, state=[0.0, 0.6, 0.2, 1.0], instruction="close the drawer")
        assert answer.status == 200, answer.json
        assert np.shape(answer.json["actions"]) == (16, 4)
        assert server.get("/health").json["model_loaded"]
