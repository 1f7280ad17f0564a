"""T7: every check of the doctor, seen failing on an export that is really broken in that way."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from reflex_runtime.cli import main
from reflex_runtime.robots.analysis import doctor
from reflex_runtime.robots.analysis.doctor import Check, Clocks, Diagnosis, examine
from reflex_runtime.robots.sources.load import GB
from reflex_runtime.run.onnx_session import CUDA
from robots import means
from robots.bundled import KINDS, bundled
from robots.tiny import ACTIONS, CHUNK, EMBODIMENT, STATE, write_export

Change = Callable[[dict[str, Any]], Any]


def found(diagnosis: Diagnosis, name: str) -> Check:
    (check,) = [check for check in diagnosis.checks if check.id == name]
    return check


def failed(root: Path, name: str, status: str = "fail", **options: Any) -> Check:
    """The finding of one check, of which it is asserted that it ends so and says what to do."""
    finding = found(examine(root, **options), name)
    assert finding.status == status, finding
    assert finding.expected
    assert len(finding.remediation) > 10
    return finding


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    """Change a graph in place; nobody checks the result."""
    model = onnx.load(file)
    change(model)
    file.write_bytes(model.SerializeToString())


def insert_before_output(model: Any, *nodes: Any, constants: tuple[Any, ...] = ()) -> None:
    """What the graph made as "chunk" is now "made", and these nodes make "chunk" of it."""
    for node in model.graph.node:
        node.output[:] = ["made" if name == "chunk" else name for name in node.output]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(constants)


@pytest.fixture
def mono(tmp_path: Path) -> Path:
    return write_export(tmp_path / "mono")


@pytest.fixture
def split(tmp_path: Path) -> Path:
    return write_export(tmp_path / "split", "decomposed")


# -- healthy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_t7_the_bundled_policy_is_fit_to_serve(kind: str, tmp_path: Path) -> None:
    diagnosis = examine(bundled(kind, tmp_path), clocks=ticking(1e-3))
    assert diagnosis.exit_code == 0
    unusual = {check.id: check.status for check in diagnosis.checks if check.status != "pass"}
    assert unusual == ({} if kind == "decomposed" else {"rtc_boundary": "skip"})
    assert "0 at most" in found(diagnosis, "batch_parity").actual
    assert all(check.duration >= 0.0 for check in diagnosis.checks)


def test_t7_every_check_of_the_contract_has_an_id() -> None:
    ids = [name for name, *_ in doctor.CHECKS if name != "deterministic"]
    named = {"model_load", "provider", "inputs", "normalisation", "determinism", "dynamic_batch", "batch_parity"}
    assert named | {"memory", "rtc_boundary", "clock"} <= set(ids)
    for i, rule in enumerate(doctor.CHECKS):
        assert set(rule.needs) <= set(ids[:i]), "a check may need earlier ones only"


# -- files -------------------------------------------------------------------------------------------------------------


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


FILES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no configuration": (lambda root: (root / "reflex_config.json").unlink(), "config", "not found"),
    "not JSON": (lambda root: (root / "reflex_config.json").write_text("{"), "config", "not JSON"),
    "no object": (lambda root: (root / "reflex_config.json").write_text("[]"), "config", "expected an object"),
    "a link to nothing": (
        lambda root: ((root / "model.onnx").unlink(), (root / "model.onnx").symlink_to("blobs/7")),
        "config",
        "link to nothing",
    ),
    "no graph": (lambda root: (root / "model.onnx").unlink(), "config", "model.onnx: not found"),
    "a graph cut off": (lambda root: _truncate(root / "model.onnx"), "model_load", "model.onnx"),
    "an empty graph": (lambda root: (root / "model.onnx").write_bytes(b""), "model_load", "model.onnx"),
    "a web page": (lambda root: (root / "model.onnx").write_bytes(b"<!DOCTYPE html>"), "model_load", "model.onnx"),
    "a large-file pointer": (
        lambda root: (root / "model.onnx").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "config",
        "Git LFS",
    ),
    "a configuration that is a pointer": (
        lambda root: (root / "reflex_config.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "config",
        "Git LFS",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_t7_files(mono: Path, case: str) -> None:
    damage, check, told = FILES[case]
    damage(mono)
    assert told in failed(mono, check).actual
    diagnosis = examine(mono)
    assert diagnosis.exit_code == 1
    skipped = {check.id for check in diagnosis.checks if check.status == "skip"}
    assert {"actions", "batch_parity"} <= skipped
    assert found(diagnosis, "clock").status == "pass", "what needs nothing is looked at"


def test_t7_every_truncation_of_a_graph_is_a_finding(mono: Path) -> None:
    whole = (mono / "model.onnx").read_bytes()
    for size in (*range(0, len(whole) - 20, 37), *range(len(whole) - 20, len(whole))):
        (mono / "model.onnx").write_bytes(whole[:size])
        assert examine(mono).exit_code == 1


def move_weights_out(root: Path, name: str) -> Path:
    model = onnx.load(root / "model.onnx")
    zero = helper.make_node("ReduceMean", ["more"], ["nothing"], keepdims=0)
    more = numpy_helper.from_array(np.zeros(1000, np.float32), "more")
    insert_before_output(model, zero, helper.make_node("Add", ["made", "nothing"], ["chunk"]), constants=(more,))
    onnx.save(model, root / "model.onnx", save_as_external_data=True, location=name, size_threshold=1000)
    return root / name


def test_t7_external_data(mono: Path) -> None:
    data = move_weights_out(mono, "model.onnx.data")
    assert examine(mono).exit_code == 0
    whole = data.read_bytes()
    data.write_bytes(whole[:-8])
    assert f"file_length: {len(whole) - 8}" in failed(mono, "model_load").actual
    data.unlink()
    assert "model.onnx.data" in failed(mono, "model_load").actual


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that every user may enter, which pytest's own are not."""
    root = Path(tempfile.mkdtemp(prefix="doctor-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


def test_t7_files_of_another_user(open_to_all: Path) -> None:
    root = write_export(open_to_all / "mono")
    for file, mode in ((root, 0o755), (root / "reflex_config.json", 0o644), (root / "model.onnx", 0o000)):
        file.chmod(mode)
    before = os.geteuid()
    if before == 0:  # whom nothing is forbidden
        os.seteuid(65534)
    try:
        finding = failed(root, "config")
    finally:
        os.seteuid(before)
    assert "Permission denied" in finding.actual
    assert finding.remediation.startswith("correct the key (docs/exports.md has all keys")
    assert "chmod a+r" in finding.remediation


# -- normalisation and configuration -----------------------------------------------------------------------------------

RANGE = {"q01": [1.0, 0.0], "q99": [2.0, 1.0]}
NORMS: dict[str, tuple[Change, str, str]] = {
    "tiny": (lambda c: c["state_norm"].update(std=[1.0, 1e-8]), "warn", "state_norm: dimension 1 varies by 1e-08"),
    "tiny action": (lambda c: c["action_norm"].update(std=[1.0, 1e-8]), "warn", "action_norm: dimension 1 varies"),
    "range": (lambda c: c.update(state_norm=RANGE), "pass", "state_norm and action_norm"),
    "epsilon": (lambda c: c.update(state_norm=RANGE | {"q99": [1, 1], "epsilon": 1e-6}), "warn", "dimension 0 varies"),
    "no state norm": (lambda c: c.pop("state_norm"), "warn", "no state_norm"),
    "no action norm": (lambda c: c.pop("action_norm"), "warn", "no action_norm"),
}


@pytest.mark.parametrize("case", NORMS)
def test_t7_normalisation(tmp_path: Path, case: str) -> None:
    change, status, told = NORMS[case]
    root = write_export(tmp_path / "x", change=change)
    finding = found(examine(root), "normalisation") if status == "pass" else failed(root, "normalisation", status)
    assert told in finding.actual


@pytest.mark.parametrize("std", [[1.0, 0.0], [1.0, float("nan")], [1.0], "1 1"])
def test_t7_normalisation_that_no_export_may_have_is_the_loaders_error(tmp_path: Path, std: Any) -> None:
    root = write_export(tmp_path / "x", change=lambda c: c["state_norm"].update(std=std))
    assert "reflex_config.json: " in failed(root, "config").actual
    assert found(examine(root), "normalisation").status == "skip"


TWO: Any = {"front": ("u", [4, 6, 3]), "wrist": ("u", [4, 6, 3])}
CAMERAS: Any = {"images": {"front": [4, 6], "wrist": [4, 6]}, "optional_images": ["wrist"]}


def test_t7_optional_cameras(tmp_path: Path) -> None:
    root = means.write_export(tmp_path / "a", TWO | {"image_masks": ("b", [2])}, 3, **CAMERAS)
    assert found(examine(root), "cameras").actual == "finite without wrist"
    root = means.write_export(tmp_path / "b", TWO, 2, **CAMERAS)
    assert "no input has the role image_masks" in failed(root, "cameras", "warn").actual
    root = means.write_export(tmp_path / "c", TWO | {"image_masks": ("b", [2])}, 3, **CAMERAS)
    none = helper.make_node("Floor", ["image_masks_c"], ["all_sent"])  # 0 where one is missing
    divide = helper.make_node("Div", ["made", "all_sent"], ["chunk"])
    edit(root / "model.onnx", lambda model: insert_before_output(model, none, divide))
    assert found(examine(root), "actions").status == "pass"
    assert "without wrist: some actions are NaN" in failed(root, "cameras").actual


def test_t7_the_prompt_counts_into_the_length_of_a_text(tmp_path: Path) -> None:
    words = {"open": 1, "door": 2, "now": 3}
    keys: Any = {"tokenizer": words, "max_tokens": 3, "prompt": "now {prompt} now"}
    root = means.write_export(tmp_path / "a", {"tokens": ("i", [3])}, 1, **keys)
    assert "'now open door now': over max_tokens=3" in failed(root, "tokenizer", "warn", instruction="open door").actual
    assert found(examine(root, instruction="open"), "tokenizer").status == "pass"
    assert found(examine(root), "normalisation").actual == "no action_norm"
    keys["prompt"] = "{prompt}{state_bins}"  # bins of what is not normalised would be 0 or 255
    root = means.write_export(tmp_path / "b", {"tokens": ("i", [3])}, 1, **keys)
    assert failed(root, "normalisation", "warn").actual == "no state_norm; no action_norm"


def test_t7_ranges_are_compared_with_what_the_transforms_make(tmp_path: Path) -> None:
    keys: Any = {
        "action_norm": {"mean": [0.0, 0.0], "std": [0.1, 0.1]},
        "state_norm": {"mean": [5.0, 0.0], "std": [1.0, 1.0]},
        "action_transforms": [{"add_state": [True, False]}],
        "embodiment": "embodiment.json",
    }
    root = means.write_export(tmp_path, {"state": ("f", [2])}, 2, **keys)
    robot = {"name": "arm", "action_space": "absolute", "action_ranges": [[4, 6], [-1, 1]]}
    (root / "embodiment.json").write_text(json.dumps(robot))
    assert found(examine(root), "embodiment").status == "pass"
    (root / "embodiment.json").write_text(json.dumps(robot | {"action_ranges": [[-1, 1], [-1, 1]]}))
    assert "mean 5, range [-1, 1]" in failed(root, "embodiment").actual


def test_t7_configuration(tmp_path: Path) -> None:
    root = write_export(tmp_path / "x", change=lambda c: c.update(chunk_sise=4))
    finding = failed(root, "config")
    assert "chunk_sise: no such key; did you mean chunk_size?" in finding.actual
    assert "docs/exports.md" in finding.remediation
    root = write_export(tmp_path / "y", "decomposed", lambda c: c["decomposed"].update(vlm_prefix_onnx="prefix.onnx"))
    assert "vlm_prefix_onnx" in failed(root, "config").actual


def test_t7_wires(tmp_path: Path) -> None:
    plain = found(examine(write_export(tmp_path / "x")), "wires")
    assert (plain.status, plain.actual) == ("pass", "openpi: front, state, prompt (no block: found by name)")
    same = {"openpi": {"images": {"front": "observation/it"}, "state": ["observation/it"]}}
    root = write_export(tmp_path / "y", change=lambda c: c.update(wires=same))
    assert failed(root, "wires", "warn").actual == "openpi: observation/it, observation/it, prompt"
    groups = {"gr00t": {"images": {"front": "ego"}, "state": [["arm", 1], ["hand", 1]]}, "openpi": {"prompt": "task"}}
    root = write_export(tmp_path / "z", change=lambda c: c.update(wires=groups))
    wanted = "openpi: front, state, task; gr00t: video.ego, state.arm, state.hand, prompt"
    assert found(examine(root), "wires").actual == wanted


# -- the graphs --------------------------------------------------------------------------------------------------------

INPUTS: dict[str, tuple[Change, str]] = {
    "names": (
        lambda c: c["inputs"].update(front="image", tokens="words"),
        "input 'image': not in the graph, which has 'rgb', 'ids', 'pose', 'x'; input 'words': not in the graph",
    ),
    "output": (lambda c: c["outputs"].update(actions="y"), "output 'y': not in the graph"),
    "size": (lambda c: c.update(chunk_size=5), "input 'x': found [4, 2] after the batch axis, expected [5, 2]"),
    "type": (lambda c: c["inputs"].update(tokens="rgb", front="ids"), "input 'rgb': found uint8, expected int32"),
    "an unknown input": (
        lambda c: (c["inputs"].pop("tokens"), c.pop("tokenizer"), c.pop("max_tokens")),
        "input 'ids': unknown",
    ),
}


@pytest.mark.parametrize("case", INPUTS)
def test_t7_inputs(tmp_path: Path, case: str) -> None:
    change, told = INPUTS[case]
    root = write_export(tmp_path / "x", change=change)
    assert told in failed(root, "inputs").actual
    assert found(examine(root), "actions").status == "skip"


def test_t7_weights_that_older_files_list_as_inputs_need_no_role(mono: Path) -> None:
    def listed(model: Any) -> None:
        (weights,) = [c for c in model.graph.initializer if c.name == "pose_weights"]
        model.graph.input.append(helper.make_tensor_value_info(weights.name, weights.data_type, weights.dims))

    edit(mono / "model.onnx", listed)
    assert examine(mono).exit_code == 0


def _fix_axis(file: Path, names: set[str], size: int) -> None:
    def change(model: Any) -> None:
        for port in (*model.graph.input, *model.graph.output):
            if port.name in names:
                port.type.tensor_type.shape.dim[0].dim_value = size

    edit(file, change)


def test_t7_dynamic_batch(tmp_path: Path, mono: Path, split: Path) -> None:
    single = write_export(tmp_path / "single", batch=1)
    assert "one after the other" in failed(single, "dynamic_batch", "warn").actual
    assert found(examine(single), "batch_parity").status == "pass"

    _fix_axis(split / "vlm_prefix.onnx", {"rgb", "ids", "keys", "values"}, 1)
    assert "fixed at 1" in failed(split, "dynamic_batch", "warn").actual, "in one of the two graphs"

    fixed = write_export(tmp_path / "fixed", batch=4)
    assert "a fixed size of 4" in failed(fixed, "dynamic_batch").actual

    _fix_axis(mono / "model.onnx", {"pose"}, 1)
    finding = failed(mono, "dynamic_batch")
    assert "input 'pose': leading axis is 1 but that of" in finding.actual
    assert "dynamic_axes" in finding.remediation

    def no_axis(model: Any) -> None:
        del next(p for p in model.graph.output if p.name == "chunk").type.tensor_type.shape.dim[:]

    other = write_export(tmp_path / "other")
    edit(other / "model.onnx", no_axis)
    assert found(examine(other), "inputs").status == "fail"


# -- text, robot, machine ----------------------------------------------------------------------------------------------


def test_t7_tokenizer(mono: Path, tmp_path: Path) -> None:
    assert "not one word" in failed(mono, "tokenizer", instruction="grasp cups").actual
    assert "'cup' unknown" in failed(mono, "tokenizer", "warn", instruction="open cup").actual
    assert "over max_tokens=3" in failed(mono, "tokenizer", "warn", instruction="open the door the").actual
    assert found(examine(mono, instruction="Open the DOOR"), "tokenizer").status == "pass"
    other = write_export(tmp_path / "x", change=lambda c: c.update(tokenizer={"one": 0, "two": 0}))
    assert "not one word" in failed(other, "tokenizer").actual, "every word is the unknown one"


def test_t7_tokenizer_file(tmp_path: Path) -> None:
    file = {"model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "open": 1, "door": 2}, "unk_token": "[UNK]"}}
    file |= {"pre_tokenizer": {"type": "Whitespace"}}
    root = write_export(tmp_path / "x", change=lambda c: c.update(tokenizer="tokenizer.json"))
    (root / "tokenizer.json").write_text(json.dumps(file))
    assert found(examine(root), "tokenizer").actual == "'open door' and 'open door'"
    assert "unknown" in failed(root, "tokenizer", "warn", instruction="open window").actual


def test_t7_embodiment(tmp_path: Path) -> None:
    def robot(**changes: Any) -> Path:
        kept = {key: value for key, value in (EMBODIMENT | changes).items() if value is not None}
        return write_export(tmp_path / "x", embodiment=kept)

    finding = failed(robot(action_ranges=[[-1.0, 0.2], [-0.5, 0.5]]), "embodiment")
    assert "shoulder: mean 0.25, range [-1, 0.2]" in finding.actual
    assert "no action_ranges" in failed(robot(action_ranges=None), "embodiment", "warn").actual
    assert "no action_space" in failed(robot(action_space=None), "embodiment", "warn").actual
    narrow = robot(action_ranges=[[0.2, 0.3], [-0.5, 0.5]])
    assert "narrower than one standard deviation: shoulder" in failed(narrow, "embodiment", "warn").actual
    assert "no action_ranges" in failed(write_export(tmp_path / "y", embodiment=None), "embodiment", "warn").actual


def test_t7_memory(mono: Path) -> None:
    size = sum(file.stat().st_size for file in mono.glob("*.onnx"))
    assert found(examine(mono, total_memory=lambda provider: 64 * GB), "memory").status == "pass"
    finding = failed(mono, "memory", "warn", total_memory=lambda provider: 2 * size)
    assert "drop to single-policy mode" in finding.remediation
    finding = failed(mono, "memory", total_memory=lambda provider: size)
    assert "for one alone" in finding.actual
    assert examine(mono, total_memory=lambda provider: size).exit_code == 3, "the machine is too small"


def test_t7_provider(mono: Path) -> None:
    diagnosis = examine(mono, CUDA)
    if found(diagnosis, "provider").status == "pass":
        pytest.skip("this onnxruntime has CUDA")
    finding = failed(mono, "provider", provider=CUDA)
    assert "onnxruntime-gpu" in finding.actual
    assert diagnosis.exit_code == 3
    assert found(diagnosis, "model_load").actual == "needs a check that did not pass: provider failed"
    assert found(diagnosis, "embodiment").status == "pass", "what needs no runtime is looked at"


def test_t7_without_onnxruntime(mono: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "onnxruntime is not installed: pip install" in failed(mono, "provider").actual
    assert examine(mono).exit_code == 3


def test_t7_a_faulty_export_counts_more_than_the_machine(tmp_path: Path) -> None:
    root = write_export(tmp_path / "x", change=lambda c: c["state_norm"].update(std=[0.0, 1.0]))
    diagnosis = examine(root, "NoSuchProvider")
    assert [c.id for c in diagnosis.checks if c.status == "fail"] == ["config", "provider"]
    assert diagnosis.exit_code == 1


# -- loading and running -----------------------------------------------------------------------------------------------


def test_t7_model_load(mono: Path) -> None:
    edit(mono / "model.onnx", lambda model: setattr(model.graph.node[0], "op_type", "Frobnicate"))
    assert "Frobnicate" in failed(mono, "model_load").actual
    assert examine(mono).exit_code == 1
    edit(mono / "model.onnx", lambda model: setattr(model.opset_import[0], "version", 99))
    assert "onnxruntime cannot load it" in failed(mono, "model_load").actual


def test_t7_model_load_blames_a_provider_that_starts_nothing(mono: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = "reflex_runtime.run.onnx_session.check_provider"  # and without its driver
    monkeypatch.setattr(offered, lambda provider: None)
    finding = failed(mono, "model_load", provider=CUDA)
    assert finding.actual.endswith("on the CPU it loads")
    assert finding.environment
    assert examine(mono, CUDA).exit_code == 3


def test_t7_model_load_finds_graphs_that_do_not_fit_each_other(split: Path) -> None:
    def wider(model: Any) -> None:
        next(p for p in model.graph.input if p.name == "values").type.tensor_type.shape.dim[1].dim_value = 5

    edit(split / "expert_denoise.onnx", wider)
    assert "past_kv_tensor_names" in failed(split, "model_load").actual


def test_t7_actions_that_cannot_be_computed(mono: Path) -> None:
    seven = numpy_helper.from_array(np.array([-1, 7]), "seven")
    reshape = helper.make_node("Reshape", ["made", "seven"], ["sevens"], name="make_rows_of_seven")
    to_rows = helper.make_node("Reshape", ["sevens", "rows"], ["chunk"])
    rows = numpy_helper.from_array(np.array([-1, CHUNK, ACTIONS]), "rows")
    edit(mono / "model.onnx", lambda m: insert_before_output(m, reshape, to_rows, constants=(seven, rows)))
    assert "make_rows_of_seven" in failed(mono, "actions").actual
    assert found(examine(mono), "batch_parity").actual == "needs a check that did not pass: actions failed"


def test_t7_actions_that_are_not_finite(mono: Path) -> None:
    edit(mono / "model.onnx", lambda m: insert_before_output(m, helper.make_node("Log", ["made"], ["chunk"])))
    actual = failed(mono, "actions").actual
    assert "values are NaN or infinite, joints shoulder, gripper" in actual


def test_t7_actions_of_another_robot(tmp_path: Path) -> None:
    root = write_export(tmp_path / "x", change=lambda c: c["action_norm"].update(std=[57.3, 57.3]))  # degrees
    assert "of the values are outside" in failed(root, "actions").actual
    root = write_export(tmp_path / "y", change=lambda c: c["action_norm"].update(std=[0.9, 0.4]))
    assert "outside their range" in failed(root, "actions", "warn").actual


def test_t7_determinism(mono: Path) -> None:
    drawn = helper.make_node("RandomNormalLike", ["made"], ["drawn"], scale=1e-3)
    add = helper.make_node("Add", ["made", "drawn"], ["chunk"])
    edit(mono / "model.onnx", lambda m: insert_before_output(m, drawn, add))
    finding = failed(mono, "determinism")
    assert "differs by up to" in finding.actual
    assert "eval mode" in finding.remediation


def _mean_over_batch(model: Any, share: float = 1.0) -> None:
    weight = numpy_helper.from_array(np.array(share, np.float32), "share")
    insert_before_output(
        model,
        helper.make_node("ReduceMean", ["made"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["made", "mean"], ["centred"]),
        helper.make_node("Mul", ["centred", "share"], ["part"]),
        helper.make_node("Add", ["made", "part"], ["chunk"]),
        constants=(weight,),
    )


def test_t7_batch_parity_of_rows_that_influence_each_other(mono: Path) -> None:
    edit(mono / "model.onnx", _mean_over_batch)
    finding = failed(mono, "batch_parity")
    assert "by at most 0.0001 of" in finding.expected
    assert "--max-batch-size 1" in finding.remediation


def _plus(model: Any, *nodes: Any) -> None:
    """Add to the actions what the nodes make of them as "more", which is [rows, 1, 1] or one number."""
    constants = (
        numpy_helper.from_array(np.array(0), "zero"),
        numpy_helper.from_array(np.array(1), "one_row"),
        numpy_helper.from_array(np.array([1, 2]), "inner"),
        numpy_helper.from_array(np.array(1e-2, np.float32), "little"),
    )
    size = [helper.make_node("Shape", ["made"], ["dims"]), helper.make_node("Gather", ["dims", "zero"], ["size"])]
    add = [
        helper.make_node("Cast", ["count"], ["counted"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["counted", "little"], ["more"]),
        helper.make_node("Add", ["made", "more"], ["chunk"]),
    ]
    insert_before_output(model, *size, *nodes, *add, constants=constants)


def test_p53_deterministic_is_proven_where_the_size_of_a_call_changes_its_bits(mono: Path) -> None:
    edit(mono / "model.onnx", lambda model: _plus(model, helper.make_node("Identity", ["size"], ["count"])))
    assert "deterministic" not in {check.id for check in examine(mono).checks}
    diagnosis = examine(mono, rows=3, clocks=ticking(1e-3))
    assert found(diagnosis, "batch_parity").status == "fail"
    finding = found(diagnosis, "deterministic")
    assert finding.status == "pass"
    assert finding.actual == (
        "bit-equal alone, beside others and in each of 3 rows; "
        "an answer alone takes 1.0 ms, 1.0 ms without --deterministic"
    )


def test_p53_deterministic_fails_where_a_row_depends_on_its_place_or_on_others(mono: Path, split: Path) -> None:
    places = [
        helper.make_node("Range", ["zero", "size", "one_row"], ["place"]),
        helper.make_node("Unsqueeze", ["place", "inner"], ["count"]),
    ]
    edit(split / "expert_denoise.onnx", lambda model: _plus(model, *places))
    finding = failed(split, "deterministic", rows=4)
    assert "in rows 1; 2; 3 of 4" in finding.actual
    assert "--deterministic 1" in finding.remediation
    assert found(examine(split, rows=1), "deterministic").status == "pass"
    edit(mono / "model.onnx", _mean_over_batch)
    assert "in rows 0; 1; 2; 3 of 4" in failed(mono, "deterministic", rows=4).actual


def test_p53_deterministic_is_an_option_of_the_command(mono: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(mono), "--deterministic", "--format", "json"]) == 0
    checks = {check["id"]: check["actual"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "in each of 8 rows" in checks["deterministic"]
    with pytest.raises(SystemExit):
        main(["doctor", str(mono), "--deterministic", "0"])
    assert "--deterministic=0: must be a whole number in [1, 256]" in capsys.readouterr().err


def test_t7_batch_parity_no_better_than_16_bits_is_a_warning(mono: Path) -> None:
    edit(mono / "model.onnx", lambda m: _mean_over_batch(m, 1e-3))
    assert "weights in 16 bits" in failed(mono, "batch_parity", "warn").remediation


def test_t7_batch_parity_of_rows_at_different_steps(split: Path) -> None:
    """The step takes the time of the first row for all: right in step, wrong as soon as one joins later."""

    def first_time(model: Any) -> None:
        for node in model.graph.node:
            node.input[:] = ["first" if name == "t" else name for name in node.input]
        model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
        model.graph.node.insert(0, helper.make_node("Gather", ["t", "zero"], ["first"], axis=0))

    edit(split / "expert_denoise.onnx", first_time)
    assert "at different steps" in failed(split, "batch_parity").actual


def test_t7_batch_parity_of_a_graph_made_for_one_row(mono: Path) -> None:
    nodes = [
        helper.make_node("Squeeze", ["made", "first_axis"], ["row"], name="for_one_row"),
        helper.make_node("ReduceMean", ["row"], ["scalar"], keepdims=0),
        helper.make_node("Mul", ["scalar", "nothing"], ["zero"]),
        helper.make_node("Add", ["made", "zero"], ["chunk"]),
    ]
    constants = (
        numpy_helper.from_array(np.array([0]), "first_axis"),
        numpy_helper.from_array(np.array(0, np.float32), "nothing"),
    )
    edit(mono / "model.onnx", lambda m: insert_before_output(m, *nodes, constants=constants))
    finding = failed(mono, "batch_parity")
    assert "2 together: " in finding.actual
    assert "for_one_row" in finding.actual


def test_t7_rtc_boundary(tmp_path: Path, mono: Path, split: Path) -> None:
    skipped = found(examine(mono), "rtc_boundary")
    assert (skipped.status, "answers in one call cannot do --rtc" in skipped.actual) == ("skip", True)
    assert "monolithic" in failed(mono, "rtc_boundary", rtc_horizon=2).actual
    assert "chunk_size 4" in failed(split, "rtc_boundary", "warn").actual, "the default horizon is 10"
    finding = failed(split, "rtc_boundary", rtc_horizon=5)
    assert "--rtc-horizon 2 (at most 4)" in finding.remediation
    assert found(examine(split, rtc_horizon=4), "rtc_boundary").status == "pass"
    robot = {key: value for key, value in EMBODIMENT.items() if key != "control_rate_hz"}
    silent = write_export(tmp_path / "silent", "decomposed", embodiment=robot)
    assert "control_rate_hz" in failed(silent, "rtc_boundary", "warn", rtc_horizon=3).actual


def ticking(step: float, **changes: Any) -> Clocks:
    """Clocks of which each reading is `step` seconds after the last one; wall and monotonic keep pace."""
    now = [1_900_000_000.0]

    def tick() -> float:
        now[0] += step
        return now[0]

    return replace(Clocks(tick, lambda: now[0], 1e-9), **changes)


def test_t7_rtc_boundary_knows_how_late_an_answer_is(split: Path) -> None:
    finding = failed(split, "rtc_boundary", rtc_horizon=2, clocks=ticking(0.06))
    assert "an answer takes 60.0 ms, 3 of 4 actions at 50 Hz" in finding.actual
    assert "--rtc-horizon 3 or more (at most 4)" in finding.remediation
    actual = found(examine(split, rtc_horizon=2, clocks=ticking(0.01)), "rtc_boundary").actual
    assert actual == "an answer takes 10.0 ms, 1 of 4 actions at 50 Hz"
    finding = failed(split, "rtc_boundary", rtc_horizon=4, clocks=ticking(0.1))
    assert "the robot has no action left" in finding.remediation


CLOCKS: dict[str, tuple[Callable[[], Clocks], str, str]] = {
    "backwards": (lambda: ticking(1e-3, monotonic=iter(np.sin(np.arange(1e5))).__next__), "fail", "goes back"),
    "coarse": (lambda: ticking(1e-3, resolution=0.0156), "fail", "resolution 0.0156 s"),
    "never set": (lambda: ticking(1e-3, wall=lambda: 86_400.0), "warn", "shows 1970-01-02"),
    "before its files": (lambda: ticking(1e-3, wall=lambda: 1_740_000_000.0), "warn", "before the export's own files"),
}


@pytest.mark.parametrize("case", CLOCKS)
def test_t7_clock(mono: Path, case: str) -> None:
    clocks, status, told = CLOCKS[case]
    assert told in failed(mono, "clock", status, clocks=clocks()).actual
    assert examine(mono, clocks=clocks()).exit_code == (3 if status == "fail" else 0)


def test_t7_clock_that_was_never_set_where_the_files_are_as_old(mono: Path) -> None:
    for file in mono.iterdir():
        os.utime(file, (0.0, 0.0))
    assert "shows 2001-09-09" in failed(mono, "clock", "warn", clocks=ticking(1e-3, wall=lambda: 1e9)).actual


def test_t7_a_check_that_breaks_is_a_finding_and_the_others_are_made(
    mono: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(context: Any) -> str:
        raise ZeroDivisionError("in the check")

    rules = [rule._replace(look=breaks) if rule.id == "memory" else rule for rule in doctor.CHECKS]
    monkeypatch.setattr(doctor, "CHECKS", rules)
    assert "ZeroDivisionError: in the check" in failed(mono, "memory").actual
    assert found(examine(mono), "batch_parity").status == "pass"


# -- the command -------------------------------------------------------------------------------------------------------


def test_t7_command_prints_a_table_with_what_to_do(mono: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(mono), "--instruction", "grasp it"]) == 1
    out = capsys.readouterr().out
    assert "fail  tokenizer" in out
    assert "expected: known words" in out
    assert "→ the tokenizer is not that of the training" in out
    assert "not fit to serve: " in out
    assert out.splitlines()[-1].startswith("tokenizer: ")  # what failed and what to do, again
    assert "→ the tokenizer is not that of the training" in out.splitlines()[-1]
    assert main(["doctor", str(mono)]) == 0
    assert "fit to serve: " in capsys.readouterr().out.splitlines()[-1]


def test_doctor_knows_a_language_model_as_serve_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "scribe"]) == 0
    assert capsys.readouterr().out.startswith("scribe is a language model, fit to serve: ")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert main(["doctor", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"reflex doctor: {tmp_path} is a language model, not fit to serve: ")


def test_t7_command_in_json_is_stable(mono: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(mono), "--format", "json", "--provider", "NoSuchProvider", "--threads", "2"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["schema_version"], told["exit_code"], told["threads"]) == (1, 3, 2)
    assert (told["model_id"], told["provider"], told["export_dir"]) == ("tiny", "NoSuchProvider", str(mono))
    assert [check["id"] for check in told["checks"]] == [name for name, *_ in doctor.CHECKS if name != "deterministic"]
    keys = {"id", "status", "expected", "actual", "remediation", "environment", "duration_ms"}
    assert all(set(check) == keys for check in told["checks"])
    assert sum(told["counts"].values()) == len(told["checks"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--threads", "0"], "--threads=0: must be a whole number in [1, 256]"),
        (["--threads", "x"], "--threads=x: must be"),
        (["--rtc-horizon", "0"], "--rtc-horizon=0: must be"),
        (["--instruction", " "], "--instruction=: is empty; give words"),
        (["--format", "xml"], "--format=xml: must be one of text, json"),
    ],
)
def test_t7_bad_calls_are_one_line_and_exit_2(
    mono: Path, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["doctor", str(mono), *options])
    except SystemExit as error:  # argparse's own
        status = int(error.code or 0)
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_t7_no_directory_is_a_bad_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: not found, expected an export directory" in capsys.readouterr().err
    (tmp_path / "reflex_config.json").touch()
    assert main(["doctor", str(tmp_path / "reflex_config.json")]) == 2
    assert f"is a file; name its directory, {tmp_path}\n" in capsys.readouterr().err


def test_t7_the_bundled_policy_is_named_as_for_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "demo"]) == 0
    assert "fit to serve" in capsys.readouterr().out


def test_state_of_the_samples_stays_near_the_mean(mono: Path) -> None:
    from reflex_runtime.robots import load_policy

    policy = load_policy(mono)
    for number in range(8):
        drawn = policy.sample(number, "").payload.robot_state
        assert drawn.shape == (STATE,)
        assert (np.abs(drawn - [1.0, -1.0]) <= [2.0, 0.5]).all()
