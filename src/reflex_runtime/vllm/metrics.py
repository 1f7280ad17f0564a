"""Series in the registry that vLLM serves. The scheduler runs in a process of its own, so they are seen at vLLM's
/metrics where its processes share a directory (`PROMETHEUS_MULTIPROC_DIR`).
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter

from reflex_runtime.vllm.entry import Entry

NAMES: Final = 1000  # clients that have a series of their own

TOKENS: Final = Counter("reflex_client_tokens", "Tokens computed for requests that have ended, by client", ["client"])
REFUSED: Final = Counter("reflex_refused_requests", "Requests ended by the scheduler, by code", ["code"])
STEPS: Final = Counter("reflex_step_seconds", "Seconds of steps whose time was predicted", ["kind"])

_known: set[str] = set()


def ended(entry: Entry) -> None:
    name = str(entry.request.client) if entry.named else ""
    if name not in _known and len(_known) < NAMES:
        _known.add(name)
    TOKENS.labels(name if name in _known else "others").inc(entry.granted)
