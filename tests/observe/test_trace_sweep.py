"""`reflex trace --sweep`: the figures against the schedule itself, the knee, the refusal."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from PIL import Image

from reflex_runtime.cli import main
from reflex_runtime.llm import SamplingParams, trace_batches
from reflex_runtime.llm.engine.prompts import Measured, Prompt, Setup, budgets_of, knee, measured
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.observe import trace_tables

L3 = ("--prompts", "hello world", "goodbye")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["trace", *argv]) == 0
    return capsys.readouterr().out


def rows(out: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in out.splitlines() if re.match(r" *\d+  ", line)]


# -- sweep -------------------------------------------------------------------------------------------------------------


def test_l3_l10_steps_over_budget(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *L3, "--sweep", "4..64")
    table = {int(row[0]): row[1:] for row in rows(out)}
    steps = [int(table[max(b for b in table if b <= budget)][0]) for budget in (4, 8, 11, 16, 18, 64)]
    assert steps == [8, 6, 5, 5, 4, 4]
    assert table[4] == ["8", "4", "3.0", "25%", "3 / 5"]
    assert table[7] == ["6", "7", "4.0", "43%", "2 / 3"]
    assert table[11] == ["5", "11", "4.8", "56%", "1 / 2"]
    assert table[18] == ["4", "18", "6.0", "67%", "1 / 1", "◀ knee"]
    assert table[64] == ["4", "18", "6.0", "91%", "1 / 1"]
    assert sorted(table) == [4, 5, 6, 7, 9, 11, 18, 64]
    assert "knee at 18: a larger budget saves no step (4 steps, as without a limit)" in out
    assert os.listdir() == []


def test_every_budget_of_a_short_sweep_is_what_the_schedule_is(capsys: pytest.CaptureFixture[str]) -> None:
    table = {int(row[0]): row[1:] for row in rows(run(capsys, *L3, "--sweep", "4..19"))}
    assert sorted(table) == [*range(4, 20)]
    for budget, row in table.items():
        ids, schedule = trace_batches(L3[1:], 4, max_num_batched_tokens=budget)
        sizes = [sum(step.values()) for step in schedule]
        first = []
        for name, prompt in zip(ids, L3[1:], strict=True):
            so_far = 0
            for number, step in enumerate(schedule, 1):
                so_far += step.get(name, 0)
                if so_far >= len(prompt):
                    first.append(number)
                    break
        assert row[:3] == [str(len(sizes)), str(max(sizes)), f"{sum(sizes) / len(sizes):.1f}"]
        assert row[3] == f"{1 - sum(sizes) / (budget * len(sizes)):.0%}"
        assert row[4] == f"{min(first)} / {max(first)}"


def test_l10_the_sweep_is_drawn_and_names_the_knee(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_tables, "DPI", 200)  # as everybody has it
    out = run(capsys, *L3, "--sweep", "4..64", "-o", "s")
    assert out.endswith("wrote s.svg\nwrote s.png\n")
    svg = Path("s.svg").read_text()
    for text in ("knee at 18: a larger budget saves no step", 'id="knee"', 'id="steps"'):
        assert text in svg
    with Image.open("s.png") as image:
        assert image.size == (1800, 800)
        assert (204, 102, 119) in {c for _, c in image.convert("RGB").getcolors(1 << 24) or []}
    before = Path("s.svg").read_bytes(), Path("s.png").read_bytes()
    run(capsys, *L3, "--sweep", "4..64", "-o", "s")
    assert (Path("s.svg").read_bytes(), Path("s.png").read_bytes()) == before


def test_other_flags_hold_in_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *L3, "--sweep", "64..64", "--max-num-seqs", "1", "--max-tokens", "2")
    assert rows(out)[0][:2] == ["64", "4"]


def run_of(budget: int, steps: int) -> Measured:
    return Measured(budget, [1] * steps, [1])


def test_the_knee_is_where_more_buys_nothing() -> None:
    runs = [run_of(b, s) for b, s in ((1, 100), (2, 50), (4, 26), (8, 14), (16, 9), (32, 8), (64, 8))]
    assert knee(runs, floor=8) == 32
    assert knee(runs[:5], floor=8) is None
    assert knee([run_of(b, s) for b, s in ((1, 9), (2, 8), (3, 9), (4, 8))], floor=8) == 4
    assert knee([run_of(5, 8)], floor=8) == 5


def test_a_sweep_that_ends_before_the_knee_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no knee up to 8: 6 steps there, 4 without a limit" in run(capsys, *L3, "--sweep", "4..8")


def test_a_sweep_is_read() -> None:
    assert budgets_of("4..64") == list(range(4, 65))
    assert budgets_of("7..7") == [7]
    many = budgets_of("64..4096")
    assert (len(many), many[0], many[21], many[-1]) == (64, 64, 256, 4096)
    assert len(budgets_of("1..1048576")) < 64


def test_a_run_is_what_the_schedule_is_and_a_prompt_that_comes_later_waits() -> None:
    """On an engine of its own each time, whose runner stays."""
    texts, params = ("hello world", "goodbye"), SamplingParams.greedy(4, ignore_eos=True)
    setup = Setup(ToyRunner(), ByteTokenizer(), None, {})
    _, schedule = trace_batches(texts, 4, max_num_batched_tokens=8)
    both = [Prompt(text, text, params) for text in texts]
    assert measured(setup, both, 8) == (8, [sum(step.values()) for step in schedule], [2, 3])
    assert measured(setup, both, 8) == measured(setup, both, 8)
    later = [both[0], both[1]._replace(arrives=30)]
    assert measured(setup, later, 64) == (64, [11, 1, 1, 1, 7, 1, 1, 1], [1, 5])


NO_SWEEPS = ["", "4", "4..", "64..4", "0..4", "4..64:2", "1..9999999", "4…64"]


@pytest.mark.parametrize("text", NO_SWEEPS)
def test_what_is_no_sweep_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *L3, f"--sweep={text}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"reflex trace: --sweep={text}: must be LOW..HIGH within [1, 1048576], such as 4..64\n"


def test_a_part_of_many_runs_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *L3, "--sweep", "4..8", "--from", "2"]) == 2
    assert "--from=2: not with --sweep: it shows a part of one trace" in capsys.readouterr().err
