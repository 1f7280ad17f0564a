"""A program that checks a form before the server compiles it; run by `logits_processors.py`.

llguidance follows references by recursion, and builds some expressions without a bound: a form of a few kilobytes can
overrun the stack, which ends the process, or compute for minutes. Here it may do either. Standard input is the form in
the library's language, standard output its fault.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import Any

SECONDS = 2  # of CPU
STEP = 0.2  # seconds of CPU for the mask of the next token: all other requests of a batch wait for it
STEPS = 24  # tokens of a random output
MEMORY = 1 << 30  # bytes of address space
STACK = 1 << 20  # bytes: less than the server's threads have, which compile the same form
FAILED = 3  # exit status when the library gave up


def fault(library: Any, form: str) -> str:
    """The fault of a form, or "". JSON schemas in it are lenient: a keyword that the library leaves out is a fault, but
    not a `format` without a rule, which is an annotation."""
    failed, warnings = library.LLMatcher.validate_grammar_with_warnings(form)
    wrong = (one for one in warnings if not one.startswith(("Unknown format: ", "no tokenizer - ")))
    return str(next(wrong, warnings[0] if failed else ""))


def walk(matcher: Any) -> str | None:
    """The fault of the first tokens of a random output, or ""; None where one takes too long."""
    for number in range(STEPS):
        if matcher.is_stopped():
            break
        begin = time.thread_time()
        bits = matcher.compute_bitmask()
        if time.thread_time() - begin > STEP:
            return None
        allowed = [token for token in range(256) if bits[token >> 3] >> (token & 7) & 1]
        if matcher.is_error() or not allowed:
            break
        matcher.consume_token(allowed[number * 7919 % len(allowed)])
    return str(matcher.get_error()) if matcher.is_error() else ""


def main() -> int:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import llguidance

    form, found = sys.stdin.buffer.read().decode(), list[str]()

    def look() -> None:
        wrong = fault(llguidance, form)
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), form, log_level=0)
        if matcher.is_error():  # perhaps because this tokenizer lacks a token that the form names
            found.append(wrong)
        elif (later := walk(matcher)) is not None:
            found.append(later or wrong)

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
