"""Broken messages: what reads one raises our error or reads it, whatever was changed.

The messages of `corpus/` were each the first to be refused in their own way. `make test` reads them and 1,000 others,
the same in each run; `make test-long` 100,000 fresh ones. `CORPUS=write` before a long test stores what it finds. Put a
message that failed there.
"""

from __future__ import annotations

import base64
import json
import os
import random
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from reflex_runtime.core.errors import ReflexError

FEW: Final = 1_000
FRESH = pytest.mark.parametrize("count", [FEW, pytest.param(100_000, marks=pytest.mark.long)])
_CORPUS: Final = Path(__file__).with_name("corpus")


def check(
    name: str, seeds: Sequence[bytes], read: Callable[[bytes], Any], count: int, pieces: Sequence[bytes] = ()
) -> float:
    """Read the corpus of this name and `count` seeds that were changed; the share of these that could be read.

    pieces: what is inserted besides random bytes.
    """
    read(seeds[0])
    draw = random.Random(name if count == FEW else None)  # a message that fails is told
    if os.environ.get("CORPUS") == "write":
        store(name, read, (broken(draw, seeds, pieces) for _ in range(count)))
    for text in json.loads((_CORPUS / f"{name}.json").read_text()):
        reads(read, base64.b64decode(text))
    return sum(reads(read, broken(draw, seeds, pieces)) for _ in range(count)) / count


def broken(draw: random.Random, seeds: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    message = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(message) + 1)
        match draw.choice((0, 0, 0, 1, 2, 3)):
            case 0:
                message[at : at + 1] = draw.randbytes(1)
            case 1:
                del message[at : at + draw.randrange(1, 9)]
            case 2 if pieces and draw.randrange(2):
                message[at:at] = draw.choice(pieces)
            case 2:
                message[at:at] = draw.randbytes(draw.randrange(1, 5))
            case _ if draw.randrange(4) == 0:
                message[at:] = draw.choice(seeds)[draw.randrange(20) :]
    return bytes(message)


def reads(read: Callable[[bytes], Any], message: bytes) -> bool:
    try:
        read(message)
    except ReflexError:
        return False
    except Exception as error:
        raise AssertionError(f"{base64.b64encode(message).decode()} raises {error!r}") from error
    return True


def store(name: str, read: Callable[[bytes], Any], messages: Iterable[bytes]) -> None:
    """Write the first message of each way to refuse one: of each set of our lines on the way to the error."""
    found: dict[tuple[object, ...], str] = {}
    for message in messages:
        try:
            read(message)
        except ReflexError as error:
            frames = traceback.walk_tb(error.__traceback__)
            lines = {line for frame, line in frames if "reflex_runtime" in frame.f_code.co_filename}
            found.setdefault((type(error), *sorted(lines)), base64.b64encode(message).decode())
    _CORPUS.mkdir(exist_ok=True)
    (_CORPUS / f"{name}.json").write_text(json.dumps(sorted(found.values(), key=len), indent=0) + "\n")
