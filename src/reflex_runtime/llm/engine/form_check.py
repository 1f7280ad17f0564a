"""A program that looks at a form before the server compiles it; run by `logits_processors.py`.

llguidance follows references by recursion, and builds some expressions without a bound: a form of a few kilobytes can
overrun the stack, which ends the process, or compute for minutes. Here it may do either. Standard input is the form in
the words of the library, standard output what is wrong with it.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import Any

SECONDS = 2  # of CPU
STEP = 0.2  # seconds of CPU to find the next token: all other requests of a batch wait that long, too
STEPS = 24  # tokens of an output by chance
MEMORY = 1 << 30  # bytes of address space
STACK = 1 << 20  # bytes: less than any thread of the server has, which compiles the same form
FAILED = 3  # exit status when the library gave up


def fault(library: Any, form: str) -> str:
    """What is wrong with a form, "" for nothing. JSON schemas in it are lenient: what the library would leave out of
    them is wrong, but for a `format` without a rule, which says nothing of what is valid."""
    failed, said = library.LLMatcher.validate_grammar_with_warnings(form)
    wrong = (one for one in said if not one.startswith(("Unknown format: ", "no tokenizer - ")))
    return str(next(wrong, said[0] if failed else ""))


def walk(matcher: Any) -> str | None:
    """What is wrong with the first tokens of an output by chance, "" for nothing; None where one takes too long."""
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
    with suppress(ValueError, OSError):  # not every system knows it
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
