"""The benchmarks start: a name that they use and that is gone shows here, not when somebody measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.__main__ import CASES


def test_the_command_knows_its_cases() -> None:
    command = [sys.executable, "-m", "bench", "--help"]
    root = Path(__file__).resolve().parent.parent
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, timeout=60).stdout
    assert all(case in told for case in CASES)
