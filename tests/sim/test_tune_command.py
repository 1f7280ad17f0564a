"""`reflex tune` as typed."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from reflex_runtime.cli import main
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.sim import Affine, Around, Callers, Noisy
from sim.journals import journal_of, write

DEVICE = Noisy(Affine(0.020, 0.002), 0.03)


def journal(path: Path, hold: float = 0.0, callers: int = 8, think: float = 0.003) -> Path:
    group = GroupConfig(flush=FlushPolicy.window(0.1, hold))
    return write(journal_of(group, Callers(callers, Around(think, think / 3)), DEVICE, 4.0)[0], path / "run.jsonl")


def test_it_says_what_to_set_and_what_comes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = journal(tmp_path)
    assert main(["tune", str(file), "--picture", str(tmp_path / "new" / "tuned")]) == 0
    printed = capsys.readouterr()
    assert "8 callers wait for their answer, then" in printed.out
    assert "budget 100 ms, hold \u2264 0 ms, size \u2264 256" in printed.out
    (line,) = [line for line in printed.out.splitlines() if line.startswith("set ")]
    assert "--batch-timeout-ms" in line
    now, then = (float(cell) for cell in row(printed.out, "answers/s")[:2])
    assert then > 1.2 * now
    assert all((tmp_path / "new" / f"tuned.{kind}").stat().st_size > 10_000 for kind in ("svg", "png"))
    assert "wrote " in printed.err


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_it_says_when_nothing_helps_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(journal(tmp_path, inf, 2, 0.9))]) == 0
    out = capsys.readouterr().out
    assert "Nothing to change: there is no load" in out
    assert "set " not in out


def test_aim_is_what_is_improved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(journal(tmp_path, inf, 2, 0.9))
    assert main(["tune", file]) == 0
    assert "\naim       p95\n" in capsys.readouterr().out
    assert main(["tune", file, "--aim", "throughput"]) == 0
    assert "\naim       throughput\n" in capsys.readouterr().out
    assert main(["tune", file, "--aim", "p97"]) == 2
    assert capsys.readouterr().err == "reflex tune: --aim=p97: must be one of p50, p95, p99, throughput, on-time\n"


def test_what_is_no_journal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    assert main(["tune", str(tmp_path / "x.jsonl")]) == 1
    assert "not a journal" in capsys.readouterr().err
    assert main(["tune", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
