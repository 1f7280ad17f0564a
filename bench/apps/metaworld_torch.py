"""The bundled Meta-World policy in PyTorch, made larger until a call costs about 10 ms: `make` for `python:`.

The same function, so it solves the same tasks: a layer gets more units, and further ones after it, that together give
what it gave (Net2Net, T. Chen and others, 2016). All of it is computed. A request passes the larger layer once in a
step. So a call mostly reads weights, once for all requests in it, as that of a large policy does on an accelerator.
As a program it is this policy behind openpi's own server: `python -m bench.apps.metaworld_torch CLONE PORT`.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from reflex_runtime.demo import POLICY
from reflex_runtime.robots import DeviceOptions, load_policy
from reflex_runtime.robots.sources.torch_models import Tensors, TorchWhole

SERVER = Path("src/openpi/serving/websocket_policy_server.py")  # in a clone of openpi
TIMES, DEEPER = 16, 2  # more units, further layers: about 10 ms a call on a core of 2.6 GHz
sys.path.append(str(Path(__file__).parents[2] / "tools" / "demo_policy"))

from model import STEPS, Expert, Prefix  # noqa: E402


class Whole(nn.Module):  # type: ignore[misc]
    """Prefix and all denoise steps in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix, self.expert = Prefix(14), Expert()
        for module, name in ((self.prefix, "vlm_prefix"), (self.expert, "expert_denoise")):
            module.load_state_dict(weights(POLICY / f"{name}.onnx"))

    def forward(self, inputs: Tensors, noise: Tensor) -> Tensor:
        past_kv, x = self.prefix(inputs["image"], inputs["tokens"]), noise
        for k in range(STEPS):
            x = x + self.expert(x, torch.full((len(x),), k / STEPS), inputs["state"], past_kv) / STEPS
        return x


def weights(path: Path) -> dict[str, Tensor]:
    """Those of a graph, by the names that its module gives them."""
    graph = onnx.load(path).graph
    found = {one.name: torch.tensor(numpy_helper.to_array(one)) for one in graph.initializer}
    for name in [name for name in found if name.endswith(".small")]:  # integers and a scale
        plain = name.removesuffix(".small")
        found[plain] = found.pop(name) * found.pop(f"{plain}.scale")
    added = {name: node.input for node in graph.node if node.op_type == "Add" for name in node.input}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in found:  # the exporter has turned it; its name is its bias's
            bias = next(name for name in added[node.output[0]] if name in found)
            found[bias.removesuffix("bias") + "weight"] = found.pop(node.input[1]).T
    return {name.removeprefix("expert."): tensor for name, tensor in found.items()}


def enlarge(layer: nn.Sequential, times: int, deeper: int) -> nn.Sequential:
    """The same function with more units and further layers in between, which give what they get."""
    first, last = layer[0], layer[2]
    units = times * len(first.weight)
    large = nn.Sequential(nn.Linear(first.in_features, units), nn.ReLU())
    large[0].load_state_dict({"weight": first.weight.repeat(times, 1), "bias": first.bias.repeat(times)})
    for _ in range(deeper):
        same = nn.Linear(units, units)
        mean = torch.eye(len(first.weight)).repeat(times, times) / times  # of a unit's copies
        same.load_state_dict({"weight": mean, "bias": torch.zeros(units)})
        large.extend([same, nn.ReLU()])
    last.weight = nn.Parameter(last.weight.repeat(1, times) / times)
    return large.append(last)


def make(device: DeviceOptions) -> TorchWhole:
    """What `reflex serve` calls."""
    module = Whole()
    module.expert.from_state = enlarge(module.expert.from_state, TIMES, DEEPER)
    spec = load_policy(POLICY).spec
    return TorchWhole(replace(spec, staged=False, model_hash="", model_bytes=0), module, device)


class OneAtATime:
    """What openpi's server calls: an observation to its actions."""

    def __init__(self) -> None:
        self._policy = load_policy("python:bench.apps.metaworld_torch:make")

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        seen = self._policy.prepare(
            images={"image": observation["observation/image"]},
            state=observation["observation/state"],
            instruction=observation["prompt"],
        )
        (chunk,) = self._policy.answers([self._policy.request(seen)])
        return {"actions": chunk.actions}


def main(clone: str, port: int) -> None:
    """Serve by the file of a clone, which needs neither JAX nor the rest of it, until killed."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("websocket_policy_server", Path(clone, SERVER))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.WebsocketPolicyServer(OneAtATime(), "127.0.0.1", port, {}).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
