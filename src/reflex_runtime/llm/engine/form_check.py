"""A program that checks a form before the server compiles it; run by `logits_processors.py`.

llguidance follows references by recursion, and builds some expressions without a bound: a form of a few kilobytes can
overrun the stack, which ends the process, or compute for minutes. In this process either does no harm. Standard input
is the form in the library's language, standard output is its fault, or empty.
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
STACK = 1 << 20  # bytes: less than those of the server's threads, which compile the same form later
FAILED = 3  # exit status if the library failed, or took too long for a token


def fault(library: Any, form: str) -> str:
    """The fault of a form, or "". A keyword that the library ignores is a fault; a `format` that it does not know is
    none, because such a format is only an annotation."""
    failed, warnings = library.LLMatcher.validate_grammar_with_warnings(form)
    wrong = (one for one in warnings if not one.startswith(("Unknown format: ", "no tokenizer - ")))
    return str(next(wrong, warnings[0] if failed else ""))


def walk(matcher: Any) -> str | None:
    """The fault that shows in the first tokens of a random output, or ""; None if one token takes too long."""
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

    def check() -> None:
        wrong = fault(llguidance, form)
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), form, log_level=0)
        if matcher.is_error():  # perhaps because this tokenizer lacks a token that the form names
            found.append(wrong)
        elif (later := walk(matcher)) is not None:
            found.append(later or wrong)

    threading.stack_size(STACK)
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    if not found:
        return FAILED
    sys.stdout.buffer.write(found[0].encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
