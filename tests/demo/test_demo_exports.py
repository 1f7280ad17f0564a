"""The bundled exports keep the export contract, and their two forms compute the same thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_support import one_thread
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo.exports import KINDS, VARIANTS, Kind, Variant, export_dir, write_export
from reflex_runtime.demo.tasks import INSTRUCTIONS
from reflex_runtime.policies.export.directory import Export
from reflex_runtime.policies.load import load_policy

BOTH = [(variant, kind) for variant in VARIANTS for kind in KINDS]


def config_of(variant: Variant, kind: Kind) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((export_dir(variant, kind) / "reflex_config.json").read_text())
    return loaded


def some_rows(config: dict[str, Any], count: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (count, *config["image_size"], 3), np.uint8),
        "tokens": rng.integers(0, len(config["tokenizer"]) + 1, (count, config["max_tokens"]), np.int64),
        "state": rng.standard_normal((count, config["state_dim"])).astype(np.float32),
        "noise": rng.standard_normal((count, config["chunk_size"], config["action_dim"])).astype(np.float32),
    }


@pytest.mark.parametrize(("variant", "kind"), BOTH)
def test_an_export_is_small_and_complete(variant: Variant, kind: Kind) -> None:
    directory = export_dir(variant, kind)
    names = {file.name for file in directory.iterdir()}
    graphs = {"model.onnx"} if kind == "monolithic" else {"vlm_prefix.onnx", "expert_denoise.onnx"}
    assert names == graphs | {"reflex_config.json", "embodiment.json"}
    assert sum(file.stat().st_size for file in directory.iterdir()) < 3e6


@pytest.mark.parametrize(("variant", "kind"), BOTH)
def test_the_config_says_what_the_graphs_are(variant: Variant, kind: Kind) -> None:
    config = config_of(variant, kind)
    assert config["model_id"] == f"demo-metaworld-{variant}"
    assert config["export_kind"] == kind
    assert config["images"] == {"image": config["image_size"]}
    for what, size in (("state_norm", config["state_dim"]), ("action_norm", config["action_dim"])):
        assert len(config[what]["mean"]) == len(config[what]["std"]) == size
        assert min(config[what]["std"]) > 0
    graphs = [one_thread(file) for file in sorted(export_dir(variant, kind).glob("*.onnx"))]
    inputs = {i.name for graph in graphs for i in graph.get_inputs()}
    outputs = {o.name for graph in graphs for o in graph.get_outputs()}
    assert set(config["inputs"].values()) == inputs
    assert set(config["outputs"].values()) == outputs
    for tensor in (t for graph in graphs for t in (*graph.get_inputs(), *graph.get_outputs())):
        assert isinstance(tensor.shape[0], str), f"{tensor.name}: the leading axis is the batch"
        assert all(isinstance(size, int) for size in tensor.shape[1:]), f"{tensor.name}: and no other is free"


@pytest.mark.parametrize(("variant", "kind"), BOTH)
def test_the_runtime_loads_it(variant: Variant, kind: Kind) -> None:
    policy = load_policy(export_dir(variant, kind))
    assert policy.spec.model_id == f"demo-metaworld-{variant}"
    assert policy.spec.embodiment.name == "metaworld-sawyer"


def test_versions_and_forms_have_different_hashes() -> None:
    assert len({Export.load(export_dir(variant, kind)).model_hash for variant, kind in BOTH}) == len(BOTH)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_word_of_every_instruction_is_known(variant: Variant) -> None:
    config = config_of(variant, "monolithic")
    assert {w for text in INSTRUCTIONS.values() for w in text.split()} == set(config["tokenizer"])
    assert 0 not in config["tokenizer"].values(), "0 is padding"
    assert max(len(text.split()) for text in INSTRUCTIONS.values()) <= config["max_tokens"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_embodiment_matches_the_actions(variant: Variant) -> None:
    for kind in KINDS:
        config = config_of(variant, kind)
        embodiment = json.loads((export_dir(variant, kind) / "embodiment.json").read_text())
        assert len(embodiment["action_names"]) == len(embodiment["action_ranges"]) == config["action_dim"]
        assert embodiment["action_names"][embodiment["gripper_index"]] == "gripper"
        assert set(embodiment["cameras"]) == set(config["images"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_five_denoise_steps_equal_the_monolithic_graph(variant: Variant) -> None:
    config = config_of(variant, "decomposed")
    directory = export_dir(variant, "decomposed")
    prefix, expert = one_thread(directory / "vlm_prefix.onnx"), one_thread(directory / "expert_denoise.onnx")
    rows = some_rows(config, 5)
    past_kv = prefix.run(None, {"image": rows["image"], "tokens": rows["tokens"]})[0]
    x, steps = rows["noise"], config["num_denoising_steps"]
    for k in range(steps):
        time = np.full(5, k / steps, np.float32)
        x = expert.run(None, {"x": x, "time": time, "state": rows["state"], "past_kv": past_kv})[0]
    whole = one_thread(export_dir(variant, "monolithic") / "model.onnx").run(None, rows)[0]
    np.testing.assert_allclose(x, whole, atol=1e-5, rtol=0)


def test_rows_at_different_flow_times_share_a_call() -> None:
    """What lets a robot join a running batch at a step boundary."""
    config, directory = config_of("v2", "decomposed"), export_dir("v2", "decomposed")
    prefix, expert = one_thread(directory / "vlm_prefix.onnx"), one_thread(directory / "expert_denoise.onnx")
    rows = some_rows(config, 3)
    past_kv = prefix.run(None, {"image": rows["image"], "tokens": rows["tokens"]})[0]
    feeds = {
        "x": rows["noise"],
        "time": np.array([0, 0.4, 0.8], np.float32),
        "state": rows["state"],
        "past_kv": past_kv,
    }
    together = expert.run(None, feeds)[0]
    alone = np.concatenate([expert.run(None, {k: v[i : i + 1] for k, v in feeds.items()})[0] for i in range(3)])
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_does_not_depend_on_who_shares_its_batch(variant: Variant) -> None:
    """Measured: bit-equal with onnxruntime's CPU kernels at one thread; the bound leaves room for other kernels."""
    model = one_thread(export_dir(variant, "monolithic") / "model.onnx")
    rows = some_rows(config_of(variant, "monolithic"), 17)
    together = model.run(None, rows)[0]
    assert together.shape == (17, 16, 4)
    for i in (0, 8, 16):
        alone = model.run(None, {k: v[i : i + 1] for k, v in rows.items()})[0]
        np.testing.assert_allclose(together[i : i + 1], alone, atol=1e-5, rtol=0)


def test_write_export_copies_all_and_refuses_a_full_directory(tmp_path: Path) -> None:
    target = write_export(tmp_path / "deep" / "policy", "v1", "decomposed")
    source = export_dir("v1", "decomposed")
    assert {f.name: f.read_bytes() for f in target.iterdir()} == {f.name: f.read_bytes() for f in source.iterdir()}
    with pytest.raises(ConfigError, match="not empty"):
        write_export(target, "v2", "monolithic")


def test_write_export_by_force_leaves_no_graph_of_the_old_export(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write_export(tmp_path, "v1", "decomposed", force=True)
    write_export(tmp_path, "v2", "monolithic", force=True)
    graphs_and_notes = {"model.onnx", "reflex_config.json", "embodiment.json", "notes.txt"}
    assert {file.name for file in tmp_path.iterdir()} == graphs_and_notes


def test_write_export_onto_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        write_export(tmp_path / "taken")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="variant: 'v9' is none of v1, v2"):
        export_dir("v9")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kind: 'whole' is none of monolithic, decomposed"):
        export_dir("v1", "whole")  # type: ignore[arg-type]
