"""`reflex export`, with a stand-in for LeRobot: real files and graphs. LeRobot itself: tests/lerobot/test_export.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import MonolithicPolicy, Observation, PolicySpec, WholeModel, load_policy
from reflex_runtime.robots.sources import lerobot_export as exporting
from reflex_runtime.robots.sources.export_files import new_directory
from reflex_runtime.robots.sources.lerobot_checkpoint import LeRobotCheckpoint
from reflex_runtime.robots.sources.lerobot_export import BOUND, NotTheSame, export_checkpoint

HEIGHT, WIDTH, STATE, CHUNK, ACTIONS = 4, 6, 2, 3, 2
WEIGHTS = np.array([[0.5, -0.25], [0.125, 1.0]], np.float32)


class StandIn(WholeModel):
    """Actions are state · weights + the mean of the picture, in every place of the chunk. off: what its own answers
    have on top."""

    def __init__(self, spec: PolicySpec, off: float = 0.0, fails: BaseException | None = None) -> None:
        super().__init__(spec)
        self.policy = MonolithicPolicy(self)
        self.unit = np.array([1.0, 2.0], np.float32)
        self.states = np.array([[-1.0, 3.0], [1.0, 4.0]], np.float32)
        self.off, self.fails, self.asked = off, fails, 0

    def write(self, directory: Path, opset: int) -> dict[str, Any]:
        file = directory / "model.onnx"
        file.write_bytes(b"half a graph")
        if self.fails is not None:
            raise self.fails
        write_graph(file, opset)
        inputs = {"top": "top", "state": "state"}
        return {"export_kind": "monolithic", "inputs": inputs, "outputs": {"actions": "actions"}}

    def chunk(self, rows: Sequence[Observation], noise: Any) -> Any:
        self.asked += 1
        (row,) = rows
        mean = row.images["top"].mean(dtype=np.float64).astype(np.float32) / 255
        chunk = np.tile(row.row("state") @ WEIGHTS + mean, (1, CHUNK, 1)).astype(np.float32)
        return chunk + np.array([0.0, self.off], np.float32)


def stand_in(*args: Any, **more: Any) -> Callable[[PolicySpec], StandIn]:
    return lambda spec: StandIn(spec, *args, **more)


def write_graph(file: Path, opset: int) -> None:
    def constant(name: str, values: Any, kind: Any) -> Any:
        return numpy_helper.from_array(np.array(values, kind), name)

    nodes = [
        helper.make_node("Cast", ["top"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels", "axes"], ["grey"], keepdims=0),
        helper.make_node("Div", ["grey", "most"], ["light"]),
        helper.make_node("Unsqueeze", ["light", "one"], ["column"]),
        helper.make_node("MatMul", ["state", "weights"], ["moved"]),
        helper.make_node("Add", ["moved", "column"], ["row"]),
        helper.make_node("Unsqueeze", ["row", "one"], ["rows"]),
        helper.make_node("Tile", ["rows", "repeats"], ["actions"]),
    ]
    graph = helper.make_graph(
        nodes, "stand-in",
        [
            helper.make_tensor_value_info("top", TensorProto.UINT8, ["batch", HEIGHT, WIDTH, 3]),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, ["batch", STATE]),
        ],
        [helper.make_tensor_value_info("actions", TensorProto.FLOAT, ["batch", CHUNK, ACTIONS])],
        [
            constant("axes", [1, 2, 3], np.int64), constant("most", 255, np.float32), constant("one", [1], np.int64),
            constant("weights", WEIGHTS, np.float32), constant("repeats", [1, CHUNK, 1], np.int64),
        ],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), file)


def checkpoint(path: Path, **changed: Any) -> Path:
    """The files of an ACT checkpoint that are read without LeRobot."""
    path.mkdir()
    config = {
        "type": "act",
        "input_features": {
            "observation.images.top": {"type": "VISUAL", "shape": [3, HEIGHT, WIDTH]},
            "observation.state": {"type": "STATE", "shape": [STATE]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [ACTIONS]}},
        "chunk_size": CHUNK, "n_action_steps": 2, "action_feature_names": ["lift", "grip"], **changed,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture
def source(tmp_path: Path) -> str:
    return f"lerobot:{checkpoint(tmp_path / 'act')}"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the command load a stand-in."""

    def use(off: float = 0.0) -> None:
        monkeypatch.setattr(
            "reflex_runtime.robots.sources.lerobot_export.export_checkpoint",
            lambda *args, **more: export_checkpoint(*args, **more, load=stand_in(off)),
        )

    return use


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_p15_the_processors_of_a_checkpoint_are_part_of_its_configuration(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "act")
    seen = [LeRobotCheckpoint.load(str(root))]
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        for norm in ("MEAN_STD", "MIN_MAX"):
            steps = [{"registry_name": "normalizer_processor", "config": {"norm_map": {"STATE": norm}}}]
            (root / name).write_text(json.dumps({"steps": steps}))
            seen.append(LeRobotCheckpoint.load(str(root)))
    assert LeRobotCheckpoint.load(str(root)).config_hash == seen[-1].config_hash
    checkpoint(tmp_path / "other", n_action_steps=1)
    seen.append(LeRobotCheckpoint.load(str(tmp_path / "other")))
    assert len({spec.config_hash for spec in seen}) == len(seen)
    assert len({spec.model_hash for spec in seen}) == 1


