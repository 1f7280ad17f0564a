"""Looks at a form that a client sent before the server compiles it; a program of its own, run by `constraint.py`.

llguidance follows references by recursion, and builds some expressions without a bound: a form of a few kilobytes can
overrun the stack, which ends the process, or compute for minutes. Here it may do either. Standard input is the form in
the words of the library, standard output what is wrong with it.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

SECONDS = 2  # of CPU
STEP = 0.2  # seconds of CPU to find the first token: all other requests of a batch wait that long, too
MEMORY = 1 << 30  # bytes of address space
STACK = 1 << 20  # bytes: less than any thread of the server has, which compiles the same form
FAILED = 3  # exit status when the library gave up


def main() -> int:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # not every system knows it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import llguidance

    form, found = sys.stdin.buffer.read().decode(), list[str]()

    def look() -> None:
        wrong = llguidance.LLMatcher.validate_grammar(form)
        # This tokenizer may lack tokens that the form names, so its errors are not told. What counts is the time.
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), form, log_level=0)
        begin = time.thread_time()
        matcher.compute_bitmask()
        if time.thread_time() - begin < STEP:
            found.append(wrong)

    threading.stack_size(STACK)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if not found:
        return FAILED
    sys.stdout.buffer.write(found[0].encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
