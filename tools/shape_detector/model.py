"""The network: small squares of pixels, then messages passed between the rows and columns of a coarse grid.

The picture becomes a grid of cells, one per 16 × 16 pixels. A cell says how likely the centre of a circle, a square or
a triangle lies in it, where in the cell, and how large its box is (Zhou et al. 2019, "Objects as Points"). What a cell
must know about its surroundings arrives in messages that sweep down, up, right and left (Pan et al. 2018, "Spatial As
Deep"). A sweep is many small products one after the other, and a picture more in each costs little: as in large models,
company in a batch pays.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LABELS = ("circle", "square", "triangle")
WIDTH, HEIGHT = 320, 240  # pixels of the input
STRIDE = 16
COLUMNS, ROWS = WIDTH // STRIDE, HEIGHT // STRIDE
CELLS = COLUMNS * ROWS
CHANNELS = 32
MESSAGE = 16  # channels of what a cell tells its neighbour
PATCH = 8  # pixels are first read in squares of this side
ROUNDS = 3  # of four sweeps each
BOXES = 12  # found per picture, at most

# Sizes are constants and the batch axis is -1 in every reshape: the exported graph then computes no shapes.


class Sweep(nn.Module):
    """One message along axis 0 of [steps, cells, MESSAGE]: each row of cells adds what the row before it tells."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        self.backwards = backwards
        self.tell = nn.Linear(MESSAGE, MESSAGE)
        nn.init.normal_(self.tell.weight, std=0.3 * MESSAGE**-0.5)
        nn.init.zeros_(self.tell.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = list(x.unbind(0))
        if self.backwards:
            rows.reverse()
        for i in range(1, len(rows)):
            rows[i] = rows[i] + torch.relu(self.tell(rows[i - 1]))
        if self.backwards:
            rows.reverse()
        return torch.stack(rows)


class Round(nn.Module):
    """Down, up, right, left, then a look at the neighbours. x: [batch, CHANNELS, ROWS, COLUMNS], and so the result."""

    def __init__(self) -> None:
        super().__init__()
        self.ask = nn.Conv2d(CHANNELS, MESSAGE, 1)
        self.vertical = nn.Sequential(Sweep(False), Sweep(True))
        self.horizontal = nn.Sequential(Sweep(False), Sweep(True))
        self.look = nn.Sequential(nn.ReLU(), nn.Conv2d(MESSAGE, CHANNELS, 3, 1, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        told = self.vertical(self.ask(x).permute(2, 3, 0, 1).reshape(ROWS, -1, MESSAGE))
        told = told.reshape(ROWS, COLUMNS, -1, MESSAGE).transpose(0, 1).reshape(COLUMNS, -1, MESSAGE)
        told = self.horizontal(told).reshape(COLUMNS, ROWS, -1, MESSAGE).permute(2, 3, 1, 0)
        seen: Tensor = self.look(told)
        return x + seen


class Grid(nn.Module):
    """uint8 [batch, HEIGHT, WIDTH, 3] → [batch, 7, ROWS, COLUMNS]: 3 logits, 2 of the centre, 2 of the size.

    Logits: whether a centre is here. Centre: x and y in the cell, 0 … 1. Size: log of width
    and of height over 2 · STRIDE.
    """

    def __init__(self) -> None:
        super().__init__()
        self.glance = nn.Linear(PATCH * PATCH * 3, CHANNELS)
        self.see = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1),
            nn.ReLU(),
        )
        self.rounds = nn.Sequential(*[Round() for _ in range(ROUNDS)])
        self.say = nn.Conv2d(CHANNELS, 7, 1)
        nn.init.constant_(self.say.bias[:3], -4.0)  # almost nowhere is a centre

    def forward(self, image: Tensor) -> Tensor:
        patches = image.reshape(-1, HEIGHT // PATCH, PATCH, WIDTH // PATCH, PATCH * 3).transpose(2, 3)
        flat = patches.reshape(-1, PATCH * PATCH * 3).float()  # bytes were moved, not floats: four times fewer
        seen = nn.functional.linear(flat, self.glance.weight / 255.0, self.glance.bias)
        seen = seen.reshape(-1, HEIGHT // PATCH, WIDTH // PATCH, CHANNELS).permute(0, 3, 1, 2)
        said: Tensor = self.say(self.rounds(self.see(seen)))
        return said


class Detector(nn.Module):
    """The grid and its reading: boxes [batch, BOXES, 4] in pixels (x0, y0, x1, y1), scores and labels [batch, BOXES].

    A cell counts when none of its eight neighbours is surer than it. Best first; what is below a score that the caller
    chooses is to be ignored.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        said = self.grid(image)
        sure, label = torch.sigmoid(said[:, :3]).max(1, keepdim=True)  # [batch, 1, ROWS, COLUMNS]
        surest = nn.functional.max_pool2d(sure, 3, 1, 1)
        peaks = torch.where(sure == surest, sure, torch.zeros_like(sure)).reshape(-1, CELLS)
        scores, cell = peaks.topk(BOXES, 1)
        labels = label.reshape(-1, CELLS).gather(1, cell)
        where = said[:, 3:].reshape(-1, 4, CELLS).gather(2, cell[:, None].expand(-1, 4, -1))
        corner = torch.stack([cell % COLUMNS, cell // COLUMNS], 1).float()
        centre = (corner + where[:, :2]) * STRIDE
        half = torch.exp(where[:, 2:]) * STRIDE
        boxes = torch.cat([centre - half, centre + half], 1).transpose(1, 2)
        return boxes, scores, labels