@pytest.mark.parametrize("text", ["[]", "{}", '{"steps": [1]}', '{"steps": {}}'])
def test_p14_a_processor_without_steps_is_one_line(text: str, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "act")
    (root / "policy_preprocessor.json").write_text(text)
    with pytest.raises(ConfigError, match=r"policy_preprocessor.json: (file|steps): found .*, expected a"):
        LeRobotCheckpoint.load(str(root))


@pytest.mark.parametrize("renames", [[1], {"observation.images.a": ["observation.images.top"]}])
def test_p14_a_rename_that_is_no_name_is_one_line(renames: Any, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "act")
    step = {"registry_name": "rename_observations_processor", "config": {"rename_map": renames}}
    (root / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    with pytest.raises(ConfigError, match=r"policy_preprocessor.json: rename_map: expected an object of names"):
        LeRobotCheckpoint.load(str(root))


# -- the same, or not there --------------------------------------------------------------------------------------------


def test_p40_an_export_is_there_once_it_answers_as_the_checkpoint(source: str, tmp_path: Path) -> None:
    made: list[StandIn] = []
    out = tmp_path / "deep" / "out"
    found = export_checkpoint(source, out, load=lambda spec: made.append(StandIn(spec)) or made[0])
    assert made[0].asked == 6
    assert found.compared == 18  # alone, in pairs, all together
    assert found.difference < 1e-6
    assert names(out) == ["embodiment.json", "model.onnx", "reflex_config.json"]
    assert names(out.parent) == ["out"]
    umask = os.umask(0o022)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask
    spec = load_policy(out).spec
    assert (spec.model_id, spec.model_type, spec.chunk_size, spec.images) == ("act", "act", 3, {"top": (4, 6)})
    assert spec.embodiment.action_names == ("lift", "grip")
    assert spec.wires["vla-eval"].execute == 2
    assert spec.config["metadata"]["checkpoint_hash"] == LeRobotCheckpoint.load(source).model_hash


@pytest.mark.parametrize("off", [3 * BOUND, -3 * BOUND, np.nan, np.inf])
def test_p40_one_that_answers_something_else_is_not_there(off: float, source: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(NotTheSame, match="joint 1 differs" if np.isfinite(off) else "NaN or infinite"):
        export_checkpoint(source, out, load=stand_in(off))
    assert names(tmp_path) == ["act"]


def test_p40_the_bound_is_in_the_unit_of_the_joint(source: str, tmp_path: Path) -> None:
    """Joint 1 is normalised by 2: so much is within the bound, and it is told."""
    found = export_checkpoint(source, tmp_path / "out", load=stand_in(1.9 * BOUND))
    assert found.difference == pytest.approx(1.9 * BOUND, rel=0.01)
    assert found.in_units == pytest.approx(0.95 * BOUND, rel=0.01)


@pytest.mark.parametrize("wrong", [0.01, np.nan])
def test_p40_rows_that_depend_on_their_neighbours_are_found(
    wrong: float, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it is the same, in a batch it is not."""
    answers = exporting._answers

    def mixed(policy: Any, episodes: Any, *how: Any) -> Any:
        return answers(policy, episodes, *how) + (wrong if len(episodes) > 2 else 0.0)

    monkeypatch.setattr(exporting, "_answers", mixed)
    with pytest.raises(NotTheSame, match="in a batch of 6"):
        export_checkpoint(source, tmp_path / "out", load=stand_in())


def test_p40_the_command_says_the_difference_and_exits_with_0_or_1(
    source: str, tmp_path: Path, loads: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    loads()
    assert main(["export", source, str(out), "--opset", "19"]) == 0
    said = capsys.readouterr().out
    assert "largest difference in 18 answers: " in said
    assert f"reflex serve {out}" in said
    assert json.loads((out / "reflex_config.json").read_text())["opset"] == 19
    assert {(o.domain, o.version) for o in onnx.load(out / "model.onnx").opset_import} == {("", 19)}

    loads(0.01)
    assert main(["export", source, str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err.startswith(f"reflex export: {source}: the export's answers differ")
    assert names(tmp_path) == ["act", "out"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"type": "vqbet", "action_chunk_size": 3}, "type vqbet is not exported: only act, diffusion, smolvla are"),
        ({"type": "pi0", "num_inference_steps": 10}, "type pi0 is not exported: only act, diffusion, smolvla are"),
        ({"type": "xvla"}, "type xvla is not exported: only act, diffusion, smolvla are known"),
        ({"type": "tdmpc"}, "type tdmpc is not known to predict chunks without keeping"),
        ({"type": "diffusion", "noise_scheduler_type": "DDPM"}, "noise_scheduler_type DDPM is not exported: it draws"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_p41_a_type_without_a_graph_that_is_the_same_is_refused_with_the_reason(
    changed: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path / "other", **changed)
    assert main(["export", str(path), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    if "is not exported" in line:
        assert f"reflex serve lerobot:{path}" in line
    assert names(tmp_path) == ["other"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("{source} {out} --opset 17", "--opset=17: must be a whole number in [18, 23]"),
        ("{source} {out} --opset new", "--opset=new: must be a whole number in [18, 23]"),
        ("python:my.module:make {out}", "python:my.module:make: only LeRobot checkpoints are exported"),
        ("openpi:{export} {out}", "openpi:{export}: only LeRobot checkpoints are exported"),
        ("{export} {out}", "{export}: is an export already; serve it as it is"),
        ("lerobot:{out} {out}", "{out}: not found"),
        ("{source}", "missing: OUT; write reflex export SOURCE OUT"),
    ],
)
def test_p41_wrong_words_are_one_line(
    words: str, says: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export, out = tmp_path / "export", tmp_path / "out"
    export.mkdir()
    (export / "reflex_config.json").write_text("{}")
    known = {"source": source, "out": out, "export": export}
    try:
        status = main(["export", *words.format(**known).split()])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"reflex export: {says.format(**known)}")
    assert not out.exists()


# -- whole or not at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConfigError("no"), OSError("disk full"), KeyboardInterrupt()])
def test_p42_nothing_is_left_of_an_export_that_failed(error: Any, source: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        export_checkpoint(source, tmp_path / "out", load=stand_in(fails=error))
    assert names(tmp_path) == ["act"]


def test_p42_an_export_is_replaced_by_one_that_is_the_same_and_only_if_asked(
    source: str, tmp_path: Path, loads: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    loads()
    assert main(["export", source, str(out)]) == 0  # an empty directory is as good as none
    old = (out / "reflex_config.json").read_text()
    (out / "mine.txt").write_text("of the old one")

    assert main(["export", source, str(out)]) == 2
    assert "is not empty; name another directory, or use --force" in capsys.readouterr().err
    loads(0.01)
    assert main(["export", source, str(out), "--force"]) == 1
    assert (out / "mine.txt").is_file()
    assert (out / "reflex_config.json").read_text() == old

    loads()
    assert main(["export", source, str(out), "--force", "--opset", "20"]) == 0
    assert names(out) == ["embodiment.json", "model.onnx", "reflex_config.json"]
    assert json.loads((out / "reflex_config.json").read_text())["opset"] == 20
    assert names(tmp_path) == ["act", "out"]


def test_p42_force_replaces_nothing_but_exports(source: str, tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="--force replaces exports, and this is none"):
        export_checkpoint(source, out, force=True, load=stand_in())
    with pytest.raises(ConfigError, match="is a file; name a directory"):
        export_checkpoint(source, out / "thesis.tex", force=True, load=stand_in())
    assert names(out) == ["thesis.tex"]


def test_p42_what_was_there_comes_back_if_the_exchange_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "reflex_config.json").write_text("old")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if (self / "new").exists():
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="no"), new_directory(out, force=True) as making:
        (making / "new").touch()
    assert names(tmp_path) == ["out"]
    assert (out / "reflex_config.json").read_text() == "old"
