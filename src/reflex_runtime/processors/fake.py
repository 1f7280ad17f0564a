"""A processor with a declared service time, for demos and tests: a batch of n takes fixed + marginal · n seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.processors.base import BaseProcessor


def _echo(payload: Any) -> Any:
    return payload


class FakeProcessor(BaseProcessor):
    """Waits `seconds(n)` and answers each payload with `answer(payload)`, by default the payload itself.

    fixed, marginal: seconds. sleep: how to wait; `time.sleep` for real time, a virtual clock's in tests.
    calls: size of every batch so far.
    """

    def __init__(
        self,
        fixed: float,
        marginal: float,
        sleep: Callable[[float], None],
        answer: Callable[[Any], Any] = _echo,
    ) -> None:
        for name, value in (("fixed", fixed), ("marginal", marginal)):
            if not 0.0 <= value < inf:
                raise ConfigError(f"FakeProcessor.{name}={value!r}: must be finite and >= 0 seconds")
        self.fixed, self.marginal = fixed, marginal
        self._sleep, self._answer = sleep, answer
        self.calls: list[int] = []

    def seconds(self, n: int) -> float:
        """The declared time of a batch of n."""
        return self.fixed + self.marginal * n

    def run(self, batch: Batch) -> Sequence[Any]:
        self.calls.append(len(batch))
        self._sleep(self.seconds(len(batch)))
        return [self._answer(ticket.request.payload) for ticket in batch.grants]
