"""Steps of LeRobot's models as CUDA graphs, without a GPU: a stand-in refuses what a capture refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lerobot")

import torch
from test_serving import BOUND, asked, loaded
from tiny_checkpoints import STAGED, TASKS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from reflex_runtime.robots import DecomposedPolicy, DeviceOptions, load_policy
from reflex_runtime.robots.sources.torch_models import UploadedOnce
from reflex_runtime.run.onnx_session import CUDA
from robots.sources.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("default")  # LeRobot's and its dependencies' are not ours
SIZES = (1, 2, 4, 8)


def answers(policy: Any, starts: list[int]) -> list[Any]:
    fields = [asked(policy.spec, i) for i in range(len(starts))]  # of four tasks with texts of different lengths
    return [chunk.actions for chunk in policy.answers([policy.request(policy.prepare(**f)) for f in fields], starts)]


@pytest.mark.parametrize("family", STAGED)
@pytest.mark.parametrize("starts", [[0] * 7, [i // 2 for i in range(7)]], ids=["together", "joined"])
def test_p7_steps_of_lerobot_can_be_captured_and_answer_the_same(
    checkpoints: dict[str, Path], family: str, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # the stand-in sees more of what torch does
    model: Any = loaded(checkpoints[family]).model
    expected = answers(loaded(checkpoints[family]), starts)
    recorder = Recorder()
    model.capture(SIZES, recorder)
    policy = DecomposedPolicy(model)
    policy.warm_up((1,), repeats=1)
    found = answers(policy, starts)
    told = policy.describe()["cuda_graphs"]
    assert len({len(task) for task in TASKS}) > 1
    assert (told["graphs"], told["shapes"], told["missed"]) == (len(SIZES), 1, 0)
    assert told["replayed"] >= policy.spec.num_denoising_steps
    assert max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True)) <= BOUND


class Host(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the operations that read or make a tensor of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in (made, *args)):
            self.found.append(str(function))
        return made


@pytest.mark.parametrize("family", STAGED)
def test_p7_nothing_of_a_step_on_a_gpu_is_on_the_host(
    checkpoints: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake tensors of a GPU, which have shapes and a device, but no contents."""
    policy = loaded(checkpoints[family])
    model: Any = policy.model
    made: list[Any] = []
    pack = model.pack
    with monkeypatch.context() as plain:
        plain.setattr(torch, "inference_mode", torch.no_grad)  # tensors of inference mode have no fakes
        plain.setattr(model, "pack", lambda prefixes, rows: (made.append(pack(prefixes, rows)), made[-1])[1])
        answers(policy, [0, 0])
    with torch.no_grad(), FakeTensorMode() as fakes:

        def on_gpu(tensor: Any) -> Any:
            return fakes.from_tensor(tensor).to("cuda")

        for module in model._model.modules():
            for own in (module._parameters, module._buffers):
                own |= {name: on_gpu(t) for name, t in own.items() if t is not None}
        packed = {name: on_gpu(tensor) for name, tensor in made[0].tensors.items()}
        x = torch.zeros(2, policy.spec.chunk_size, policy.spec.x_dim, device="cuda")
        moving = {"x": x, "time": torch.zeros(2, device="cuda")}
        with UploadedOnce() as once:
            model.compute_step(packed, moving, 10)
            with Host() as host:
                moved = model.compute_step(packed, moving, 10)
        assert (moved.device.type, host.found) == ("cuda", [])
        assert len(once._made) == 1, "a mask that LeRobot makes from a list at every step"
        with Host() as host:
            model.compute_step(packed, moving, 10)
        assert host.found, "without it, the list is copied to the GPU at every step"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("family", STAGED)
def test_p7_graphs_on_a_gpu_answer_as_steps_without(checkpoints: dict[str, Path], family: str) -> None:
    plain = loaded(checkpoints[family], device=DeviceOptions(CUDA))
    policy = load_policy(f"lerobot:{checkpoints[family]}", device=DeviceOptions(CUDA, captured_sizes=SIZES))
    policy.warm_up((1,), repeats=1)
    for starts in ([0] * 7, [i // 2 for i in range(7)]):
        pairs = zip(answers(policy, starts), answers(plain, starts), strict=True)
        assert max(np.abs(a - b).max() for a, b in pairs) <= 1e-4  # another order of sums
    assert policy.describe()["cuda_graphs"]["missed"] == 0
