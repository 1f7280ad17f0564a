"""ONNX sessions: the batch axis, the checks against what is expected, and anyone's model as a processor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.functions.processor import OnnxItems
from reflex_runtime.run.onnx_session import CPU, CUDA, OPENVINO, OnnxSession, TensorSpec

Dim = str | int


def write(
    root: Path,
    x: Sequence[Dim] = ("batch", 3),
    y: Sequence[Dim] = ("batch", 2),
    shift: Sequence[Dim] | None = None,
    dtype: int = TensorProto.FLOAT,
) -> Path:
    """x [batch, 3] · weights → y [batch, 2], and total [batch]; with `shift`, an input of its own is added to y."""
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["y" if shift is None else "product"]),
        helper.make_node("ReduceSum", ["x", "axis"], ["total"], keepdims=0),
    ]
    ports = [helper.make_tensor_value_info("x", dtype, x)]
    if shift is not None:
        nodes.append(helper.make_node("Add", ["product", "shift"], ["y"]))
        ports.append(helper.make_tensor_value_info("shift", dtype, shift))
    outputs = [helper.make_tensor_value_info("y", dtype, y), helper.make_tensor_value_info("total", dtype, y[:1])]
    numpy_dtype = helper.tensor_dtype_to_np_dtype(dtype)
    weights = numpy_helper.from_array(np.arange(6).reshape(3, 2).astype(numpy_dtype), "weights")
    axis = numpy_helper.from_array(np.array([1], np.int64), "axis")
    graph = helper.make_graph(nodes, "linear", ports, outputs, [weights, axis])
    file = root / "linear.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
WEIGHTS = np.arange(6, dtype=np.float32).reshape(3, 2)


def batch_of(*payloads: Any) -> Batch:
    tickets = [Ticket(Request(p), i, 0.0) for i, p in enumerate(payloads)]
    return Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(tickets, 1.0))


def count_calls(session: OnnxSession, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    whole = session.call
    monkeypatch.setattr(session, "call", lambda rows: (calls.append(len(rows["x"])), whole(rows))[1])
    return calls


def test_b11_a_symbolic_leading_axis_runs_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = OnnxSession(write(tmp_path))
    calls, notes = count_calls(session, monkeypatch), dict[str, Any]()
    np.testing.assert_array_equal(session.run({"x": ROWS}, notes)["y"], ROWS @ WEIGHTS)
    assert (session.dynamic_batch, calls, notes) == (True, [4], {})


def test_b11_a_leading_axis_of_one_runs_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = OnnxSession(write(tmp_path, (1, 3), (1, 2)))
    calls, notes = count_calls(session, monkeypatch), dict[str, Any]()
    outputs = session.run({"x": ROWS}, notes)
    np.testing.assert_array_equal(outputs["y"], ROWS @ WEIGHTS)
    np.testing.assert_array_equal(outputs["total"], ROWS.sum(1))
    assert (session.dynamic_batch, calls, notes) == (False, [1, 1, 1, 1], {"fanout": "sequential"})


def test_b11_a_leading_axis_of_any_size_gets_whole_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(9 * 3, dtype=np.float32).reshape(9, 3)
    for y in ((4, 2), ("batch", 2)):  # exporters leave the axis of outputs open
        session = OnnxSession(write(tmp_path, (4, 3), y), any_batch=True)
        calls, notes = count_calls(session, monkeypatch), dict[str, Any]()
        outputs = session.run({"x": rows}, notes)
        np.testing.assert_array_equal(outputs["y"], rows @ WEIGHTS)
        np.testing.assert_array_equal(outputs["total"], rows.sum(1))
        assert (session.batch_size, session.dynamic_batch, calls) == (4, False, [4, 4, 4])
        assert notes == {"fanout": "sequential"}
        np.testing.assert_array_equal(session.run({"x": rows[:3]}, notes := {})["y"], rows[:3] @ WEIGHTS)
        assert notes == {}, "one call"
    assert OnnxSession(write(tmp_path), any_batch=True).batch_size is None
    total = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 13]> g (float[4, 3] x) => (float[1, 3] y) { y = ReduceMax<axes=[0]>(x) }'
    )
    onnx.save(total, tmp_path / "total.onnx")
    with pytest.raises(ConfigError, match="output 'y': leading axis: found a fixed size of 1, expected 4 as that of"):
        OnnxSession(tmp_path / "total.onnx", any_batch=True)


def test_a_graph_whose_results_are_no_rows_gets_whole_items(tmp_path: Path) -> None:
    """As those of detectors with their own suppression of boxes: the number of boxes is symbolic, too."""
    kept = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 13]> g (float[n, 3] x) => (int64[k, 2] y)'
        "{ axes = NonZero(x) y = Transpose(axes) }"
    )
    onnx.save(kept, tmp_path / "kept.onnx")
    items = OnnxItems(tmp_path / "kept.onnx", CPU, 1)
    assert "output 'y': leading axis: found 0, expected 1" in items.axis
    found = items.run(batch_of({"x": np.eye(3, dtype=np.float32)}, {"x": np.ones((1, 3), np.float32)}))
    assert [one["y"].tolist() for one in found] == [[[0, 0], [1, 1], [2, 2]], [[0, 0], [0, 1], [0, 2]]]


def test_b11_results_of_other_rows_are_refused(tmp_path: Path) -> None:
    twice = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 13]> g (float[n, 3] x) => (float[m, 3] y) { y = Concat<axis=0>(x, x) }'
    )
    onnx.save(twice, tmp_path / "twice.onnx")
    session = OnnxSession(tmp_path / "twice.onnx")
    with pytest.raises(ConfigError, match="output 'y': leading axis: found 8, expected 4 as that of its inputs"):
        session.run({"x": ROWS})


@pytest.mark.parametrize(
    ("x", "y", "shift", "said"),
    [
        ((4, 3), (4, 2), None, "input 'x': leading axis: found a fixed size of 4, expected a symbolic size, or 1"),
        (("batch", 3), ("batch", 2), (1, 2), "input 'shift': leading axis is 1 but that of input 'x' is symbolic"),
        (("batch", 3), ("batch", 2), (), "input 'shift': leading axis: found no axis at all"),
    ],
)
def test_leading_axes_that_cannot_be_the_batch_axis(tmp_path: Path, x: Any, y: Any, shift: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OnnxSession(write(tmp_path, x, y, shift))


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ([TensorSpec("z")], None, "input 'z': not in the graph, which has 'x', 'shift'"),
        ([TensorSpec("x")], None, "input 'shift': unknown, expected only 'x'"),
        ([TensorSpec("x", "i"), TensorSpec("shift")], None, "input 'x': found float32, expected int32 or int64"),
        ([TensorSpec("x", "f", (4,)), TensorSpec("shift")], None, r"input 'x': found \[3\] .*, expected \[4\]"),
        ([TensorSpec("x", "f", (3, 1)), TensorSpec("shift")], None, r"input 'x': found \[3\] .*, expected \[3, 1\]"),
        (None, [TensorSpec("z")], "output 'z': not in the graph, which has 'y', 'total'"),
        (None, [TensorSpec("y", "f", (3,))], r"output 'y': found \[2\] after the batch axis, expected \[3\]"),
    ],
)
def test_what_is_expected_is_checked(tmp_path: Path, inputs: Any, outputs: Any, said: str) -> None:
    file = write(tmp_path, shift=("batch", 2))
    with pytest.raises(ConfigError, match=rf"linear\.onnx: {said}"):
        OnnxSession(file, inputs, outputs)


def test_symbolic_sizes_behind_the_batch_axis_fit_anything(tmp_path: Path) -> None:
    file = write(tmp_path, ("batch", "width"), ("batch", 2))
    assert OnnxSession(file, [TensorSpec("x", "f", (3,))]).inputs["x"].dims == (None, None)


def test_only_the_expected_outputs_are_computed(tmp_path: Path) -> None:
    session = OnnxSession(write(tmp_path), outputs=[TensorSpec("total", "f", ())])
    assert list(session.run({"x": ROWS})) == ["total"]


def test_inputs_are_converted_to_the_graphs_types(tmp_path: Path) -> None:
    session = OnnxSession(write(tmp_path, dtype=TensorProto.DOUBLE))
    outputs = session.run({"x": np.asfortranarray(ROWS)})
    assert outputs["y"].dtype == np.float64
    np.testing.assert_array_equal(outputs["y"], ROWS @ WEIGHTS)


def test_place_is_the_array_itself_on_the_cpu(tmp_path: Path) -> None:
    session = OnnxSession(write(tmp_path))
    assert session.place(ROWS, "x") is ROWS
    assert session.place(ROWS.astype(np.float64), "x").dtype == np.float32


def test_a_missing_provider_is_an_error_and_never_another_one(tmp_path: Path) -> None:
    import onnxruntime

    with pytest.raises(ConfigError, match=r"provider='TpuExecutionProvider': not in this onnxruntime, which has .*CPU"):
        OnnxSession(write(tmp_path), provider="TpuExecutionProvider")
    for provider, package in ((CUDA, "onnxruntime-gpu"), (OPENVINO, "onnxruntime-openvino")):
        if provider not in onnxruntime.get_available_providers():
            with pytest.raises(ConfigError, match=f"pip install {package}"):
                OnnxSession(write(tmp_path), provider=provider)


def test_files_that_are_no_graphs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.onnx: not found"):
        OnnxSession(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(ConfigError, match=r"text\.onnx: onnxruntime cannot load it"):
        OnnxSession(tmp_path / "text.onnx")


def test_threads_out_of_range_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threads=0"):
        OnnxSession(write(tmp_path), threads=0)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads through /proc")
def test_one_thread_is_the_default(tmp_path: Path) -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    before = threads()
    one = OnnxSession(write(tmp_path))
    assert threads() - before == set()  # others may have ended
    three = OnnxSession(write(tmp_path), threads=3)
    assert len(threads() - before) == 2  # the caller is the third
    del one, three


def test_onnxruntime_is_imported_only_when_a_session_is_opened() -> None:
    import subprocess
    import sys

    code = "import sys, reflex_runtime.robots; sys.exit('onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
