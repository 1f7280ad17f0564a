"""`reflex trace --prompts`: the step table row by row, the pictures, and that every flag does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from reflex_runtime.cli import main
from reflex_runtime.llm.engine.prompts import letters
from reflex_runtime.observe import trace_tables
from reflex_runtime.observe.journal import read_journal

L3 = ("--prompts", "hello world", "goodbye", "--max-num-batched-tokens", "8")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")


def shown(capsys: pytest.CaptureFixture[str], *argv: str, pictures: bool = False) -> list[str]:
    kept = ["--out", "trace"] if "--prompts" in argv and not {"--out", "-o"} & set(argv) else []
    assert main(["trace", *argv, *kept, *([] if pictures else ["--no-picture"])]) == 0
    return capsys.readouterr().out.splitlines()


def rows(lines: list[str]) -> list[str]:
    """The rows of the step table, spaces between columns as one bar."""
    found = [line for line in lines if re.match(r" *\d+ +\d+/\d+ ", line)]
    return [re.sub(r" {2,}", " | ", line.strip()) for line in found]


def steps(file: str = "trace.jsonl") -> list[dict[str, float]]:
    return [{m.id: m.units for m in b.members} for b in read_journal(file).batches]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_l3_l10_the_step_table_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *L3)
    assert rows(lines) == [
        "1 | 8/8 | ▸A prefill 8 · 0/11 | B: budget spent | 1 | 2.40",
        "2 | 8/8 | A prefill 3 · 8/11 | ▸B prefill 5 · 0/7 | 2 | 2.40",
        "3 | 3/8 | A decode · 11/12 | B prefill 2 · 5/7 | 2 | 2.15",
        "4 | 2/8 | A decode · 12/13 | B decode · 7/8 | 2 | 2.10",
        "5 | 2/8 | A decode · 13/14 | B decode · 8/9 | 2 | 2.10",
        "6 | 1/8 | B decode · 9/10 | 1 | 2.05",
    ]
    text = "\n".join(lines)
    for told in (
        "waited: why",
        "of 4096",
        "modelled",
        "6 steps, 24 tokens: mean 4.0 a step, peak 8; 50% of the budget of 8",
        "18 of them prefill, 6 decode",
        "requests waited in 1 step: budget spent 1",
        "first token after p50 4.8 ms, longest 6.9 ms; gap between tokens p50 2.1 ms, longest 2.1 ms "
        "(modelled: a step takes 2 ms + 0.05 ms a token)",
        "scheduled − recomputed = prompt + outputs − 1 − cached: holds for all 2 requests",
        ' A  "hello world" 11 + 4 tokens, first in step 2 → "etip"',
        ' B  "goodbye" 7 + 4 tokens, first in step 3 → "budi"',
        "wrote trace.jsonl",
    ):
        assert told in text
    assert "↩" not in text
    assert "\x1b[" not in text


def test_l10_a_trace_read_back_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *L3)
    again = shown(capsys, "trace.jsonl")
    assert again == [line for line in lines if not line.startswith((" A ", " B ", "wrote"))]
    assert rows(shown(capsys, "trace.jsonl", "--from", "3", "--to", "4")) == rows(lines)[2:4]


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_the_step_table_fits_its_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown(capsys, "--prompts", *(f"prompt number {i}" for i in range(12)), "--max-num-batched-tokens", "40")
    table = rows(lines)
    assert len(table) == 9
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("step"))
    body = lines[start : start + 1 + len(table)]
    assert max(len(line.rstrip()) for line in body) <= columns
    first = {60: "▸A p15   ▸B p15  …+1", 160: "▸A prefill 15 · 0/15   ▸B prefill 15 · 0/15   ▸C prefill 10 · 0/15"}
    assert first.get(columns, "▸A p15 0/15   ▸B p15 0/15   ▸C p10 0/15") in body[1]
    assert ("…+" in "".join(body)) == (columns < 160)
    assert ("modelled" in "".join(lines[: start + 1])) == (columns >= 100)


def test_colours_tell_requests_and_decode_apart_and_can_be_switched_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = "\n".join(shown(capsys, *L3))
    for face in ("136;204;238", "204;102;119", "210;236;249", "236;197;203"):  # A and B, dark and pale
        assert f"48;2;{face}" in out
    assert "48;2" not in "\n".join(shown(capsys, *L3, "--no-color"))


def test_long_runs_show_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--prompts", "a", "--max-tokens", "60")
    assert "… 20 steps left out …" in "\n".join(lines)
    assert len(rows(lines)) == 40
    assert len(rows(shown(capsys, "trace.jsonl", "--last", "50"))) == 50


# -- the pictures ------------------------------------------------------------------------------------------------------


def test_l10_the_picture_is_drawn_and_the_same_run_gives_the_same_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_tables, "DPI", 200)  # as everybody has it
    lines = shown(capsys, *L3, "-o", "one", pictures=True)
    assert lines[-3:] == ["wrote one.jsonl", "wrote one.svg", "wrote one.png"]
    svg = Path("one.svg").read_text()
    for told in ("▸A 8", "▸B 5", "A 3", "B 2", "budget 8 tokens", "dark prefill, pale decode", "budget spent 1"):
        assert told in svg
    faces = re.findall(r'id="grant-(\d+-\d+)">\s*<path[^>]*style="fill: (#\w+)', svg)
    assert dict(faces) == {
        "1-0": "#88ccee", "2-0": "#88ccee", "2-1": "#cc6677", "3-0": "#d2ecf9", "3-1": "#cc6677",
        "4-0": "#d2ecf9", "4-1": "#ecc5cb", "5-0": "#d2ecf9", "5-1": "#ecc5cb", "6-1": "#ecc5cb",
    }  # fmt: skip
    with Image.open("one.png") as image:
        assert image.size == (1800, 1200)
        seen = {c for _, c in image.convert("RGB").getcolors(1 << 24) or []}
    assert {(136, 204, 238), (204, 102, 119), (210, 236, 249), (236, 197, 203)} <= seen
    shown(capsys, *L3, "-o", "two", pictures=True)
    for kind in ("svg", "png"):
        assert Path(f"one.{kind}").read_bytes() == Path(f"two.{kind}").read_bytes()


def test_the_picture_marks_preemptions_and_says_who_waited(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ("a" * 10, "b" * 10)
    lines = shown(
        capsys, "--prompts", *prompts, "--max-tokens", "10", "--block-size", "4", "--num-blocks", "8", pictures=True
    )
    svg = Path("trace.svg").read_text()
    thrown = [b.id for b in read_journal("trace.jsonl").batches if b.left]
    assert re.findall(r'id="preempted-(\d+)"', svg) == [str(i) for i in thrown]
    for told in ("↩B", "↩ preempted before the step", "no blocks free", "preempted"):
        assert told in svg
    assert any("↩B: no blocks free | B |" in row for row in rows(lines))
    assert "↩ preempted, waits to come back" in "\n".join(lines)
    assert re.search(r"lost to 1 preemption[;\n]", "\n".join(lines))


def test_many_texts_show_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--prompts", *"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG", "--max-tokens", "1")
    assert "… 3 texts left out …" in lines
    assert sum(" → " in line for line in lines) == 40


# -- the flags ---------------------------------------------------------------------------------------------------------


def test_max_tokens_is_how_many_each_says(capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "--prompts", "ab", "--max-tokens", "3")
    assert steps() == [{"A": 2}, {"A": 1}, {"A": 1}]
    shown(capsys, "--prompts", "ab", "cd", "--max-tokens", "2,1")
    assert steps() == [{"A": 2, "B": 2}, {"A": 1}]


def test_max_num_seqs_bounds_who_is_in(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--prompts", "ab", "cd", "--max-tokens", "1", "--max-num-seqs", "1")
    assert steps() == [{"A": 2}, {"B": 2}]
    assert "B: no place (max_num_seqs)" in rows(lines)[0]


@pytest.mark.parametrize(("threshold", "peak"), [("0", 257), ("32", 33)])
def test_l6_the_threshold_bounds_the_step_a_long_prompt_lands_in(
    capsys: pytest.CaptureFixture[str], threshold: str, peak: int
) -> None:
    landing = ("--prompts", "hi", "y" * 256, "--at", "0,4", "--max-tokens", "12")
    lines = shown(capsys, *landing, "--long-prefill-token-threshold", threshold)
    assert max(sum(step.values()) for step in steps()) == peak
    assert list(steps()[3]) == ["A"]
    assert list(steps()[4]) == ["A", "B"]
    assert f"peak {peak}" in "\n".join(lines)


@pytest.mark.parametrize(("flags", "scheduled"), [((), 96), (("--no-prefix-caching",), 544)])
def test_l6_prefix_caching_computes_a_shared_prefix_once(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], scheduled: int
) -> None:
    prompts = [f"{'system ' * 9}!{i:04}" for i in range(8)]
    assert {len(p) for p in prompts} == {68}
    lines = shown(capsys, "--prompts", *prompts, "--max-tokens", "1", "--at", "0,1,2,3,4,5,6,7", *flags)
    assert sum(sum(step.values()) for step in steps()) == scheduled
    text = "\n".join(lines)
    assert ("448 more found in the prefix cache" in text) == (not flags)
    assert ("B 64" in text) == (not flags)


def test_block_size_and_num_blocks_are_the_caches(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--prompts", "x" * 20, "--block-size", "4", "--num-blocks", "6", "--max-tokens", "2")
    assert "of 6" in "\n".join(lines)
    assert [row.split(" | ")[-2] for row in rows(lines)] == ["5", "6"]


def test_at_is_when_each_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    """In steps; where nothing is left to run, the next one comes at once, and those behind it as much later."""
    shown(capsys, "--prompts", "a", "b", "c", "d", "--at", "2,0,9,10", "--max-tokens", "3,3,2,1")
    assert steps() == [{"B": 1}, {"B": 1}, {"B": 1, "A": 1}, {"A": 1}, {"A": 1}, {"C": 1}, {"C": 1, "D": 1}]


def test_priority_is_of_all_or_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompts", "aa", "bb", "--max-num-seqs", "1", "--max-tokens", "1")
    shown(capsys, *flags, "--priority", "background,urgent")
    assert steps() == [{"B": 2}, {"A": 2}]
    shown(capsys, *flags, "--priority", "urgent")
    assert steps() == [{"A": 2}, {"B": 2}]


def test_prompts_come_from_a_file_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hello world\n\ngoodbye\n")
    shown(capsys, "--prompts", "@p.txt", "third", "--max-tokens", "1")
    assert steps() == [{"A": 11, "B": 7, "C": 5}]


def test_out_is_where_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, *L3, "--out", "here")
    assert sorted(os.listdir()) == ["here.jsonl"]


def test_model_is_what_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded as `reflex serve` loads it; blocks are asked for only where the caller did; times are measured."""
    from reflex_runtime.demo import SCRIBE
    from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner

    asked: list[tuple[Any, ...]] = []

    def load(directory: Path, **options: Any) -> tuple[Any, Any]:
        asked.append((directory, options))
        return ToyRunner(num_blocks=99), ByteTokenizer()

    monkeypatch.setattr("reflex_runtime.llm.engine.load.load", load)
    text = "\n".join(shown(capsys, *L3, "--model", "."))
    shown(capsys, *L3, "--model", ".", "--num-blocks", "7")
    shown(capsys, *L3, "--model", "scribe")
    assert asked == [(Path(), {}), (Path(), {"num_blocks": 7}), (SCRIBE, {})]
    assert "of 99" in text
    assert "measured" in text
    assert '"etip"' in text


