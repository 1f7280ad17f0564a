"""`openpi:DIR` with weights: answers are compared with LeRobot's model, called as openpi calls its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lerobot.policies.factory", exc_type=ImportError)

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config
from safetensors.torch import save_model
from tiny_checkpoints import OLD
from tiny_pi import shrink

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import DeviceOptions, load_policy
from reflex_runtime.robots.analysis.doctor import examine
from reflex_runtime.robots.policy.observation import noise_of
from robots.sources.openpi_files import Processor, write

pytestmark = [
    pytest.mark.filterwarnings("default"),  # LeRobot's and its dependencies' are not ours
    pytest.mark.skipif(OLD, reason="LeRobot 0.4 has no π0 without a patched transformers"),
]
BOUND = 1e-5
IMAGES = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@pytest.fixture(autouse=True)
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=Processor))
    torch.set_num_threads(1)


def made(root: Path, config: str) -> tuple[Path, Any]:
    """A checkpoint with small random weights under openpi's names, and the model that has them."""
    shrink()
    torch.manual_seed(1)
    kind = config.partition("_")[0]
    feature = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, 224, 224)) for name in IMAGES}
    feature["observation.state"] = PolicyFeature(FeatureType.STATE, (8,))
    policy = get_policy_class(kind)(
        make_policy_config(
            kind, input_features=feature, output_features={"action": PolicyFeature(FeatureType.ACTION, (8,))},
            chunk_size=12, n_action_steps=12, dtype="float32", device="cpu", push_to_hub=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, weights in policy.named_parameters():
            if weights.ndim <= 1:
                weights.add_(torch.randn(weights.shape) * 0.1)
            else:
                weights.copy_(torch.randn(weights.shape) * (0.5 if "norm" in name else 1.0) / weights[0].numel() ** 0.5)
    save_model(policy.model.eval(), str(write(root, config) / "model.safetensors"))
    return root, policy.model


def theirs(model: Any, seen: Any, spec: Any) -> Any:
    """x of openpi's `sample_actions`: its time is added up in float32."""
    images = [torch.from_numpy(seen.images[n].astype(np.float32)).permute(2, 0, 1)[None] / 255 * 2 - 1 for n in IMAGES]
    masks = [torch.tensor([seen.present[name]]) for name in IMAGES]
    tokens, token_mask = torch.from_numpy(seen.tokens)[None], torch.from_numpy(seen.token_mask)[None]
    x = torch.from_numpy(noise_of(seen.seed, spec.chunk_size, 32))[None]
    state = []
    if spec.model_type == "pi0":
        state = [torch.from_numpy(np.pad(seen.state, (0, 32 - len(seen.state))))[None]]
    with torch.no_grad():
        embedded, pad, attention = model.embed_prefix(images, masks, tokens, token_mask)
        module = sys.modules[type(model).__module__]
        both = module.prepare_attention_masks_4d(module.make_att_2d_masks(pad, attention))
        model.paligemma_with_expert.paligemma.model.language_model.config._attn_implementation = "eager"
        _, cache = model.paligemma_with_expert.forward(
            attention_mask=both, position_ids=torch.cumsum(pad, dim=1) - 1, past_key_values=None,
            inputs_embeds=[embedded, None], use_cache=True,
        )  # fmt: skip
        time, dt = torch.tensor(1.0), torch.tensor(-0.1)
        while time >= -dt / 2:
            order = {"prefix_pad_masks": pad, "past_key_values": cache, "x_t": x, "timestep": time[None]}
            x = x + dt * model.denoise_step(*state, **order)
            time = time + dt
    return x.numpy()


@pytest.mark.parametrize("config", ["pi0_droid", "pi0_libero", "pi05_libero", "pi05_droid", "pi05_aloha"])
def test_p43_answers_are_those_of_openpis_loop(config: str, tmp_path: Path) -> None:
    root, model = made(tmp_path / "checkpoint", config)
    policy = load_policy(f"openpi:{root}", device=DeviceOptions(dtype="float32"))
    requests = []
    for i in range(4):
        rng = np.random.default_rng(i)
        shown = IMAGES[: 3 if "aloha" in config and i % 2 else 2]
        requests.append(policy.request(policy.prepare(
            images={name: rng.integers(0, 256, (60, 80, 3), np.uint8) for name in shown},
            state=rng.uniform(-0.5, 0.5, policy.spec.state_dim), request_id=f"{i}",
            instruction=("open the drawer", "wipe", "put the red block into the bowl", "pick")[i],
        )))  # fmt: skip
    wanted = [policy.model.finish([r.payload], theirs(model, r.payload, policy.spec))[0] for r in requests]
    assert np.abs(wanted[0] - wanted[1]).max() > 0.05
    together = policy.answers(requests, [0, 0, 1, 3])
    for request, chunk, want in zip(requests, together, wanted, strict=True):
        assert np.abs(chunk.actions - want).max() <= BOUND
        (alone,) = policy.answers([request])
        assert np.abs(alone.actions - want).max() <= BOUND


def test_p43_it_computes_in_bfloat16_unless_asked_and_the_doctor_finds_it_fit(tmp_path: Path) -> None:
    root, _ = made(tmp_path / "checkpoint", "pi05_droid")
    assert load_policy(f"openpi:{root}").model.half
    assert not load_policy(f"openpi:{root}", device=DeviceOptions(dtype="float32")).model.half
    found = examine(f"openpi:{root}", "CPUExecutionProvider", 1)
    assert [check.id for check in found.checks if check.status == "fail"] == []


def test_p44_weights_of_another_size_and_types_it_has_not_are_one_line(tmp_path: Path) -> None:
    root, _ = made(tmp_path / "checkpoint", "pi0_droid")
    with pytest.raises(ConfigError, match="--dtype=float16: checkpoints of openpi run in bfloat16"):
        load_policy(f"openpi:{root}", device=DeviceOptions(dtype="float16"))
    (root / "config.json").write_text('{"action_dim": 24, "action_horizon": 12}')
    with pytest.raises(ConfigError, match=r"the weights .* have the shape"):
        load_policy(f"openpi:{root}")
