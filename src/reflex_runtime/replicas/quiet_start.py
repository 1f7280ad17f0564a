"""A process that starts beside others which serve takes only the time that those leave over, until it is ready.

Under Linux's SCHED_IDLE a process never makes a thread of another one wait that could run. The way back from it needs a
privilege (CAP_SYS_NICE, or RLIMIT_NICE of 20); where that is missing, SCHED_BATCH is used, which anybody may leave
again: such a process has its share of the time, but interrupts nobody to get it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Final

LONGEST: Final = 2.0  # seconds: on a machine that is always busy the lost process is missed more than the others wait


class QuietStart:
    """Lowers a process at once, which has started no thread yet; `end` raises all of its threads again, and those of
    the processes that it has started meanwhile.

    It does nothing where the calling process has a scheduling policy that somebody chose, or none may be set.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._policy = 0, 0
        with suppress(AttributeError, OSError):  # not Linux; forbidden in this container; it has ended
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                policy = os.SCHED_IDLE if may_leave_idle() else os.SCHED_BATCH
                os.sched_setscheduler(pid, policy, os.sched_param(0))
                self._pid, self._policy = pid, policy

    def end(self) -> None:
        """Once more, it does nothing. The process must not have been reaped."""
        pid, self._pid = self._pid, 0
        while pid and (lowered := list(_threads(pid, self._policy))):  # those that started meanwhile have inherited it
            for thread in lowered:
                try:
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                except ProcessLookupError:
                    pass
                except OSError:
                    return


def _threads(pid: int, policy: int) -> Iterator[int]:
    """The threads of a process, and of those that it has started, that have a scheduling policy."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):
                if os.sched_getscheduler(int(name)) == policy:
                    yield int(name)
            with suppress(OSError):  # it has ended, or the kernel has no such list
                for child in Path(f"/proc/{pid}/task/{name}/children").read_text().split():
                    yield from _threads(int(child), policy)


@cache
def may_leave_idle() -> bool:
    """Whether a thread of this process may leave SCHED_IDLE again. It is tried on one that then ends: a capability$
    alone does not say it, inside of a container. Takes long at first on a busy machine."""
    found = []

    def leave() -> None:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            found.append(True)

    thread = Thread(target=leave, name="tries-idle")
    thread.start()
    thread.join()
    return bool(found)
