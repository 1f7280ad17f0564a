"""How large each folder may be: `python tests/budgets.py --write` lowers the ceilings to today's size."""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "reflex_runtime"
TABLE = Path(__file__).with_name("budgets.toml")
ROOM = 0.01  # a new ceiling is this much above today's size, so that a fix of a few lines needs none
SLACK = 0.10  # further below its ceiling than this, a folder could grow back unseen

HEAD = """\
# The most lines that the modules of each folder of src/reflex_runtime may have, without those of its sub-folders.
# `python tests/budgets.py --write` lowers the ceilings; who raises one by hand says why in the commit.
"""


def sizes() -> dict[str, int]:
    """Lines of each folder's own modules; "total lines" and "total files" beside them."""
    lines: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        count = path.read_bytes().count(b"\n")
        lines[path.parent.relative_to(SOURCE).as_posix()] += count
        lines["total lines"] += count
        lines["total files"] += 1
    return dict(lines)


def ceilings() -> dict[str, int]:
    return tomllib.loads(TABLE.read_text())


def faults(sizes: Mapping[str, int], ceilings: Mapping[str, int]) -> list[str]:
    found = []
    lower = "lower the ceiling: python tests/budgets.py --write"
    for name in sorted(sizes.keys() | ceilings.keys()):
        size, ceiling = sizes.get(name, 0), ceilings.get(name)
        if ceiling is None:
            found.append(f"{name}: {size}, and no ceiling: python tests/budgets.py --write")
        elif size > ceiling:
            remedy = f"remove lines, or raise it in {TABLE.name} and give the reason in the commit"
            found.append(f"{name}: {size}, above its ceiling of {ceiling}; {remedy}")
        elif size < ceiling * (1 - SLACK):
            found.append(f"{name}: {size}, more than {SLACK:.0%} below its ceiling of {ceiling}; {lower}")
    return found


def lowered(sizes: Mapping[str, int], ceilings: Mapping[str, int]) -> dict[str, int]:
    """A new folder gets a ceiling, one that is gone loses it; no other rises, that of the total included."""
    return {name: min(int(size * (1 + ROOM)), ceilings.get(name, sys.maxsize)) for name, size in sizes.items()}


def write(ceilings: Mapping[str, int]) -> None:
    TABLE.write_text(HEAD + "".join(f'"{name}" = {ceilings[name]}\n' for name in sorted(ceilings)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write(lowered(sizes(), ceilings() if TABLE.exists() else {}))
    print("\n".join(faults(sizes(), ceilings())) or "every folder is within its budget")
