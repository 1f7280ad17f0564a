"""What a graph says of itself: the metadata that exporters write, and files of names."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError

LONGEST: Final = 1_000_000  # characters of a list of names
MOST_NAMES: Final = 100_000
LONGEST_NAME: Final = 200
LARGEST: Final = 16_384  # pixels of a side of the input


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The metadata of a graph, as far as it can be read; what cannot is as if it were not there.

    names: labels by number. size: width and height of the input. task: such as detect, segment, pose, classify.
    points: number of keypoints and columns of each. resize: letterbox, stretch or crop. stride: the largest one. head:
    the exporter's name of what made the outputs. at_once: most pictures in a call, None if that is not said.
    """

    names: Mapping[int, str]
    size: tuple[int, int] | None = None
    task: str = ""
    points: tuple[int, int] | None = None
    resize: str = ""
    stride: int = 32
    head: str = ""
    at_once: int | None = None


def facts_of(metadata: Mapping[str, str]) -> GraphFacts:
    """From metadata by key: `names`, `imgsz` (height and width), `task`, `kpt_shape`, `resize`, `stride`, `head`,
    `args`."""
    height_width = _numbers(metadata.get("imgsz", ""), 2)
    stride = _numbers(metadata.get("stride", ""), 1)
    return GraphFacts(
        names=names_in(metadata.get("names", "")) or {},
        size=(height_width[1], height_width[0]) if height_width else None,
        task=metadata.get("task", "")[:40],
        points=_numbers(metadata.get("kpt_shape", ""), 2),  # type: ignore[arg-type]
        resize=metadata.get("resize", "")[:40],
        stride=stride[0] if stride else 32,
        head=metadata.get("head", "")[:40],
        at_once=_at_once(metadata),
    )


def names_in(text: str) -> dict[int, str] | None:
    """Labels by number from a JSON or Python text of a list, or of a mapping by number. None if it is neither."""
    found = literal(text)
    if isinstance(found, (list, tuple)):
        found = dict(enumerate(found))
    if not isinstance(found, dict) or len(found) > MOST_NAMES:
        return None
    try:
        return {int(number): _name(name) for number, name in found.items()}
    except (ValueError, TypeError, OverflowError):
        return None


def names_of_file(path: Path) -> dict[int, str]:
    """Labels by number: a JSON or Python text as in metadata, or a name a line. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field="names") from None
    except UnicodeDecodeError:
        raise ConfigError("is no UTF-8 text", field="names") from None
    if len(text) > LONGEST:
        raise ConfigError(f"is longer than {LONGEST} characters, the most", field="names")
    if text.lstrip()[:1] in ("[", "{", "("):
        found = names_in(text)
        if found is None:
            raise ConfigError("must be a list of names, or an object of names by number", field="names")
    else:
        found = {number: _name(line.strip()) for number, line in enumerate(text.strip().splitlines())}
    if not found:
        raise ConfigError("has no names in it", field="names")
    return found


def literal(text: str) -> Any:
    """The value that a text writes in JSON or as a Python literal; None for every other text."""
    if not text or len(text) > LONGEST:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _at_once(metadata: Mapping[str, str]) -> int | None:
    """ultralytics exports NMS for the pictures of one batch: with a symbolic axis, results of all others are empty."""
    arguments = literal(metadata.get("args", "")[:10_000])
    batch = _numbers(metadata.get("batch", "1"), 1) or (1,)
    return batch[0] if isinstance(arguments, dict) and arguments.get("nms") is True else None


def _name(value: Any) -> str:
    return str(value)[:LONGEST_NAME]


def _numbers(text: str, count: int) -> tuple[int, ...] | None:
    """So many whole numbers above 0; one stands for all of them."""
    found = literal(text[:100])
    values = [found] * count if isinstance(found, (int, float)) else found
    if not isinstance(values, (list, tuple)) or len(values) < count:
        return None
    numbers = values[:count]
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and 0 < n <= LARGEST for n in numbers):
        return None
    return tuple(int(n) for n in numbers)
