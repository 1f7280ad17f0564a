"""Step 1: draw scenes, train the detector on them. Needs torch; a CPU will do.

Scenes with seeds below TRAINING_SEEDS are for training alone; what is measured and tested has seeds beyond.
"""

from __future__ import annotations

import argparse
import io
import math
import time
from pathlib import Path

import numpy as np
import torch
from model import COLUMNS, HEIGHT, LABELS, ROWS, STRIDE, WIDTH, Grid
from numpy.typing import NDArray
from PIL import Image
from scoring import Truth, truth_of
from torch import Tensor, nn

from reflex_runtime.feeds.sources.shapes import Shapes

TRAINING_SEEDS = 100_000
SIZES = [(320, 240)] * 5 + [(640, 480), (160, 120), (480, 270)]  # cameras; all are brought to the detector's size


def example(seed: int, rng: np.random.Generator) -> tuple[NDArray[np.uint8], list[Truth]]:
    """A picture of a scene at the detector's size, some after a lossy codec, and its boxes in that size's pixels."""
    size = SIZES[rng.integers(len(SIZES))]
    scene = Shapes(seed, size, count=int(rng.integers(1, 6)))
    i = int(rng.integers(1000))
    image = Image.fromarray(scene.picture(i)).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
    if rng.random() < 0.5:
        squeezed = io.BytesIO()
        image.save(squeezed, "JPEG", quality=int(rng.integers(25, 95)))
        image = Image.open(squeezed)
    across, down = WIDTH / size[0], HEIGHT / size[1]
    boxes = [(label, x0 * across, y0 * down, x1 * across, y1 * down) for label, x0, y0, x1, y1 in truth_of(scene, i)]
    return np.asarray(image), boxes


def targets(boxes: list[Truth]) -> NDArray[np.float32]:
    """[8, ROWS, COLUMNS]: heat of each label, centre and log size as in `Grid`, and 1 in cells that hold a centre."""
    target = np.zeros((8, ROWS, COLUMNS), np.float32)
    y, x = np.mgrid[:ROWS, :COLUMNS] + 0.5
    for label, x0, y0, x1, y1 in boxes:
        cx, cy = (x0 + x1) / 2 / STRIDE, (y0 + y1) / 2 / STRIDE
        heat = np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * 0.7**2))
        k, row, column = LABELS.index(label), min(int(cy), ROWS - 1), min(int(cx), COLUMNS - 1)
        heat[row, column] = 1.0
        target[k] = np.maximum(target[k], heat)
        size = (math.log((x1 - x0) / (2 * STRIDE)), math.log((y1 - y0) / (2 * STRIDE)))
        target[3:, row, column] = (cx - column, cy - row, *size, 1.0)
    return target


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    images = np.empty((count, HEIGHT, WIDTH, 3), np.uint8)
    wanted = np.empty((count, 8, ROWS, COLUMNS), np.float32)
    for n, seed in enumerate(rng.permutation(TRAINING_SEEDS)[:count]):
        images[n], boxes = example(int(seed), rng)
        wanted[n] = targets(boxes)
    return torch.from_numpy(images), torch.from_numpy(wanted)


def loss_of(said: Tensor, wanted: Tensor) -> Tensor:
    """Focal loss on the heat (Zhou et al. 2019), distance for centre and size where there is a centre."""
    heat, here = wanted[:, :3], wanted[:, 7:]
    sure = torch.sigmoid(said[:, :3]).clamp(1e-5, 1 - 1e-5)
    peak = (heat == 1.0).float()
    positive = peak * (1 - sure) ** 2 * sure.log()
    negative = (1 - peak) * (1 - heat) ** 4 * sure**2 * (1 - sure).log()
    count = here.sum().clamp(min=1.0)
    boxes = (here * (said[:, 3:] - wanted[:, 3:7]).abs()).sum()
    return (2.0 * boxes - (positive + negative).sum()) / count


def train(grid: Grid, images: Tensor, wanted: Tensor, steps: int, batch: int, rate: float) -> Grid:
    average = torch.optim.swa_utils.AveragedModel(grid, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(grid.parameters(), rate, weight_decay=1e-3)
    began, mean = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        warm, done = min(1.0, step / 100), step / steps
        optimizer.param_groups[0]["lr"] = rate * warm * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * done)))
        at = torch.randint(len(images), (batch,))
        some = images[at][..., torch.randperm(3)]  # any colour may be any other
        loss = loss_of(grid(some), wanted[at])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(grid.parameters(), 5.0)
        optimizer.step()
        average.update_parameters(grid)
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        if step % max(1, steps // 20) == 0:
            print(f"step {step}/{steps} loss {mean:.3f} {time.perf_counter() - began:.0f} s", flush=True)
    trained = average.module.eval()
    assert isinstance(trained, Grid)
    return trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint to write (.pt)")
    parser.add_argument("--pictures", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the pictures and of what is random in training")
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    began = time.perf_counter()
    images, wanted = draw(args.pictures, args.seed)
    print(f"{len(images)} pictures drawn in {time.perf_counter() - began:.0f} s", flush=True)
    grid = Grid()
    if args.start is not None:
        grid.load_state_dict(torch.load(args.start, weights_only=True))
    grid = train(grid, images, wanted, args.steps, args.batch, args.rate)
    print(f"{sum(p.numel() for p in grid.parameters()) / 1e3:.0f} k parameters")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(grid.state_dict(), args.out)


if __name__ == "__main__":
    main()
