"""Step 2: train the policy on recorded demonstrations. Needs torch and numpy alone; runs on a CPU or a GPU.

Reads no clock to decide anything: the same files, arguments and machine give the same weights on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from pathlib import Path

import numpy as np
import torch
from model import ACTION_DIM, CHUNK, STATE_DIM, Expert, Prefix
from numpy.typing import NDArray
from torch import Tensor, nn

NOISES_PER_PICTURE = 2  # half the work is the prefix: use each one for several noises and flow times


class Demonstrations:
    """All recorded steps on one device. A sample is one step with the expert's next CHUNK actions."""

    def __init__(self, files: list[Path], device: torch.device) -> None:
        parts = [np.load(f) for f in files]
        state, action = (np.concatenate([p[k] for p in parts]) for k in ("state", "action"))
        starts = np.cumsum([0, *(len(p["task"]) for p in parts)])
        ends = np.concatenate([_last_of_episode(p) + start for p, start in zip(parts, starts, strict=False)])
        self.norm = {
            "state": (state.mean(0), state.std(0) + 1e-3),
            "action": (action.mean(0), action.std(0) + 1e-3),
        }
        normal = {k: (v - self.norm[k][0]) / self.norm[k][1] for k, v in (("state", state), ("action", action))}
        self.state = torch.from_numpy(normal["state"].astype(np.float32)).to(device)
        self.action = torch.from_numpy(normal["action"].astype(np.float32)).to(device)
        self.image = torch.from_numpy(np.concatenate([p["image"] for p in parts])).to(device)
        self.task = torch.from_numpy(np.concatenate([p["task"] for p in parts]).astype(np.int64)).to(device)
        self.tokens = torch.from_numpy(parts[0]["tokens"]).to(device)  # [tasks, MAX_TOKENS]
        self.end = torch.from_numpy(ends).to(device)
        self.ahead = torch.arange(CHUNK, device=device)

    def __len__(self) -> int:
        return len(self.task)

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Image, task, state, and actions [count, CHUNK, ACTION_DIM]; past an episode's end its last action repeats."""
        at = torch.randint(len(self), (count,), device=self.task.device)
        following = torch.minimum(at[:, None] + self.ahead, self.end[at][:, None])
        return self.image[at], self.task[at], self.state[at], self.action[following]


def _last_of_episode(part: np.lib.npyio.NpzFile) -> NDArray[np.int64]:
    episode = part["episode"]
    last = np.append(np.flatnonzero(np.diff(episode)), len(episode) - 1)
    return last[np.searchsorted(last, np.arange(len(episode)))]


def train(data: Demonstrations, steps: int, batch: int, rate: float) -> tuple[Prefix, Expert]:
    """Flow matching: learn the straight-line velocity from noise to the expert's actions. Returns averaged weights."""
    device = data.state.device
    prefix, expert = Prefix(words=int(data.tokens.max())).to(device), Expert().to(device)
    both = nn.ModuleList([prefix, expert])
    average = copy.deepcopy(both).requires_grad_(False)
    optimizer = torch.optim.AdamW(both.parameters(), rate, weight_decay=1e-3)
    began, mean_loss = time.perf_counter(), torch.zeros((), device=device)
    for step in range(1, steps + 1):
        warm, done = min(1.0, step / 200), step / steps
        optimizer.param_groups[0]["lr"] = rate * warm * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * done)))
        image, task, state, action = data.sample(batch)
        past_kv = prefix(image, data.tokens[task])
        past_kv, state, action = (v.repeat_interleave(NOISES_PER_PICTURE, 0) for v in (past_kv, state, action))
        noise = torch.randn_like(action)
        at = torch.rand(len(action), device=device) ** 1.3  # early times a little more often: they decide where it goes
        mixed = torch.lerp(noise, action, at[:, None, None])
        loss = (expert(mixed, at, state, past_kv) - (action - noise)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        keep = min(0.999, step / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(both.parameters()), 1.0 - keep)
            mean_loss.lerp_(loss, 0.01 if step > 100 else 1.0 / step)
        if step % max(1, steps // 20) == 0:
            print(f"step {step}/{steps} loss {mean_loss.item():.4f} {time.perf_counter() - began:.0f} s", flush=True)
    first, second = average.eval()
    assert isinstance(first, Prefix)
    assert isinstance(second, Expert)
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+", help="files of record.py")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint to write (.pt)")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    data = Demonstrations(args.data, torch.device(args.device))
    assert data.state.shape[1] == STATE_DIM
    assert data.action.shape[1] == ACTION_DIM
    print(f"{len(data)} steps on {args.device}", flush=True)
    prefix, expert = train(data, args.steps, args.batch, args.rate)
    parameters = sum(p.numel() for m in (prefix, expert) for p in m.parameters())
    print(f"{parameters / 1e6:.2f} M parameters")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    norm = {k: {"mean": mean.tolist(), "std": std.tolist()} for k, (mean, std) in data.norm.items()}
    torch.save({"prefix": prefix.cpu().state_dict(), "expert": expert.cpu().state_dict(), "norm": norm}, args.out)


if __name__ == "__main__":
    main()
