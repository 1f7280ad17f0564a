"""Looks at an export before a robot does: every check says what it expected, what it found and what to do about it.

Checks run in a fixed order, cheap ones that need nothing loaded first, and one that needs what another found broken is
skipped and says so. `examine` never raises for what is wrong with the export: that is what it reports. The checks are
in `doctor_files` and `doctor_runs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reflex_runtime.policies.doctor import files, runs
from reflex_runtime.policies.doctor.findings import CheckContext, Clocks, Finding, Status, failed, skipped
from reflex_runtime.policies.export.memory import total_memory
from reflex_runtime.policies.policy.spec import PolicySpec
from reflex_runtime.policies.source import is_export
from reflex_runtime.processors.providers import CPU
from reflex_runtime.version import __version__


@dataclass(frozen=True, slots=True)
class Check:
    """One check that was made. duration: seconds."""

    id: str
    finding: Finding
    duration: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        found = self.finding
        return {
            "id": self.id,
            "status": found.status,
            "expected": found.expected,
            "actual": found.actual,
            "remediation": found.remediation,
            "environment": found.environment,
            "duration_ms": round(self.duration * 1e3, 3),
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks of one export, in the order they were made."""

    source: str
    provider: str
    threads: int
    spec: PolicySpec | None
    checks: Sequence[Check]

    @property
    def exit_code(self) -> int:
        """0: nothing failed. 1: the export failed a check. 3: all that failed is this machine's."""
        failed = [check.finding for check in self.checks if check.finding.status == "fail"]
        if not failed:
            return 0
        return 3 if all(finding.environment for finding in failed) else 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe; the keys stand in `reflex doctor --help`."""
        counts = Counter(check.finding.status for check in self.checks)
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
    clocks: Clocks | None = None,
    total_memory: Callable[[str], int] = total_memory,
) -> Diagnosis:
    """Make every check of a source, as in `read_source`.

    provider, threads: as in `OnnxSession`, and as the export would be served. instruction: one it has to understand;
    default its own first words. rtc_horizon: actions of a chunk that anchor the next one; named, an export that cannot
    do it fails, else it is a warning for the default. clocks, total_memory: for tests.
    """
    clocks = clocks or Clocks()
    context = CheckContext(str(source), provider, threads, instruction, rtc_horizon, clocks, total_memory)
    context.began = clocks.together()
    checks: list[Check] = []
    broken: dict[str, Status] = {}
    for name, needs, look in _EXPORT if is_export(context.source) else _OTHER:
        began = clocks.monotonic()
        missing = [need for need in needs if need in broken]
        if missing:
            told = [f"{need} {'failed' if broken[need] == 'fail' else 'was skipped'}" for need in missing]
            finding = skipped(f"needs a check that did not pass: {', '.join(told)}")
        else:
            finding = _looked(look, context)
        if finding.status in ("fail", "skip"):
            broken[name] = finding.status
        checks.append(Check(name, finding, clocks.monotonic() - began))
    return Diagnosis(context.source, provider, threads, context.loaded, checks)


def _looked(look: Callable[[CheckContext], Finding], context: CheckContext) -> Finding:
    try:
        return look(context)
    except Exception as error:  # whatever an export makes a check do, the other checks are made
        return failed(
            "a check that ends", f"{type(error).__name__}: {error}",
            "this check met something that it does not know; please report it with this text",
        )


_Checks = tuple[tuple[str, tuple[str, ...], Callable[[CheckContext], Finding]], ...]

_RUNS: Final[_Checks] = (
    ("actions", ("model_load",), runs.check_actions),
    ("cameras", ("actions",), runs.check_cameras),
    ("determinism", ("actions",), runs.check_determinism),
    ("batch_parity", ("actions",), runs.check_batch_parity),
    ("rtc_boundary", ("actions",), runs.check_rtc_boundary),
    ("clock", (), runs.check_clock),
)
"""Those of a loaded model, of any source."""

_EXPORT: Final[_Checks] = (
    ("files", (), files.check_files),
    ("normalisation", ("files",), files.check_normalisation),
    ("config", ("files", "normalisation"), files.check_config),
    ("wires", ("config",), files.check_wires),
    ("opset", ("config",), files.check_opset),
    ("inputs", ("config",), files.check_inputs),
    ("dynamic_batch", ("inputs",), files.check_dynamic_batch),
    ("embodiment", ("config",), runs.check_embodiment),
    ("tokenizer", ("config",), runs.check_tokenizer),
    ("memory", ("config",), runs.check_memory),
    ("provider", (), runs.check_provider),
    ("model_load", ("config", "inputs", "dynamic_batch", "provider"), runs.check_model_load),
    *_RUNS,
)
"""Id, the checks whose findings it needs, and the check, in the order they are made."""

_OTHER: Final[_Checks] = (
    ("source", (), runs.check_source),
    ("embodiment", ("source",), runs.check_embodiment),
    ("memory", ("source",), runs.check_memory),
    ("model_load", ("source",), runs.check_model_load),
    *_RUNS,
)
"""The same for what is no export: its own reader checks its files."""
