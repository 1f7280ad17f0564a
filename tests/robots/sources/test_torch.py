"""Models in PyTorch, by the bundled template: rows join between steps, prefixes stay on the device."""

from __future__ import annotations

import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

torch = pytest.importorskip("torch")

from reflex_runtime.core.errors import ConfigError, ProcessorError  # noqa: E402
from reflex_runtime.core.request import Request  # noqa: E402
from reflex_runtime.robots import (  # noqa: E402
    DecomposedPolicy,
    DeviceOptions,
    MonolithicPolicy,
    Policy,
    PolicySpec,
    WordTokenizer,
    load_policy,
)
from reflex_runtime.robots.policy.episodes import PrefixTensors  # noqa: E402
from reflex_runtime.robots.sources.load import read_source  # noqa: E402
from reflex_runtime.robots.sources.torch_models import TorchStaged, TorchWhole, to_host, weights_of  # noqa: E402
from reflex_runtime.robots.versions.slots import device_of, load  # noqa: E402
from reflex_runtime.run.onnx_session import CUDA  # noqa: E402
from reflex_runtime.settings import ServeConfig  # noqa: E402
from serving.harness import Server  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SOURCE = "python:pytorch_policy:make"
BOUND = 1e-5


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The bundled template as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    import pytorch_policy

    yield pytorch_policy
    torch.set_num_threads(threads)
    sys.modules.pop("pytorch_policy", None)


def asked(policy: Policy, number: int, **fields: Any) -> Request:
    rng = np.random.Generator(np.random.PCG64(number))
    told = {
        "images": {"image": rng.integers(0, 256, (40, 30, 3), np.uint8)},
        "instruction": ["open the drawer", "close the door"][number % 2],
        "state": rng.uniform(-1.0, 1.0, 8).tolist(),
        "request_id": f"request-{number}",
        **fields,
    }
    return policy.request(policy.prepare(**told), client=number)


def staged() -> DecomposedPolicy:
    policy = load_policy(SOURCE)
    assert isinstance(policy, DecomposedPolicy)
    return policy


def served(config: ServeConfig) -> Policy:
    """The policy as a server with these settings loads it."""
    return load(config, "prod", read_source(SOURCE, device_of(config)))


def picture(number: int) -> str:
    """A PNG of noise, as requests have it."""
    pixels = np.random.Generator(np.random.PCG64(number)).integers(0, 256, (32, 32, 3), np.uint8)
    file = BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


class Whole(torch.nn.Module):  # type: ignore[misc]
    """The template's policy as one call for a whole chunk."""

    def __init__(self, vla: Any) -> None:
        super().__init__()
        self.vla = vla

    def forward(self, inputs: Any, noise: Any) -> Any:
        prefix, x = self.vla.prefix(inputs) | {"state": inputs["state"]}, noise
        for step in range(10):
            x = self.vla.step(prefix, x, torch.full((len(x),), step), 10)
        return x


def whole(template: Any) -> MonolithicPolicy:
    torch.manual_seed(0)
    return MonolithicPolicy(TorchWhole(replace(template.SPEC, staged=False), Whole(template.TinyVLA())))


