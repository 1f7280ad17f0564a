"""Every example runs as it stands, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_prints(path: Path) -> None:
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example that shows nothing"


def test_examples_are_short() -> None:
    assert [path.name for path in EXAMPLES if len(path.read_text(encoding="utf-8").splitlines()) >= 60] == []
