"""`reflex demo-export DIR`: write out the bundled demo policy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reflex_runtime.demo import write_policy


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "demo-export",
        description="Write the bundled demo policy (trained on six Meta-World tasks) to a directory that "
        "`reflex serve` takes.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; must not exist or be empty")
    parser.add_argument("--force", action="store_true", help="write over what is in DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    write_policy(args.directory, args.force)
    print(f"wrote the policy to {args.directory}; serve it with: reflex serve {args.directory}")
    return 0
