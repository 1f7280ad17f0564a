"""The limits of one runtime process, for the front that starts it and calls it."""

from __future__ import annotations

from dataclasses import dataclass

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import option, validate

_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Limits of one runtime process, in seconds.

    call_timeout_s: of a `request` without a timeout of its own. start_timeout_s: from the start of the process until it
    is prepared. heartbeat_s: between heartbeats; 0: none. hung_after_s: that a heartbeat may stay unanswered.
    backoff_s, backoff_max_s: before the first restart, and at most. steady_s: after a life of this length the back-off
    starts anew. most_failures: failed starts and shorter lives in a row that open the breaker; then one trial start
    every cooldown_s.
    """

    call_timeout_s: float = option(30.0, low=0, above=True, high=_DAY, unit="seconds")
    start_timeout_s: float = option(600.0, low=0, above=True, high=_DAY, unit="seconds")
    heartbeat_s: float = option(5.0, low=0, high=_DAY, unit="seconds")
    hung_after_s: float = option(20.0, low=0, above=True, high=_DAY, unit="seconds")
    backoff_s: float = option(0.2, low=0, above=True, high=_DAY, unit="seconds")
    backoff_max_s: float = option(10.0, low=0, above=True, high=_DAY, unit="seconds")
    steady_s: float = option(30.0, low=0, high=_DAY, unit="seconds")
    most_failures: int = option(5, low=1, high=1000)
    cooldown_s: float = option(60.0, low=0, above=True, high=_DAY, unit="seconds")

    def __post_init__(self) -> None:
        validate(self, "ClientConfig")
        for low, high in (("heartbeat_s", "hung_after_s"), ("backoff_s", "backoff_max_s")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(
                    f"ClientConfig.{low}={getattr(self, low)!r}: must be at most {high}={getattr(self, high)!r}"
                )
