"""The journal of a server that runs: read for some seconds, kept in a file until it is closed."""

from __future__ import annotations

import http.client
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from reflex_runtime.cli.live_tables import STREAM, snapshot_of
from reflex_runtime.cli.progress import ProgressLine
from reflex_runtime.cli.server_address import PATIENCE, ServerAddress
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.observe.journal import JournalError
from reflex_runtime.observe.journal_reader import Journal, read_journal
from reflex_runtime.web.json import printable

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
            if response.status == 401:
                raise address.wrong_key(key)
            if response.status == 200:
                _read(response, file, seconds, url)
            refused = b"" if response.status == 200 else response.read(4096)
        if not file.exists():
            raise ReflexError(f"{url}: {_why(url, key, response.status, refused)}")
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


def _why(url: str, key: str, status: int, body: bytes) -> str:
    """Why a server has no journal to send."""
    if status != 404:
        try:
            return printable(str(msgspec.json.decode(body)["message"]))
        except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError, TypeError):
            return f"answers {status} at {JOURNAL}; is it a server of reflex?"
    product = _product(url, key)
    return _OTHERS.get(product) or f"has no {JOURNAL}; is it a policy server of this version of reflex?"


def _product(url: str, key: str) -> str:
    """What the server is; "" where it does not say."""
    with ServerAddress.of(url).answer(STREAM, key) as response:
        if response.status != 200:
            return ""
        return str(snapshot_of(response.readline(16 << 20), url).server.get("product", ""))
