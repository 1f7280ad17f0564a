"""A robot policy in PyTorch, batched at denoise steps: a template for your own (docs/policies.md).

`reflex serve python:pytorch_policy:make` in this directory serves it. The weights are random.
"""

try:
    import torch
    from torch import Tensor, nn
except ImportError:
    raise SystemExit("this example needs PyTorch: in a clone, pip install '.[torch]'") from None

from reflex_runtime.robots import DeviceOptions, PolicySpec, WordTokenizer, load_policy
from reflex_runtime.robots.sources.torch_models import Tensors, TorchStaged

WORDS = {word: i for i, word in enumerate(["open", "close", "the", "drawer", "door"], start=1)}
SPEC = PolicySpec(
    model_id="tiny-vla", staged=True, num_denoising_steps=10, chunk_size=16, action_dim=7,
    images={"image": (32, 32)}, takes_state=True, state_dim=8,
    takes_text=True, tokenizer=WordTokenizer(WORDS), max_tokens=6,
)  # fmt: skip


class TinyVLA(nn.Module):  # type: ignore[misc]
    """Reads a picture and an instruction once, then moves actions from noise to where they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, 64, kernel_size=8, stride=8), nn.Embedding(len(WORDS) + 1, 64)
        self.scene = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.state, self.time, self.x = (nn.Linear(size, 64) for size in (8, 1, 7))
        self.look = nn.MultiheadAttention(64, 4, batch_first=True)
        self.velocity = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 7))

    def prefix(self, inputs: Tensors) -> dict[str, Tensor]:
        """What every step needs of the scene, for each of n requests: tensors [n, …]."""
        picture = inputs["image"].permute(0, 3, 1, 2).to(self.x.weight.dtype) / 255.0
        seen = self.patches(picture).flatten(2).transpose(1, 2)
        return {"scene": self.scene(torch.cat([seen, self.words(inputs["tokens"])], dim=1))}

    def step(self, prefix: Tensors, x: Tensor, k: Tensor, n: int) -> Tensor:
        """x [rows, chunk, actions] after one more of n steps; row i has made k[i] of them."""
        time = self.time((k / n).to(x.dtype).unsqueeze(1))
        actions = self.x(x) + (self.state(prefix["state"]) + time).unsqueeze(1)
        seen, _ = self.look(actions, prefix["scene"], prefix["scene"], need_weights=False)
        return x + self.velocity(actions + seen) / n


def make(device: DeviceOptions) -> TorchStaged:
    """What the server calls, with its --provider, --threads, --dtype, --compile and --cuda-graphs."""
    torch.manual_seed(0)
    return TorchStaged(SPEC, TinyVLA(), device)


if __name__ == "__main__":
    policy = load_policy("python:pytorch_policy:make")
    seen = policy.prepare(images={"image": torch.zeros(32, 32, 3).byte().numpy()}, instruction="open", state=[0.0] * 8)
    (chunk,) = policy.answers([policy.request(seen)])
    print(chunk.actions.shape, "actions, the first of them:", chunk.actions[0].round(2))
