"""`--cuda-graphs` for modules in PyTorch, all but the recording itself, which needs a GPU (test_torch_cuda.py)."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch")

import reflex_runtime.robots.versions.slots  # noqa: E402
from reflex_runtime.core.batch import Batch  # noqa: E402
from reflex_runtime.core.errors import ConfigError  # noqa: E402
from reflex_runtime.core.request import Ticket  # noqa: E402
from reflex_runtime.robots import DecomposedPolicy, DeviceOptions, Export, Policy, load_policy  # noqa: E402
from reflex_runtime.robots.app import _check_device  # noqa: E402
from reflex_runtime.robots.policy.base import run_through  # noqa: E402
from reflex_runtime.robots.sources import torch_models  # noqa: E402
from reflex_runtime.robots.sources.load import read_source  # noqa: E402
from reflex_runtime.robots.sources.torch_models import MOST_SHAPES, CapturedStep, TorchStaged, TorchWhole, UploadedOnce  # noqa: E402
from reflex_runtime.robots.versions.slots import group_of  # noqa: E402
from reflex_runtime.run.onnx_session import CUDA  # noqa: E402
from reflex_runtime.settings import ServeConfig  # noqa: E402
from robots.tiny import write_export  # noqa: E402
from serving.in_process import one_policy  # noqa: E402

from .recorder import Recorder  # noqa: E402
from .test_torch import BOUND, SOURCE, Whole, asked, staged, template  # noqa: E402, F401

SIZES = (1, 2, 4, 8)


def graphed(sizes: tuple[int, ...] = SIZES, warm: bool = True) -> tuple[DecomposedPolicy, Recorder]:
    """The template's policy with captured steps, after its warm-up."""
    plain, recorder = staged(), Recorder()
    model: Any = plain.model
    model.capture(sizes, recorder)
    policy = DecomposedPolicy(model)
    if warm:
        policy.warm_up((1,), repeats=1)
    return policy, recorder


def batches(policy: Policy, count: int, starts: list[int] | None = None) -> tuple[list[Batch], list[Any]]:
    """(batches, answers) of that many requests."""
    tickets = [Ticket(asked(policy, i), i, 0.0) for i in range(count)]
    ran = run_through(policy, tickets, policy.stages, starts or (), group=policy.slot, shape=policy.shape)
    return [batch for batch, _ in ran], [ticket.outcome.value.actions for ticket in tickets]  # type: ignore[union-attr]


def worst(ones: list[Any], others: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x * int(x.max()),
        lambda x: x.cpu(),
        lambda x: x if (x > 0).all() else -x,
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0]),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_the_stand_in_refuses_what_a_capture_refuses(wait: Any, inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="not permitted"):
        Recorder()(lambda: wait(torch.ones(2)))


