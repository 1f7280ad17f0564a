"""The processes of a server, as those who watch it see them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Protocol

import msgspec


class ServerLives(Protocol):
    """restarts: of the server. last_exit: how the one before ended."""

    @property
    def restarts(self) -> int: ...
    @property
    def last_exit(self) -> str | None: ...


class LiveProcess(msgspec.Struct):
    """A process of a server.

    state: ready, or what keeps it from answering. restarts: how often it was started again. memory: resident bytes,
    None if the system does not tell. running, waiting: requests that it computes, and that wait for it; None where
    other processes compute. why: how its predecessor ended, or why it is not ready.
    """

    name: str
    pid: int | None
    state: str
    restarts: int
    memory: int | None
    running: int | None
    waiting: int | None
    why: str


def live_process(
    name: str, pid: int | None, state: str, restarts: int, running: int | None, waiting: int | None, why: str = ""
) -> LiveProcess:
    """A process with its memory now. why: at most 200 characters of it are kept."""
    return LiveProcess(name, pid, state, restarts, memory_of(pid), running, waiting, why[:200])


def own_process(
    state: str, lives: ServerLives | None, running: int | None, waiting: int | None, why: str = ""
) -> LiveProcess:
    """This process, the server. lives: what its supervisor knows, where there is one."""
    restarts, last_exit = (lives.restarts, lives.last_exit) if lives is not None else (0, None)
    return live_process("server", os.getpid(), state, restarts, running, waiting, why or last_exit or "")


def memory_of(pid: int | None) -> int | None:
    """Resident bytes of a process of this machine; None without a pid, and where the system does not tell."""
    if pid is None:
        return None
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _page()
    except (OSError, ValueError, IndexError):
        return None


@cache
def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE")
