"""Which of two policies is better, by a test that stays valid however often it is checked.

If success rates are checked all day, they cross any fixed significance level sooner or later. Here each hypothesis is a
bet with fair odds: if it is true, the wealth ever reaches 1/alpha with probability at most alpha. The unit is the
episode, because requests of one episode succeed or fail together.
"""

from __future__ import annotations

from collections import deque
from math import floor, sqrt
from typing import Any, Final, Literal

BETS: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)  # of each bettor, the share of its wealth that it bets on a block
BLOCKS: Final = 32  # blocks that may wait for the other slot
_MOST: Final = 1e300  # cap of the wealth: infinity is no JSON

Verdict = Literal["undecided", "a_better", "b_better"]


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a proportion, 95 % by default; (0, 1) when n is 0.

    ValueError unless 0 <= successes <= n. (E. B. Wilson, 1927; checked against R. G. Newcombe, 1998.)
    """
    if not 0 <= successes <= n:
        raise ValueError(f"wilson: successes={successes!r}: must be in [0, n={n!r}]")
    if n == 0:
        return 0.0, 1.0
    p, square = successes / n, z * z
    middle = (p + square / (2 * n)) / (1 + square / n)
    half = z / (1 + square / n) * sqrt(p * (1 - p) / n + square / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == n else min(1.0, middle + half)


def ratio(split: int) -> tuple[int, int]:
    """Episodes of (a, b) in one block at a split: its reduced ratio, rounded so that the smaller side is 1.

    (0, 0), no blocks, when one side gets no episodes.
    """
    other = 100 - split
    if not (split and other):
        return 0, 0
    n = floor(max(split, other) / min(split, other) + 0.5)
    return (n, 1) if split >= other else (1, n)


class Comparison:
    """A against B by episodes that succeeded or not, as a betting test in blocks. Pure, in bounded memory.

    A block holds episodes of both slots in the ratio of the split; d = mean A − mean B lies in [−1, 1] and has mean 0
    if they are equally good. Each block is in three bets: A is better (d), B is better (−d), B is worse by less than
    `margin` (margin − d). A verdict is final. The wealth has no floor: the guard handles a version that becomes worse
    after thousands of episodes.

    alpha: probability of a wrong verdict, of each bet, over all looks. margin: of the success rate. Both in (0, 1).

    If the slots do not alternate in the ratio of the split, the episodes of at most 32 blocks of one wait for the
    other. Beyond that the oldest episode is left out of the test (not of `counts`), so that a block compares episodes
    of about the same time. The choice depends on counts, never on results, so the odds stay fair.
    """

    def __init__(self, split: int, alpha: float = 1e-3, margin: float = 0.05) -> None:
        self.alpha, self.margin = alpha, margin
        self.verdict: Verdict = "undecided"
        self.not_inferior = False
        self.blocks = self.left_out = 0  # left_out: episodes, or parts of a block cut short by a new split
        self._wealth = {name: [1.0] * len(BETS) for name in ("a_better", "b_better", "not_inferior")}
        self._successes = {"a": 0, "b": 0}
        self._episodes = {"a": 0, "b": 0}
        self._waiting: dict[str, deque[bool]] = {"a": deque(), "b": deque()}
        self.split = -1  # percent of the episodes that a gets
        self.set_split(split)

    def set_split(self, split: int) -> None:
        """Begin a new block with another ratio; episodes that wait for a block are left out. The wealth stays."""
        if split == self.split:
            return
        self.split = split
        self._size = dict(zip("ab", ratio(split), strict=True))
        for waiting in self._waiting.values():
            self.left_out += len(waiting)
            waiting.clear()

    def add(self, slot: str, success: bool) -> None:
        """Add a finished episode of a or b. At split 0 and 100 it is only counted, because there is no block."""
        self._episodes[slot] += 1
        self._successes[slot] += bool(success)
        size, waiting = self._size, self._waiting
        if not size[slot]:
            return
        waiting[slot].append(bool(success))
        if len(waiting["a"]) >= size["a"] and len(waiting["b"]) >= size["b"]:
            self._close(self._mean("a") - self._mean("b"))
        elif len(waiting[slot]) > BLOCKS * size[slot]:
            waiting[slot].popleft()
            self.left_out += 1

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """(successes, episodes) of each slot, of all that were added."""
        return {slot: (self._successes[slot], self._episodes[slot]) for slot in ("a", "b")}

    @property
    def e(self) -> dict[str, float]:
        """The evidence, a mean wealth, for each hypothesis: a succeeds more often, b does, b's success rate is above
        a's less `margin`."""
        return {name: sum(each) / len(BETS) for name, each in self._wealth.items()}

    def snapshot(self) -> dict[str, Any]:
        """JSON-safe: counts with rates and 95 % intervals, the three e-values, the verdicts, and episodes left out."""
        return {
            "verdict": self.verdict,
            "not_inferior": self.not_inferior,
            "split": self.split,
            "blocks": self.blocks,
            "left_out": self.left_out,
            "waiting": {slot: len(waiting) for slot, waiting in self._waiting.items()},
            "alpha": self.alpha,
            "margin": self.margin,
            "e": self.e,
            "slots": {
                slot: {"successes": k, "episodes": n, "rate": k / n if n else None, "interval": list(wilson(k, n))}
                for slot, (k, n) in self.counts.items()
            },
        }

    def _mean(self, slot: str) -> float:
        size, waiting = self._size[slot], self._waiting[slot]
        return sum(waiting.popleft() for _ in range(size)) / size

    def _close(self, d: float) -> None:
        self.blocks += 1
        for name, won in (("a_better", d), ("b_better", -d), ("not_inferior", self.margin - d)):
            wealth = zip(self._wealth[name], BETS, strict=True)
            self._wealth[name] = [min(each * (1.0 + share * won), _MOST) for each, share in wealth]
        e, enough = self.e, 1.0 / self.alpha
        if self.verdict == "undecided":
            if e["a_better"] >= enough:
                self.verdict = "a_better"
            elif e["b_better"] >= enough:
                self.verdict = "b_better"
        self.not_inferior = self.not_inferior or e["not_inferior"] >= enough
