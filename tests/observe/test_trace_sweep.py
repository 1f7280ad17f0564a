"""`reflex trace --sweep`: the figures against the schedule itself, the knee, the refusal."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from PIL import Image

from reflex_runtime.cli import main
from reflex_runtime.cli.trace_prompts import budgets_of
from reflex_runtime.llm import trace_batches
from reflex_runtime.observe import journal_view
from reflex_runtime.sim.tokens import Measured, in_words, knee

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
    out = run(capsys, *L3, "--sweep", "4..64", "--no-picture")
    table = {int(row[0]): row[1:] for row in rows(out)}
    steps = [int(table[max(b for b in table if b <= budget)][0]) for budget in (4, 8, 11, 16, 18, 64)]
    assert steps == [8, 6, 5, 5, 4, 4]
    assert table[4] == ["8", "4", "3.0", "25%", "3 / 5"]
    assert table[7] == ["6", "7", "4.0", "43%", "2 / 3"]
    assert table[11] == ["5", "11", "4.8", "56%", "1 / 2"]
    assert table[18] == ["4", "18", "6.0", "67%", "1 / 1", "◀ knee"]
    assert table[64] == ["4", "18", "6.0", "91%", "1 / 1"]
    assert sorted(table) == [4, 5, 6, 7, 9, 11, 18, 64]
    assert "knee at 18: everything fits, and more budget buys nothing (4 steps, as without a limit)" in out
    assert "sharpest bend" not in out
    assert os.listdir() == []


def test_every_budget_of_a_short_sweep_is_what_the_schedule_is(capsys: pytest.CaptureFixture[str]) -> None:
    table = {int(row[0]): row[1:] for row in rows(run(capsys, *L3, "--sweep", "4..19:5", "--no-picture"))}
    assert sorted(table) == [4, 9, 14, 19]
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
    monkeypatch.setattr(journal_view, "DPI", 200)  # as everybody has it
    out = run(capsys, *L3, "--sweep", "4..64", "-o", "s")
    assert out.endswith("wrote s.svg\nwrote s.png\n")
    svg = Path("s.svg").read_text()
    words = "knee 18", "everything fits, and more budget buys nothing", "4 steps: needed without a limit"
    for text in (*words, 'id="knee"', 'id="steps"'):
        assert text in svg
    assert 'id="bend"' not in svg
    with Image.open("s.png") as image:
        assert image.size == (1800, 1000)
        assert (204, 102, 119) in {c for _, c in image.convert("RGB").getcolors(1 << 24) or []}
    before = Path("s.svg").read_bytes(), Path("s.png").read_bytes()
    run(capsys, *L3, "--sweep", "4..64", "-o", "s")
    assert (Path("s.svg").read_bytes(), Path("s.png").read_bytes()) == before


def test_a_bend_before_the_knee_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--prompts", *("p" * 40,) * 6, "--no-prefix-caching", "--sweep", "8..512:x2", "-o", "s")
    assert "knee at 256: everything fits" in out
    assert "sharpest bend at 32: the curve is farthest below the line between its ends" in out
    assert "◀ sharpest bend" in out
    svg = Path("s.svg").read_text()
    assert "sharpest bend 32" in svg
    assert 'id="bend"' in svg


def test_a_knee_before_everything_fits_does_not_claim_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The steps of a long answer hide those of a prompt in chunks."""
    out = run(capsys, "--prompts", "a", "p" * 30, "--max-tokens", "20,1", "--sweep", "4..64:x2", "--no-picture")
    assert "knee at 4: more budget buys nothing (20 steps, as without a limit)" in out


def test_other_flags_hold_in_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *L3, "--sweep", "64..64", "--max-num-seqs", "1", "--max-tokens", "2", "--no-picture")
    assert rows(out)[0][:2] == ["64", "4"]


def measured(budget: int, steps: int) -> Measured:
    return Measured(budget, [1] * steps, [1], [0.0])


def test_the_knee_is_where_more_buys_nothing() -> None:
    runs = [measured(b, s) for b, s in ((1, 100), (2, 50), (4, 26), (8, 14), (16, 9), (32, 8), (64, 8))]
    found = knee(runs, floor=8)
    assert found.saturated == 32
    assert found.bend == 4  # 1 - 2/6 - 18/92 = 0.47 on the axis of doublings; of 2: 0.38, of 8: 0.43
    assert in_words(found, runs)[1].startswith("sharpest bend at 4")
    assert knee(runs[1:], floor=8).bend == 8  # 1 - 6/62 - 6/42 = 0.76 on a plain one; of 4: 0.54, of 16: 0.75
    short = knee(runs[:5], floor=8)
    assert short.saturated is None
    assert in_words(short, runs[:5])[0] == "no knee up to 16: 9 steps there, 8 without a limit"
    dip = [measured(b, s) for b, s in ((1, 9), (2, 8), (3, 9), (4, 8))]
    assert knee(dip, floor=8).saturated == 4
    assert knee([measured(5, 8)], floor=8) == (5, 8, 5)


def test_a_sweep_is_read() -> None:
    assert budgets_of("4..64") == list(range(4, 65))
    assert budgets_of("4..64:16") == [4, 20, 36, 52, 64]
    assert budgets_of("64..4096:x2") == [64, 128, 256, 512, 1024, 2048, 4096]
    assert budgets_of("2..9:x1.5") == [2, 3, 4, 6, 9]
    assert budgets_of("7..7") == [7]


NO_SWEEPS = ["", "4", "4..", "64..4", "0..4", "4..64:0", "4..64:x1", "1..600", "1..9999999", "4…64"]


@pytest.mark.parametrize("text", NO_SWEEPS)
def test_what_is_no_sweep_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *L3, f"--sweep={text}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"reflex trace: --sweep={text}: must be LOW..HIGH, LOW..HIGH:STEP or LOW..HIGH:xFACTOR within [1, 1048576], "
        "of at most 512 budgets, such as 4..64 or 64..4096:x2\n"
    )


def test_a_part_of_many_runs_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *L3, "--sweep", "4..8", "--from", "2"]) == 2
    assert "--from=2: shows a part of one trace; --sweep makes many runs" in capsys.readouterr().err