def test_p1_rows_that_join_between_steps_answer_as_the_whole_chunk(template: Any) -> None:
    """Eight requests, two more at every step; each answer is that of one call for its whole chunk alone."""
    policy, reference = staged(), whole(template)
    chunks = policy.answers([asked(policy, i) for i in range(8)], [i // 2 for i in range(8)])
    alone = [reference.answers([asked(reference, i)])[0] for i in range(8)]
    assert max(np.abs(a.actions - b.actions).max() for a, b in zip(chunks, alone, strict=True)) <= BOUND
    assert all(chunk.actions.shape == (16, 7) for chunk in chunks)
    assert np.abs(chunks[0].actions - chunks[2].actions).max() > 0.1  # they are different requests


def test_p53_in_calls_of_one_size_company_does_not_change_a_bit(template: Any) -> None:
    for source in ("staged", "whole"):
        loose = staged() if source == "staged" else whole(template)
        policy = type(loose)(loose.model, "prod", rows=8)  # type: ignore[arg-type]
        requests = [asked(policy, i) for i in range(8)]
        alone = [policy.answers([request])[0].actions.tobytes() for request in requests]
        for starts in ([0] * 8, [i % 3 for i in range(8)]):
            assert [chunk.actions.tobytes() for chunk in policy.answers(requests, starts)] == alone
    assert served(ServeConfig(deterministic=5)).rows == 5


def test_p1_robots_of_a_real_server_get_the_answer_of_the_whole_chunk(template: Any) -> None:
    """Sixteen at once: some wait, and join others between their steps, as the server's own scheduler decides."""
    reference = whole(template)
    inside = f"import os, sys; os.chdir({str(EXAMPLES)!r})"
    rng = np.random.Generator(np.random.PCG64(7))
    states = rng.uniform(-1.0, 1.0, (16, 8)).tolist()
    asks = [
        {"image": picture(i), "instruction": "open the drawer", "state": state, "request_id": f"r{i}"}
        for i, state in enumerate(states)
    ]
    shared = "--max-batch-size", "5", "--max-batch-cost-ms", "5000", "--inject-latency-ms", "20"
    with Server(SOURCE, *shared, before=inside) as server:
        answers = server.at_once(asks)
    assert [answer.status for answer in answers] == [200] * 16
    assert 2 <= max(answer.json["batch"]["size"] for answer in answers) <= 5
    for i, answer in enumerate(answers):
        seen = reference.prepare(
            images={"image": b64decode(picture(i))}, instruction="open the drawer", state=states[i], request_id=f"r{i}"
        )
        (chunk,) = reference.answers([reference.request(seen)])
        assert np.abs(np.float32(answer.json["actions"]) - chunk.actions).max() <= BOUND


@pytest.mark.parametrize("kind", ["staged", "whole"])
def test_p1_a_batch_answers_as_its_members_alone(template: Any, kind: str) -> None:
    policy: Policy = staged() if kind == "staged" else whole(template)
    together = policy.answers([asked(policy, i) for i in range(8)])
    alone = [policy.answers([asked(policy, i)])[0] for i in range(8)]
    assert max(np.abs(a.actions - b.actions).max() for a, b in zip(together, alone, strict=True)) <= BOUND


def test_p2_rows_are_packed_once_while_the_same_requests_step(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = staged()
    packed: list[int] = []
    pack = policy.model.pack
    monkeypatch.setattr(policy.model, "pack", lambda p, rows: (packed.append(len(rows)), pack(p, rows))[1])
    policy.answers([asked(policy, i) for i in range(4)])
    assert packed == [4]
    packed.clear()
    policy.answers([asked(policy, i) for i in range(4)], [0, 0, 0, 3])  # one joins after three steps
    assert packed == [3, 4, 1]


def test_p2_a_prefix_stays_a_tensor_and_is_counted_in_the_cache() -> None:
    policy = staged()
    policy.answers([asked(policy, i, episode_id=f"e{i}") for i in range(2)])
    assert policy.cache is not None
    scene = 4 * 64 * (16 + 6)  # float32 [patches and words, 64]
    assert policy.cache.snapshot()["bytes"] == 2 * (scene + 1024)
    again = asked(policy, 0, episode_id="e0")
    prefix = again.payload.prefix
    assert isinstance(prefix, PrefixTensors)
    assert prefix.tensors["scene"].shape == (1, 22, 64)
    assert prefix.tensors["scene"].untyped_storage().nbytes() == scene  # and no neighbour's memory


def test_p2_a_cached_prefix_answers_as_a_new_one() -> None:
    policy = staged()
    (first,) = policy.answers([asked(policy, 0, episode_id="e")])
    (second,) = policy.answers([asked(policy, 0, episode_id="e")])
    assert (first.cache, second.cache) == ("miss", "hit")
    assert first.actions.tobytes() == second.actions.tobytes()


def test_p2_a_prefix_of_other_rows_is_refused(template: Any) -> None:
    module = template.TinyVLA()
    policy = DecomposedPolicy(TorchStaged(template.SPEC, module))
    prefix = module.prefix
    module.prefix = lambda inputs: {name: torch.cat([made, made]) for name, made in prefix(inputs).items()}
    with pytest.raises(ProcessorError, match=r"the prefix 'scene' has the shape \[4, 22, 64\], expected 2 rows"):
        policy.answers([asked(policy, 0), asked(policy, 1)])


def test_p2_neither_gradients_nor_training_mode(template: Any) -> None:
    module = template.TinyVLA()
    module.train()
    TorchStaged(template.SPEC, module)
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_p3_dtype_is_the_type_of_the_weights(template: Any) -> None:
    half, full = served(ServeConfig(dtype="bfloat16")), load_policy(SOURCE)
    assert (half.model.half, full.model.half) == (True, False)
    assert {p.dtype for p in half.model._placed.module.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    (low,), (high,) = half.answers([asked(half, 0)]), full.answers([asked(full, 0)])
    assert low.actions.dtype == np.float32
    assert 1e-4 < np.abs(low.actions - high.actions).max() < 0.1


def test_p3_compile_compiles_the_step_and_threads_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: (compiled.append((call, options)), call)[1])
    policy = served(ServeConfig(threads=3, compile=True))
    ((call, options),) = compiled
    assert call.__name__ == "step"
    assert options == {"dynamic": True}
    assert torch.get_num_threads() == 3
    policy.answers([asked(policy, 0)])


def test_p3_devices_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match="PyTorch sees no GPU here; check nvidia-smi"):
        load_policy(SOURCE, device=DeviceOptions(provider=CUDA))
    with pytest.raises(ConfigError, match="--provider=OpenVINO: PyTorch policies run on cpu or cuda"):
        load_policy(SOURCE, device=DeviceOptions(provider="OpenVINO"))


def test_p3_the_hash_is_of_the_weights(template: Any) -> None:
    torch.manual_seed(0)
    one, same = weights_of(template.TinyVLA()), load_policy(SOURCE).spec
    assert (same.model_hash, same.model_bytes) == one
    torch.manual_seed(1)
    assert weights_of(template.TinyVLA())[0] != one[0]


def test_p20_a_module_gets_masks_history_and_the_mask_of_tokens() -> None:
    """Two observations of two cameras, one of which may be missing."""
    seen: list[dict[str, Any]] = []

    def module(inputs: Any, noise: Any) -> torch.Tensor:
        seen.append({name: (tuple(value.shape), value.dtype) for name, value in inputs.items()})
        mask = inputs["image_masks"].float().mean((1, 2)).reshape(-1, 1, 1)
        return mask.expand(-1, 3, 2)

    spec = PolicySpec(
        model_id="masks", staged=False, action_dim=2, chunk_size=3, takes_noise=False, model_hash="0" * 16,
        images={"front": (4, 6), "wrist": (4, 6)}, optional_images=frozenset({"wrist"}), observation_steps=2,
        takes_text=True, tokenizer=WordTokenizer({"go": 1}), max_tokens=4,
    )  # fmt: skip
    policy = MonolithicPolicy(TorchWhole(spec, module, DeviceOptions()))
    pictures = {"front": np.zeros((4, 6, 3), np.uint8)}
    (chunk,) = policy.answers([policy.request(policy.prepare(images=pictures, instruction="go"))])
    assert (chunk.actions == 0.5).all()
    assert seen[0] == {
        "front": ((1, 2, 4, 6, 3), torch.uint8),
        "wrist": ((1, 2, 4, 6, 3), torch.uint8),
        "image_masks": ((1, 2, 2), torch.bool),
        "tokens": ((1, 4), torch.int64),
        "token_mask": ((1, 4), torch.bool),
    }


@pytest.mark.parametrize(
    ("answer", "told"),
    [(None, "NoneType"), ([1.0], "list"), (torch.zeros(1, dtype=torch.complex64), "torch.complex64")],
)
def test_what_is_no_tensor_of_numbers_is_no_answer(answer: Any, told: str) -> None:
    """A complex one would lose its imaginary part."""
    with pytest.raises(ProcessorError, match=f"the module answered {told} where a tensor of numbers is expected"):
        to_host(answer)
    assert to_host(torch.arange(3)).tolist() == [0.0, 1.0, 2.0]
