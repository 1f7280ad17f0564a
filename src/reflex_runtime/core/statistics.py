"""Estimates: percentiles, arrival rates, and the robust fit of how long a batch takes.

Guards, reports and the simulator share one definition of a percentile.

The time of a batch is a robust affine fit per executable. (Time ÷ size would confuse size with cost.)

    T(batch) = a + Σ_k b_k · n_k        a ≥ 0 (fixed), b_k ≥ b_min (marginal, per cost class k)

Exponentially decayed least squares with relative errors, Huber weights, and a ridge towards a slowly moving anchor, so
that directions that the load does not vary cannot drift. A two-sided CUSUM drops the past when the device changes:
without it 31 % fewer answers are on time on a device that becomes three times as slow. At most five unknowns.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from math import ceil, exp, inf, log
from statistics import median

_ROUNDING = 1e-9  # 0.07 · 100 is a little more than 7 in binary: still the seventh value


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of the values do not exceed.

    ordered: ascending, at least one; IndexError without any. share: in (0, 1], 0.99 for p99.
    """
    return ordered[max(1, ceil(share * len(ordered) - _ROUNDING)) - 1]


class RecentValues:
    """The latest values, at most `most` of them, and the same in ascending order."""

    __slots__ = ("_latest", "_most", "ordered")

    def __init__(self, most: int) -> None:
        self._most = most
        self._latest: list[float] = []  # a deque would take half a kilobyte for each client
        self.ordered: list[float] = []

    @property
    def spread(self) -> float:
        """Interquartile range; inf without values."""
        ordered, n = self.ordered, len(self.ordered)
        return ordered[3 * n // 4] - ordered[n // 4] if n else inf

    def add(self, value: float) -> None:
        if len(self._latest) == self._most:
            del self.ordered[bisect_left(self.ordered, self._latest.pop(0))]
        self._latest.append(value)
        insort(self.ordered, value)


# -- arrival rates -----------------------------------------------------------------------------------------------------


class Rate:
    """Arrivals per second, over a time constant in seconds. last: when the last one came; 0.0 before the first."""

    __slots__ = ("_count", "_since", "_tau", "last")

    def __init__(self, tau: float = 0.5) -> None:
        self._tau = tau
        self._count = self.last = 0.0
        self._since: float | None = None

    def arrive(self, now: float) -> None:
        if self._since is None:
            self._since = self.last = now
        if now > self.last:  # many come at one time
            self._count *= exp((self.last - now) / self._tau)
            self.last = now
        self._count += 1.0

    def falls_to(self, rate: float) -> float:
        """The time at which it falls to `rate` (> 0) without further arrivals; -inf if it is not above."""
        above = self._count / (self._tau * rate)
        return -inf if above <= 0.0 else self.last + self._tau * log(above)

    def value(self, now: float) -> float:
        """The present rate."""
        if self._since is None:
            return 0.0
        count = self._count * exp((self.last - now) / self._tau)
        return count / max(self._tau * (1.0 - exp((self._since - now) / self._tau)), 0.001)


# -- how long a batch takes --------------------------------------------------------------------------------------------


MAX_CLASSES = 4
DEFAULT_COST = 0.050  # seconds per request before anything was measured

_FORGET, _RIDGE, _HUBER = 0.98, 0.02, 2.0
_CUSUM_SLACK, _CUSUM_ALARM = 0.75, 6.0
_CLAMP_UP, _CLAMP_DOWN = 2.5, 4.0  # most deviations of one batch: an alarm takes four slow ones, or two fast ones
_CUT = 0.92  # mean of the squares of normal deviations when those beyond two are cut to two
_KEPT = 0.02  # weight that measurements keep after a change of the device
_SHARE = 0.2  # of a batch's time per member: the ridge of a smaller slope is no tighter, or it could not grow again
_SIGMA_START, _SIGMA_MIN, _SIGMA_MAX = 0.15, 0.01, 0.5
_WARM_SAMPLES, _WARM_SIZES = 3, 2

Counts = Mapping[Hashable, float]


def solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve a small symmetric positive definite system by Gaussian elimination, without pivots."""
    n = len(vector)
    if n == 2:  # nearly always, and after every batch
        (a, b), (c, d) = matrix
        factor = c / a
        last = (vector[1] - factor * vector[0]) / (d - factor * b)
        return [(vector[0] - b * last) / a, last]
    rows = [[*row, right] for row, right in zip(matrix, vector, strict=True)]
    for i, top in enumerate(rows):
        for r in range(i + 1, n):
            row = rows[r]
            factor = row[i] / top[i]
            for c in range(i, n + 1):
                row[c] -= factor * top[c]
    out = [row[n] for row in rows]
    for i in range(n - 1, -1, -1):
        for c in range(i + 1, n):
            out[i] -= rows[i][c] * out[c]
        out[i] /= rows[i][i]
    return out


class AffineFit:
    """The learned T of one (shape, stage).

    fixed, slope(class): seconds. sigma: relative spread of the residuals. ready: False until three samples of two batch
    sizes; until then the caller's simpler estimate stands. alarms: how often the drift test fired.
    """

    def __init__(self) -> None:
        self._index: dict[Hashable, int] = {}
        self._theta = [0.0]
        self._anchor = [0.0]
        self._gram = [[0.0]]
        self._moment = [0.0]
        self._seen = [0]  # batches each unknown was in
        self._sizes: set[float] = set()
        self._recent: deque[tuple[Counts, float]] = deque(maxlen=4)
        self._high = self._low = 0.0
        self._since_high = self._since_low = 0  # batches since either was zero
        self.samples = self.alarms = 0
        self.sigma = _SIGMA_START

    @property
    def fixed(self) -> float:
        """Seconds a batch costs before its first member."""
        return self._theta[0]

    @property
    def ready(self) -> bool:
        """Whether enough was measured to tell fixed from marginal."""
        return self.samples >= _WARM_SAMPLES and len(self._sizes) >= _WARM_SIZES

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The cost classes measured so far."""
        return tuple(self._index)

    def slope(self, cost_class: Hashable) -> float | None:
        """Seconds of one more member of the class; None if it was never measured."""
        i = self._index.get(cost_class)
        if i is None:
            # Past MAX_CLASSES the last one stands for all further classes.
            i = MAX_CLASSES if len(self._index) >= MAX_CLASSES else None
        return None if i is None else self._theta[i]

    def predict(self, counts: Counts) -> float:
        """Seconds of a batch with these members per class; classes never measured count at the default."""
        total = self._theta[0]
        for cost_class, n in counts.items():
            slope = self.slope(cost_class)
            total += n * (DEFAULT_COST if slope is None else slope)
        return total

    def observe(self, counts: Counts, seconds: float) -> None:
        """Learn from one measured batch. Values that are not finite or not above zero are ignored."""
        if not (0.0 < seconds < math.inf):
            return
        x = self._design(counts)
        self.samples += 1
        if len(self._sizes) < 64:
            self._sizes.add(sum(counts.values()))
        fewest, seen = self.samples, self._seen
        for i, n in enumerate(x):
            if n > 0.0:
                seen[i] += 1
                if seen[i] < fewest:
                    fewest = seen[i]
        # The first batches of a class are predicted from a guess: they are no drift, and are weighted by their own
        # time, so that one slow start counts less than the batches after it.
        if fewest <= _WARM_SAMPLES:
            self._learn(x, seconds, 1.0 / seconds**2, self._time(x))
        elif not self._drifted(counts, x, seconds):
            self._learn_robustly(x, seconds)

    def _design(self, counts: Counts) -> list[float]:
        for cost_class in counts:
            if cost_class not in self._index and len(self._index) < MAX_CLASSES:
                self._index[cost_class] = len(self._theta)
                self._theta.append(DEFAULT_COST)
                self._anchor.append(DEFAULT_COST)
                self._seen.append(0)
                for row in self._gram:
                    row.append(0.0)
                self._gram.append([0.0] * len(self._theta))
                self._moment.append(0.0)
        x = [0.0] * len(self._theta)
        x[0] = 1.0
        for cost_class, n in counts.items():
            x[self._index.get(cost_class, MAX_CLASSES)] += n
        return x

    def _time(self, x: list[float]) -> float:
        total = 0.0
        for a, b in zip(x, self._theta, strict=True):
            total += a * b
        return total if total > 1e-9 else 1e-9

    def _drifted(self, counts: Counts, x: list[float], seconds: float) -> bool:
        """The drift test. When it fires, the fit is scaled to the batches since the change, and learns them anew.

        A slower device takes four batches in a row, because one batch in ten may stall. A faster one takes two.
        """
        z = math.log(seconds / self._time(x)) / self.sigma
        self._recent.append((counts, seconds))
        self._high = max(0.0, self._high + min(z, _CLAMP_UP) - _CUSUM_SLACK)
        self._low = max(0.0, self._low - max(z, -_CLAMP_DOWN) - _CUSUM_SLACK)
        self._since_high = self._since_high + 1 if self._high else 0
        self._since_low = self._since_low + 1 if self._low else 0
        if max(self._high, self._low) <= _CUSUM_ALARM:
            return False
        length = self._since_high if self._high > self._low else self._since_low
        since = [(self._design(c), took) for c, took in list(self._recent)[-length:]]
        change = math.exp(median(math.log(took / self._time(row)) for row, took in since))
        self._forget(change, since[0][0] if all(row == since[0][0] for row, _ in since) else None)
        for row, took in since:
            self._learn_robustly(row, took)
        return True

    def _forget(self, factor: float, only: list[float] | None) -> None:
        """Scale the fit by a factor and keep its shape, as if one batch had been measured.

        only: the members of all batches since the change, if they were the same. Then fixed and marginal cannot be told
        apart, and the fixed part takes the change: a hold for further members pays, or teaches their cost. Scaled,
        members would seem dear, and eight callers stay in two groups of four for good.
        """
        self.alarms += 1
        fixed = self._theta[0] + (factor - 1.0) * self._time(only) if only is not None else -1.0
        self._theta = [t * factor for t in self._theta] if fixed < 0.0 else [fixed, *self._theta[1:]]
        self._anchor = list(self._theta)
        # Weights are relative to the prediction: without the division the old scale would outweigh the new.
        self._gram = [[_KEPT * g / factor**2 for g in row] for row in self._gram]
        self._moment = [sum(g * t for g, t in zip(row, self._theta, strict=True)) for row in self._gram]
        self._high = self._low = 0.0
        self._since_high = self._since_low = 0
        self._recent.clear()

    def _learn_robustly(self, x: list[float], seconds: float) -> None:
        """Learn from a batch whose time was predicted. It counts as a deviation of at most two sigma."""
        predicted = self._time(x)
        residual = max(abs(seconds / predicted - 1.0), abs(math.log(seconds / predicted)))
        bound = _HUBER * self.sigma
        variance = 0.97 * self.sigma**2 + 0.03 * min(residual, bound) ** 2 / _CUT
        self.sigma = max(_SIGMA_MIN, min(_SIGMA_MAX, math.sqrt(variance)))
        self._learn(x, seconds, (min(1.0, bound / residual) if residual else 1.0) / predicted**2, predicted)

    def _learn(self, x: list[float], seconds: float, weight: float, scale: float) -> None:
        """One step of the decayed least squares. scale: the predicted time."""
        gram, moment, anchor = self._gram, self._moment, self._anchor
        least = _SHARE * scale / max(1.0, sum(x[1:]))
        left, right = [], []
        n = len(x)
        for i in range(n):  # by number, and no lists but those: n is nearly always 2, and this runs after every batch
            ridge = _RIDGE / (max(least, self._theta[i]) if i else scale) ** 2
            weighted, row = weight * x[i], gram[i]
            for j in range(n):
                row[j] = _FORGET * row[j] + weighted * x[j]
            moment[i] = _FORGET * moment[i] + weighted * seconds
            left.append(row.copy())
            left[i][i] += ridge
            right.append(moment[i] + ridge * anchor[i])
        theta = solve(left, right)
        if theta[0] < 0.0:  # a batch cannot cost less than nothing: the slopes alone explain it
            theta = [0.0, *solve([row[1:] for row in left[1:]], right[1:])]
        floor = 1e-3 * scale
        for i in range(n):
            if i and not theta[i] > floor:
                theta[i] = floor
            guessed = i > 0 and self._seen[i] <= _WARM_SAMPLES  # a guess is no anchor
            anchor[i] = theta[i] if guessed else 0.9 * anchor[i] + 0.1 * theta[i]
        self._theta = theta