@pytest.mark.parametrize("starts", [[0] * 7, [i // 2 for i in range(7)]], ids=["together", "two more a step"])
def test_p7_replayed_steps_answer_as_plain_ones(starts: list[int]) -> None:
    policy, recorder = graphed()
    assert recorder.recorded == len(SIZES)
    before = recorder.replays
    ran, actions = batches(policy, 7, starts)
    steps = [batch for batch in ran if batch.stage == "denoise"]
    assert recorder.recorded == len(SIZES), "a request waited for a capture"
    assert recorder.replays - before == len(steps)
    assert all(batch.notes["captured"] is True for batch in steps)
    assert not any("captured" in batch.notes for batch in ran if batch.stage == "prefix")
    assert worst(actions, batches(staged(), 7, starts)[1]) <= BOUND


def test_p7_what_others_left_in_the_padding_is_never_seen() -> None:
    policy, _ = graphed((1, 4, 8))
    model: Any = policy.model
    plain = batches(staged(), 8)[1]
    for n in (3, 8, 2, 5, 1, 7, 3):
        for buffer in model._captured._buffers.values():
            with torch.inference_mode():
                buffer.fill_(torch.nan if buffer.is_floating_point() else 9)
        ran, actions = batches(policy, n)
        assert {len(batch) for batch in ran} == {n}
        assert worst(actions, plain[:n]) <= BOUND


def test_p7_padding_rows_are_copies_of_the_last_row() -> None:
    seen: list[Any] = []
    step = CapturedStep(lambda packed, moving, n: (seen.append(moving["x"].clone()), moving["x"])[1], (4,), Recorder())
    step.run({"a": torch.zeros(3, 1)}, {"x": torch.tensor([[1.0], [2.0], [3.0]])}, 5, True)
    assert seen[-1].flatten().tolist() == [1.0, 2.0, 3.0, 3.0]


def test_p7_prefixes_are_copied_in_once_while_the_same_requests_step(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = graphed()
    filled: list[str] = []
    fill = torch_models._fill
    monkeypatch.setattr(
        torch_models, "_fill", lambda buffers, given: (filled.append("+".join(given)), fill(buffers, given))[1]
    )
    batches(policy, 4)
    assert filled == ["scene+state", *["x+k"] * 10]
    filled.clear()
    batches(policy, 4, [0, 0, 0, 3])  # one joins after three steps, and is left alone for three
    assert filled.count("scene+state") == 3
    assert filled.count("x+k") == 13


def test_p7_steps_beyond_the_largest_size_run_as_they_are_and_are_counted() -> None:
    policy, recorder = graphed((1, 2))
    before = recorder.replays
    ran, actions = batches(policy, 3)
    assert [batch.notes["captured"] for batch in ran if batch.stage == "denoise"] == [False] * 10
    assert recorder.replays == before
    assert worst(actions, batches(staged(), 3)[1]) <= BOUND
    batches(policy, 2)
    told = policy.describe()
    assert (told["captured_sizes"], told["cuda_graphs"]) == (
        [1, 2], {"graphs": 2, "shapes": 1, "replayed": 10, "missed": 10}
    )  # fmt: skip


def test_p7_what_a_step_answered_stays_when_the_graph_runs_again(template: Any) -> None:  # noqa: F811
    policy, _ = graphed((2,))
    packed = {"scene": torch.zeros(2, 22, 64), "state": torch.zeros(2, 8)}
    zeros = np.zeros(2, np.int64)
    first = policy.model.step(packed, np.zeros((2, 16, 7), np.float32), zeros, 10)
    kept = first.copy()
    policy.model.step(packed, np.ones((2, 16, 7), np.float32), zeros, 10)
    assert policy.describe()["cuda_graphs"]["replayed"] == 2
    assert (first == kept).all()


def double(packed: Any, moving: Any, n: int) -> Any:
    return moving["x"] * n + packed["a"].sum(tuple(range(1, packed["a"].ndim)))[:, None]


def test_p7_shapes_and_steps_that_no_warm_up_had_are_never_captured(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    step, x = CapturedStep(double, (1, 2), recorder), {"x": torch.ones(2, 1)}
    assert step.run({"a": torch.ones(2, 3)}, x, 10, True)[1]
    with caplog.at_level(logging.WARNING):
        for width, n in ((3, 5), (4, 10), (5, 10)):
            moved, by_graph = step.run({"a": torch.ones(2, width)}, x, n, False)
            assert (moved.tolist(), by_graph) == ([[n + width]] * 2, False)
    assert (recorder.recorded, step.missed) == (1, 3)
    assert caplog.text.count("runs without a CUDA graph") == 1
    moved, by_graph = step.run({"a": torch.ones(2, 3)}, x, 10, False)
    assert (moved.tolist(), by_graph) == ([[13.0]] * 2, True)


def test_p7_the_number_of_shapes_is_bounded() -> None:
    recorder = Recorder()
    step = CapturedStep(double, (1, 2), recorder)
    for width in range(1, MOST_SHAPES + 3):
        for rows in (1, 2):
            moved, _ = step.run({"a": torch.ones(rows, width)}, {"x": torch.ones(rows, 1)}, 10, True)
            assert moved.tolist() == [[10.0 + width]] * rows
    assert recorder.recorded == 2 * MOST_SHAPES
    assert step.snapshot() == {"graphs": 2 * MOST_SHAPES, "shapes": MOST_SHAPES, "replayed": 0, "missed": 0}


def test_p7_graphs_of_all_sizes_share_their_inputs() -> None:
    policy, _ = graphed((1, 4, 8))
    model: Any = policy.model
    assert {len(buffer) for buffer in model._captured._buffers.values()} == {8}
    assert len(model._captured._buffers) == 4  # scene, state, x, k
    graphs = [graph for sizes in model._captured._graphs.values() for graph in sizes.values()]
    inputs = [graph.packed["scene"].data_ptr() for graph in graphs]
    assert (len(inputs), len(set(inputs))) == (3, 1)


def test_p7_another_thread_than_the_one_that_captured_runs_without() -> None:
    policy, recorder = graphed()
    before, found = recorder.replays, []
    other = Thread(target=lambda: found.extend(batches(policy, 3)))
    other.start()
    other.join()
    ran, actions = found
    assert recorder.replays == before
    assert not any(batch.notes.get("captured") for batch in ran)
    assert worst(actions, batches(staged(), 3)[1]) <= BOUND


def test_p7_a_compiled_step_is_what_is_captured(monkeypatch: pytest.MonkeyPatch, template: Any) -> None:  # noqa: F811
    calls: list[int] = []

    def compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *args: (calls.append(len(args[1])), call(*args))[1]

    monkeypatch.setattr(torch, "compile", compiled)
    model = TorchStaged(template.SPEC, template.TinyVLA(), DeviceOptions(compile=True))
    model.capture((2,), Recorder())
    DecomposedPolicy(model).warm_up((1,), repeats=1)
    assert set(calls) == {2}


def test_p7_a_step_that_cannot_be_captured_is_one_line_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, template: Any  # noqa: F811
) -> None:
    def step(self: Any, prefix: Any, x: Any, k: Any, n: int) -> Any:
        return x if int(k.max()) == n else x / 2  # waits for the device

    monkeypatch.setattr(template.TinyVLA, "step", step)

    def load(spec: Any, **others: Any) -> Policy:
        policy = load_policy(spec, **others)
        policy.model.capture((1, 2), Recorder())  # type: ignore[attr-defined]
        return DecomposedPolicy(policy.model)  # type: ignore[arg-type]

    async def main() -> None:
        runtime = one_policy(ServeConfig(), {"prod": read_source(SOURCE)})
        await runtime.start()
        assert (runtime.state, runtime.unusable) == ("warmup_failed", True)
        assert runtime.error is not None
        assert runtime.error.startswith(
            f"{SOURCE}: --cuda-graphs: the step cannot be captured at batch size 1 (RuntimeError: CUDA error: "
            "operation not permitted when stream is capturing"
        )
        assert runtime.error.endswith("leave --cuda-graphs out")
        assert "\n" not in runtime.error

    monkeypatch.setattr(reflex_runtime.robots.versions.slots, "load_policy", load)
    asyncio.run(main())


def test_p7_constants_from_lists_are_uploaded_before_the_capture_and_kept() -> None:
    def masked(packed: Any, moving: Any, n: int) -> Any:
        constant = torch.tensor([1.0, 0.0] * (n // 2), dtype=torch.float32)
        constant += 1.0  # a step may write to what it has made
        return moving["x"] * constant

    step = CapturedStep(masked, (2,), Recorder())
    for warming in (True, False):
        moved, by_graph = step.run({}, {"x": torch.ones(2, 4)}, 4, warming)
        assert (moved.tolist(), by_graph) == ([[2.0, 1.0, 2.0, 1.0]] * 2, True)
    ((graph,),) = (graphs.values() for graphs in step._graphs.values())
    (kept,) = (weakref.ref(tensor) for tensor in graph.constants._made.values())
    del graph
    gc.collect()
    assert kept() is not None, "the graph reads memory that was freed"


def test_p7_only_lists_are_uploaded_once() -> None:
    values = np.zeros(2)
    with UploadedOnce() as once:
        first = torch.tensor(values)
        values[:] = 1.0
        assert (first.tolist(), torch.tensor(values).tolist()) == ([0.0, 0.0], [1.0, 1.0])
        assert torch.tensor([1, 2]).dtype is torch.int64
        assert torch.tensor([1, 2], dtype=torch.float32).dtype is torch.float32
        assert len(once._made) == 2
        torch.tensor([1, 2]).add_(1)
        assert torch.tensor([1, 2]).tolist() == [1, 2]


def test_p7_only_steps_are_predicted_at_the_padded_size() -> None:
    policy, _ = graphed()
    assert policy.cost_model().padded_stages == ("denoise",)
    model: Any = group_of(ServeConfig(), "prod", policy).cost()
    assert (model.sizes, model.padded_stages) == (SIZES, ("denoise",))
    assert staged().cost_model().sizes == ()


def test_p7_the_benchmark_measures_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import cuda_graphs

    for name, value in {"SIZES": (1, 2), "COMPARED": (1, 2, 3), "ROUNDS": 1, "REPEATS": 1}.items():
        monkeypatch.setattr(cuda_graphs, name, value)
    plain, (graphs, _) = staged(), graphed((1, 2), warm=False)
    found = cuda_graphs.rounds(plain, graphs)
    assert {key[:2] for key in found} == {(stage, n) for stage in ("prefix", "denoise") for n in (1, 2)}
    assert 0.0 <= cuda_graphs.difference(plain, graphs) <= BOUND


def test_p7_onnx_runtime_has_no_say_in_the_device_of_a_policy_in_pytorch(tmp_path: Path) -> None:
    cuda = ServeConfig(provider="cuda", cuda_graphs="1,2")
    _check_device(cuda, {"prod": read_source(SOURCE)})
    if CUDA not in onnxruntime.get_available_providers():
        with pytest.raises(ConfigError, match="--provider=cuda: not in this onnxruntime"):
            _check_device(cuda, {"prod": read_source(SOURCE), "b": Export.load(write_export(tmp_path, "monolithic"))})
    with pytest.raises(ConfigError, match="--cuda-graphs=1,2: CPUExecutionProvider has no graphs to capture"):
        _check_device(ServeConfig(cuda_graphs="1,2"), {"prod": read_source(SOURCE)})
    with pytest.raises(ConfigError, match="--provider=Nothing: not in this onnxruntime"):
        _check_device(ServeConfig(provider="Nothing"), {"prod": read_source(SOURCE)})


def test_p7_policies_without_steps_and_the_cpu_have_nothing_to_capture(
    template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    with pytest.raises(ConfigError, match=r"^python:.*: --cuda-graphs: CPUExecutionProvider has no graphs to capture"):
        load_policy(SOURCE, device=DeviceOptions(captured_sizes=(1, 2)))
    with pytest.raises(ConfigError, match="--cuda-graphs: captures the steps of staged policies"):
        TorchWhole(template.SPEC, Whole(template.TinyVLA()), DeviceOptions(captured_sizes=(1, 2)))
    (tmp_path / "deaf.py").write_text(
        "from pytorch_policy import SPEC, TinyVLA\n"
        "from reflex_runtime.robots.sources.torch_models import TorchStaged\n"
        "def make(device):\n    return TorchStaged(SPEC, TinyVLA())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="python:deaf:make: --cuda-graphs: the model captures no batch sizes"):
        load_policy("python:deaf:make", device=DeviceOptions(captured_sizes=(1, 2)))
