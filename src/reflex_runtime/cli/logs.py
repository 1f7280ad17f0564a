"""The log of a server on standard error: lines for people, or JSON for a collector (`--log-format json`)."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from reflex_runtime.observe.trace_context import current_span

PLAIN = "%(asctime)s %(levelname)s %(name)s %(message)s"


def begin(form: str = PLAIN) -> None:
    """Log lines for people, until `use` says otherwise."""
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)


def use(log_format: str) -> None:
    """From now on log in this format: text or json."""
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLog())


class JsonLog(logging.Formatter):
    """A record as one JSON object on one line.

    time: UTC, ISO 8601 with microseconds. level, logger, message, pid, thread. Of an exception also `error` (its
    class), `error_message` and `traceback`. With `--otel`, a line about a request has the ids of its span: `trace_id`,
    `span_id`. The line at the start also has `settings`.
    """

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            "thread": record.threadName,
        }
        if (span := current_span()) is not None:
            told |= {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}
        if "settings" in record.__dict__:
            told["settings"] = record.__dict__["settings"]
        error = record.exc_info[1] if record.exc_info else None
        if record.exc_info and error is not None:
            told |= {"error": type(error).__name__, "error_message": str(error)}
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)  # ASCII: whatever the encoding of standard error
