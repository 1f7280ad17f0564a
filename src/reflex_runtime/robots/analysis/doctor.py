"""Looks at a policy before a robot does: makes every check, and says what it expected, what it found and what to do.

Checks run in a fixed order; one that needs what another found broken is skipped and says so. Most findings are the
loader's own errors, listed. `examine` never raises for what is wrong with the policy: that is what it reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.analysis.checks import (
    EXPORT,
    OTHER,
    ROWS,
    CheckContext,
    CheckFailure,
    CheckRule,
    CheckSkipped,
    CheckWarning,
    Clocks,
)
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.sources.load import is_export
from reflex_runtime.robots.sources.memory import total_memory
from reflex_runtime.run.onnx_session import CPU
from reflex_runtime.version import __version__

Status = Literal["pass", "fail", "warn", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check that was made. environment: the fault is in this machine, not in the policy. duration: seconds."""

    id: str
    status: Status
    expected: str
    actual: str
    remediation: str = ""
    environment: bool = False
    duration: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        names = ("id", "status", "expected", "actual", "remediation", "environment")
        return {name: getattr(self, name) for name in names} | {"duration_ms": round(self.duration * 1e3, 3)}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks of one policy, in the order they were made."""

    source: str
    provider: str
    threads: int
    spec: PolicySpec | None
    checks: Sequence[Check]

    @property
    def exit_code(self) -> int:
        """0: nothing failed. 1: the policy failed a check. 3: all that failed is this machine's."""
        failed = [check for check in self.checks if check.status == "fail"]
        if not failed:
            return 0
        return 3 if all(check.environment for check in failed) else 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe; the keys stand in `reflex doctor --help`."""
        counts = Counter(check.status for check in self.checks)
        return {
            "schema_version": 1,
            "reflex_version": __version__,
            "export_dir": self.source,
            "model_id": None if self.spec is None else self.spec.model_id,
            "model_hash": None if self.spec is None else self.spec.model_hash,
            "provider": self.provider,
            "threads": self.threads,
            "exit_code": self.exit_code,
            "counts": {status: counts[status] for status in ("pass", "fail", "warn", "skip")},
            "checks": [check.as_dict() for check in self.checks],
        }


def examine(
    source: str | Path,
    provider: str = CPU,
    threads: int = 1,
    *,
    instruction: str | None = None,
    rtc_horizon: int | None = None,
    rows: int = 0,
    clocks: Clocks | None = None,
    total_memory: Callable[[str], int] = total_memory,
) -> Diagnosis:
    """Make every check of a source, as in `read_source`.

    provider, threads: as in `OnnxSession`, and as the policy would be served. instruction: one it has to understand;
    default its own first words. rtc_horizon: actions of a chunk that anchor the next one; named, a policy that cannot
    do it fails, else it is a warning for the default. rows: as in `Policy`; named, it is proven that they make answers
    deterministic. clocks, total_memory: for tests.
    """
    clocks = clocks or Clocks()
    context = CheckContext(str(source), provider, threads, instruction, rtc_horizon, clocks, total_memory, rows)
    checks: dict[str, Check] = {}
    for rule in (*(EXPORT if is_export(context.source) else OTHER), *([ROWS] if rows else [])):
        broken = [checks[need] for need in rule.needs if checks[need].status in ("fail", "skip")]
        checks[rule.id] = _skipped(rule, broken) if broken else _made(rule, context)
    return Diagnosis(context.source, provider, threads, context.loaded, list(checks.values()))


def _skipped(rule: CheckRule, broken: Sequence[Check]) -> Check:
    told = [f"{check.id} {'failed' if check.status == 'fail' else 'was skipped'}" for check in broken]
    return Check(rule.id, "skip", "", f"needs a check that did not pass: {', '.join(told)}")


def _made(rule: CheckRule, context: CheckContext) -> Check:
    began = context.clocks.monotonic()

    def check(status: Status, actual: str, remedy: str = "", environment: bool = False) -> Check:
        expected = "" if status == "skip" else rule.expected
        return Check(rule.id, status, expected, actual, remedy, environment, context.clocks.monotonic() - began)

    try:
        return check("pass", rule.look(context))
    except CheckSkipped as skip:
        return check("skip", str(skip))
    except CheckFailure as fault:
        return check("fail", fault.actual, fault.remedy or rule.remedy, fault.environment or rule.environment)
    except CheckWarning as doubt:
        return check("warn", doubt.actual, doubt.remedy or rule.remedy)
    except ReflexError as error:
        return check("fail", error.message, rule.remedy, rule.environment)
    except Exception as error:  # whatever a policy makes a check do, the other checks are made
        met = "this check met something that it does not know; please report it with this text"
        return check("fail", f"{type(error).__name__}: {error}", met)
