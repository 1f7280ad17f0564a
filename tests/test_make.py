"""`make test` runs two passes. It must fail if either fails, and the second runs even if the first fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Stands in for the interpreter: notes each call, and fails the pass that FAILS names.
PYTHON = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in *"-m $FAILS"*) exit 1;; esac
"""


@pytest.mark.parametrize(("fails", "status"), [("nothing", 0), ("not timing", 2), ("timing", 2)])
def test_make_test_runs_both_passes_and_fails_if_one_does(tmp_path: Path, fails: str, status: int) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--old-file=setup", f"BIN={tmp_path}", "test"],
        cwd=ROOT, env={"PATH": "/usr/bin:/bin", "FAILS": fails}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    parallel, serial = (tmp_path / "calls").read_text().splitlines()
    assert parallel == "-m pytest -m not timing --numprocesses 2 --dist worksteal"
    passes, files = serial.split(" tests/", 1)
    assert passes == "-m pytest -m timing"
    assert f"tests/{Path(__file__).name}" not in files.split()
    assert "telemetry/test_recorder.py" in files
