"""Statistics of a LeRobot dataset, as LeRobot computes them, in bounded memory.

Per feature: min, max, mean, std, count, and the quantiles q01, q10, q50, q90, q99; those of the dataset are the means
of the episodes', weighted by their counts. A number's quantile is a value that occurs; LeRobot's lies within a 5,000th
of the range of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
KEPT = 10_000  # values of an episode that its quantiles are taken of; beyond, every second, fourth, … value

Statistic = dict[str, NDArray[np.float64]]
"""By name: float64 [dim], pictures [3, 1, 1]; count [1]."""


class ColumnStats:
    """Of a column of numbers, for each element of a row."""

    def __init__(self) -> None:
        self._count = 0
        self._low: NDArray[np.float64] = np.array(np.inf)
        self._high: NDArray[np.float64] = np.array(-np.inf)
        self._mean: NDArray[np.float64] = np.array(0.0)
        self._squares: NDArray[np.float64] = np.array(0.0)  # sum of squared distances from the mean
        self._sample: list[NDArray[np.float64]] = []
        self._kept, self._stride = 0, 1

    def add(self, values: NDArray[np.generic]) -> None:
        """values: [rows] or [rows, dim], at least one row."""
        wide = values.reshape(len(values), -1).astype(np.float64)
        mean, total = wide.mean(axis=0), self._count + len(wide)
        apart = mean - self._mean
        self._low = np.minimum(self._low, wide.min(axis=0))
        self._high = np.maximum(self._high, wide.max(axis=0))
        self._squares = self._squares + ((wide - mean) ** 2).sum(axis=0)
        self._squares = self._squares + apart**2 * (self._count * len(wide) / total)
        self._mean = self._mean + apart * (len(wide) / total)
        self._remember(wide)
        self._count = total

    def _remember(self, wide: NDArray[np.float64]) -> None:
        """Keep every stride-th value; when there are too many, every second of those."""
        kept = wide[-self._count % self._stride :: self._stride]
        self._sample.append(kept)
        self._kept += len(kept)
        while self._kept > KEPT:
            self._sample = [np.concatenate(self._sample)[::2]]
            self._kept, self._stride = len(self._sample[0]), 2 * self._stride

    def result(self) -> Statistic:
        """Of at least one row."""
        found = {"min": self._low, "max": self._high, "mean": self._mean, "std": np.sqrt(self._squares / self._count)}
        found["count"] = np.array([self._count], np.float64)
        sample = np.concatenate(self._sample)
        for name, share in QUANTILES.items():
            found[name] = np.quantile(sample, share, axis=0, method="inverted_cdf")
        return found


class PictureStats:
    """Of pictures, per channel, in [0, 1]: from a sample of them, and of large ones a part of the pixels."""

    def __init__(self) -> None:
        self._pictures = 0
        self._levels = np.zeros((3, 256), np.int64)

    def add(self, picture: NDArray[np.uint8]) -> None:
        """picture: uint8 [height, width, 3]."""
        step = picture_step(*picture.shape[:2])
        for channel in range(3):
            pixels = picture[::step, ::step, channel].reshape(-1)
            self._levels[channel] += np.bincount(pixels, minlength=256)
        self._pictures += 1

    def result(self) -> Statistic | None:
        """None without a picture."""
        if not self._pictures:
            return None
        level, n = np.arange(256) / 255.0, self._levels[0].sum()
        up_to = self._levels.cumsum(axis=1)
        mean = self._levels @ level / n
        found = {
            "min": level[(up_to > 0).argmax(axis=1)],
            "max": level[(up_to >= n).argmax(axis=1)],
            "mean": mean,
            "std": np.sqrt((self._levels * (level - mean[:, None]) ** 2).sum(axis=1) / n),
        }
        found |= {name: level[(up_to >= share * n).argmax(axis=1)] for name, share in QUANTILES.items()}
        shaped = {name: value.reshape(3, 1, 1) for name, value in found.items()}
        return {**shaped, "count": np.array([self._pictures], np.float64)}


def picture_step(height: int, width: int) -> int:
    """Of a picture of 300 and more on a side, the pixels that count: every such one."""
    if max(height, width) < 300:
        return 1
    return int(width / 150) if width > height else int(height / 150)


def sampled(frames: int) -> set[int]:
    """Which of an episode's frames its pictures' statistics are taken of: at most 10,000, at least 100 where there are
    so many."""
    least = min(100, frames)
    n = max(least, min(int(frames**0.75), 10_000))
    return set(np.round(np.linspace(0, frames - 1, n)).astype(int).tolist()) if frames else set()


class StatsSum:
    """Statistics of several episodes together."""

    def __init__(self) -> None:
        self._sums: dict[str, Statistic] = {}

    def add(self, episode: Mapping[str, Statistic]) -> None:
        for feature, stats in episode.items():
            self._sums[feature] = _together(self._sums[feature], stats) if feature in self._sums else stats

    def result(self) -> dict[str, Statistic]:
        return self._sums


def _together(a: Statistic, b: Statistic) -> Statistic:
    n, m = float(a["count"][0]), float(b["count"][0])
    share = m / (n + m)
    mean = a["mean"] + (b["mean"] - a["mean"]) * share
    squares = [s["std"] ** 2 + (s["mean"] - mean) ** 2 for s in (a, b)]
    return {
        "min": np.minimum(a["min"], b["min"]),
        "max": np.maximum(a["max"], b["max"]),
        "mean": mean,
        "std": np.sqrt(squares[0] * (1 - share) + squares[1] * share),
        "count": a["count"] + b["count"],
        **{name: a[name] + (b[name] - a[name]) * share for name in QUANTILES},
    }


def plain_stats(stats: Mapping[str, Statistic]) -> dict[str, dict[str, list[float]]]:
    """JSON-safe; counts are whole numbers."""
    return {
        feature: {name: [int(v) for v in value] if name == "count" else value.tolist() for name, value in found.items()}
        for feature, found in stats.items()
    }