def test_a_model_that_is_none_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *L3, "--model", "no/such/dir"]) == 2
    assert "no/such/dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "FILE: is missing; give a trace, or --prompts TEXT …"),
        (["x.jsonl", "--prompts", "a"], "FILE=x.jsonl: not with --prompts; leave one of them out"),
        (["x.jsonl", "--max-tokens", "4"], "--max-tokens=4: only with --prompts"),
        (["x.jsonl", "--sweep", "4..8"], "--sweep=4..8: only with --prompts"),
        (["--prompts", ""], "--prompts='': must have at least one character"),
        (["--prompts", "@no.txt"], "--prompts=@no.txt: No such file or directory"),
        (["--prompts", "@empty.txt"], "--prompts: there are 0; must be in [1, 10000]"),
        (["--prompts", "@binary.txt"], "--prompts=@binary.txt: not UTF-8 at byte 0"),
        (["--prompts", "a", "--max-tokens", "0"], "--max-tokens=0: must be a whole number in [1, 65536]"),
        (["--prompts", "a", "--max-tokens", "x"], "--max-tokens=x: must be a whole number in [1, 65536]"),
        (["--prompts", "a", "--max-tokens", "1,2"], "--max-tokens=1,2: must be a whole number in [1, 65536]"),
        (["--prompts", "a", "--max-tokens", "65537"], "--max-tokens=65537: must be a whole number in [1, 65536]"),
        (["--prompts", "a", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens=0: must be in [1, 1048576]"),
        (["--prompts", "a", "--max-num-seqs", "0"], "--max-num-seqs=0: must be in [1, 65536]"),
        (
            ["--prompts", "a", "--long-prefill-token-threshold", "-1"],
            "--long-prefill-token-threshold=-1: must be in [0, 1048576]",
        ),
        (["--prompts", "a", "--block-size", "0"], "--block-size=0: must be in [1, 65536]"),
        (["--prompts", "a", "--num-blocks", "0"], "--num-blocks=0: must be in [1, 4194304]"),
        (["--prompts", "a", "b", "--at", "0,1,2"], "--at=0,1,2: must be a whole number in [0, 9"),
        (["--prompts", "a", "--at=-1"], "--at=-1: must be a whole number in [0"),
        (
            ["--prompts", "a", "--priority", "now"],
            "--priority=now: must be one of urgent, default, background",
        ),
        (["--prompts", "a", "--last", "0"], "--last=0: must be a whole number >= 1"),
        (["--prompts", "a", "--out", "/dev/null/p"], "--out=/dev/null/p: cannot be written: Not a directory"),
        (["--prompts", "abcdefghi", "--block-size", "2", "--num-blocks", "2"], "9 prompt tokens and 4 of the answer"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\n")
    try:
        status = main(["trace", *argv])
    except SystemExit as error:  # argparse's own
        status = int(error.code or 0)
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"reflex trace: {says}")
    assert err.count("\n") == 1


def test_the_command_itself(tmp_path: Path) -> None:
    """Installed, in a process of its own, where the output is no terminal."""
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    argv = [str(Path(sys.executable).with_name("reflex")), "trace", *L3, "--no-picture"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "nothing was written; --out PREFIX keeps the trace and draws it\n")
    assert rows(done.stdout.splitlines())[2] == "3 | 3/8 | A decode · 11/12 | B prefill 2 · 5/7 | 2 | 2.15"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("more", [(), ("--sweep", "4..8")])
def test_nothing_is_written_that_was_not_asked_for(more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *L3, *more]) == 0
    assert os.listdir() == []


def test_what_a_run_before_left_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, *L3)
    first = Path("trace.jsonl").read_bytes()
    shown(capsys, *L3, "--max-tokens", "9")
    assert Path("trace.jsonl.1").read_bytes() == first
    assert Path("trace.jsonl").read_bytes() != first


def test_names_are_letters() -> None:
    assert [letters(i) for i in (0, 1, 25, 26, 27, 51, 52, 701, 702)] == [
        "A", "B", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA"
    ]  # fmt: skip
