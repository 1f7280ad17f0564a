"""The journal of a running server, watched for a while."""

from __future__ import annotations

import http.client
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from reflex_runtime.cli.console import ProgressLine
from reflex_runtime.cli.server_address import PATIENCE, STREAM, ServerAddress, snapshot_of
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.observe.journal import JournalError
from reflex_runtime.observe.journal_reader import Journal, read_journal

JOURNAL: Final = "/diagnostics/journal"
LEAST: Final = 1.0  # seconds, as the server takes them
LONGEST: Final = 600.0
MOST: Final = 256 << 20  # bytes; what follows is not read
_AT_ONCE: Final = 1 << 16
_OTHERS: Final = {
    "llm": "serves a language model, whose budget is one of tokens: reflex trace --prompts @FILE --sweep shows what "
    "each buys, see docs/continuous-batching.md",
    "feeds": "is reflex feeds, whose frames have no journal of requests; tune reads policy servers",
}


@contextmanager
def watched_journal(url: str, seconds: float, key: str = "") -> Iterator[Journal]:
    """Watch a server, then read what it did. An error in the `with` names the server instead of the file.

    ConfigError for an address or a time that cannot be, ReflexError for a server that has no such journal.
    """
    if not LEAST <= seconds <= LONGEST:
        raise ConfigError(f"--seconds={seconds:g}: must be from {LEAST:g} to {LONGEST:g}")
    address = ServerAddress.of(url)
    with tempfile.TemporaryDirectory(prefix="reflex-tune-") as folder:
        file = Path(folder, "watched.jsonl")
        with address.answer(f"{JOURNAL}?seconds={seconds:g}", key) as response:
            if response.status == 404 and (why := _OTHERS.get(_product(address, key))):
                raise ReflexError(f"{url}: {why}")
            if response.status != 200:
                raise address.refusal(response, JOURNAL, key)
            _read(response, file, seconds, url)
        try:
            yield read_journal(file)
        except (JournalError, ConfigError) as error:
            error.message = error.message.replace(str(file), url)
            raise


def _read(response: http.client.HTTPResponse, file: Path, seconds: float, url: str) -> None:
    """Into the file, as it comes: lines, and a blank one every second. ReflexError if the server is lost meanwhile."""
    progress, began, passed, size = ProgressLine("seconds watched"), time.monotonic(), 0.0, 0
    until = seconds + PATIENCE  # what a slow network takes; a journal may have no end
    with file.open("wb") as out:
        try:
            while size < MOST and passed <= until and (data := response.read1(_AT_ONCE)):
                out.write(data)
                size, passed = size + len(data), time.monotonic() - began
                progress(int(passed), int(seconds) + 1)
        except (http.client.IncompleteRead, ConnectionError):
            why = f"ended its answer after {passed:.0f} of {seconds:g} s; is the server still there?"
            raise ReflexError(f"{url}: {why}") from None
    progress(1, 1)


def _product(address: ServerAddress, key: str) -> str:
    """What the server is; "" where it does not say."""
    with address.answer(STREAM, key) as response:
        if response.status != 200:
            return ""
        return str(snapshot_of(response.readline(16 << 20), address.url).server.get("product", ""))
