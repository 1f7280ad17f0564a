"""`python requirements_of.py NAME [OTHER …]` prints what an installed distribution needs here, without some."""

from __future__ import annotations

import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement


def main(name: str, *without: str) -> None:
    for line in requires(name) or ():
        needed = Requirement(line)
        if needed.name not in without and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            needed.marker = None
            print(str(needed).replace("+cpu", ""))  # the registry may have the other build alone: it works, too


if __name__ == "__main__":
    main(*sys.argv[1:])
