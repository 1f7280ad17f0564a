"""`reflex trace`: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from reflex_runtime.cli import main
from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe.journal_writer import JournalWriter
from reflex_runtime.run.batched import batched

GROUPS = [GroupConfig(name=name, flush=FlushPolicy.by_size(2, 0.0), cost=UnitCost) for name in ("a", "b")]


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """100 batches in two groups; request 30 fails, the rest is answered."""
    scheduler, now = Scheduler(GROUPS), 0.0
    with JournalWriter(tmp_path / "run.jsonl", GROUPS, clock=lambda: 0.0) as writer:
        for i in range(100):
            group = "a" if i % 4 else "b"
            for k in range(1 + i % 2):
                client = "robot_bad" if i == 30 else f"robot_{k}"
                scheduler.submit(Request(id=f"act_{i}_{k}", group=group, client=client), now)
            now += 0.005
            batch = scheduler.next_batch(now)
            assert batch is not None
            ends = [Failed(ProcessorError("no")) if i == 30 else Done() for _ in batch.grants]
            scheduler.complete(batch, ends, 0.02, now + 0.02)
            now += 0.02
            for event in scheduler.take_events():
                writer(event)
    return tmp_path / "run.jsonl"


def run(*argv: object) -> int:
    return main(["trace", *map(str, argv)])


def test_l10_a_table_a_summary_and_two_pictures(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file) == 0
    out = capsys.readouterr().out
    assert "; a, b: no budget, at most 2 requests" in out
    assert "▸robot_0" in out
    assert "measured" in out
    assert out.count("predicted") == 1  # in the summary; there is no such column, because nothing was
    assert "… 60 batches left out" in out
    assert "100 batches, 1.50 members each on average" in out
    assert "why: idle 50, size_reached 50" in out
    assert "wait ms: p50 5.0, p90 5.0, p99 5.0, longest 5.0, over 150 that entered" in out
    assert "not answered: failed 1" in out
    for kind in ("svg", "png"):
        picture = file.with_name(f"run.{kind}")
        assert f"wrote {picture}" in out
        assert picture.stat().st_size > 10_000
    assert "\x1b[" not in out


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_a_picture_has_the_name_of_its_file_without_the_suffix(file: Path, name: str) -> None:
    data = file.read_bytes()
    other = file.with_name(name)
    other.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert run(other, "--last", 5) == 0
    assert {path.name for path in file.parent.glob("a.*")} == {name, "a.png", "a.svg"}


def test_asked_for_rows_are_all_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file, "--last", 60, "--no-picture") == 0
    out = capsys.readouterr().out
    assert "left out" not in out
    ids = [line.split()[0] for line in out.splitlines() if line.split()[1:2] and "▸" in line]
    assert ids == [str(i) for i in range(41, 101)]
    assert len(list(file.parent.iterdir())) == 1  # no picture


def test_a_window_and_a_group(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file, "--from", 10, "--to", 17, "--group", "b", "--out", file.with_name("w"), "--no-color") == 0
    out = capsys.readouterr().out
    ids = [line.split()[0] for line in out.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert ids == ["13", "17", "2"]  # two rows, and the summary's count
    assert file.with_name("w.svg").exists()


@pytest.mark.parametrize("columns", [80, 100])
def test_the_table_fits_a_narrow_terminal(
    tmp_path: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy in two stages with a long partition, fourteen robots a batch."""
    partition = "image[64,64,3] tokens[8] state[4] actions[16,4]"
    made = []
    for i in range(1, 61):
        clients = [f"r{k}" for k in range(14)] if i % 2 else ["127.0.0.1 #3", "::1 #4"]
        members = [
            {"seq": 14 * i + k, "id": f"act-{k}", "client": client, "units": 1.0, "asked": 1.0, "age": 0.001 * k,
             "state": "waiting" if i % 3 else "resident", "outcome": "done"}
            for k, client in enumerate(clients)
        ]  # fmt: skip
        made.append({
            "kind": "batch", "id": i, "group": "prod", "partition": partition, "stage": ("denoise", "prefix")[i % 2],
            "reason": "budget_reached", "cause": "size_reached", "at": 100.0 + i, "finished": 100.0123 + i,
            "elapsed": 0.0123, "expected": 0.0119, "cost": 0.0119, "unit": "seconds", "size": len(members), "queued": 0,
            "crashed": False, "left": [], "notes": {}, "members": members,
        })  # fmt: skip
    head = {
        "kind": "header", "schema_version": 2, "started_at": "2026-01-01T00:00:00.000Z", "origin": 0.0,
        "reflex_version": "0", "python_version": "3",
        "groups": {"prod": {"unit": "seconds", "budget": 0.1, "max_size": 256}},
    }  # fmt: skip
    foot = {"kind": "footer", "ended_at": "2026-01-01T00:00:09.000Z", "total_requests": 0, "batches": 60, "dropped": 0}
    path = tmp_path / "n.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *made, foot]))
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(path, "--no-picture") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"every batch: group prod, partition {partition}"
    rows = [line for line in lines if line.split()[:1] and line.split()[0].isdigit() and "size_reached" in line]
    rows = [row for row in rows if "batch" not in row]
    assert len(rows) == 40  # each on one line
    assert max(len(row.rstrip()) for row in rows) <= columns
    assert "▸r0 ▸r1 " in rows[0]
    assert "…+" in rows[0]
    assert "11.9/12.3" in rows[0]
    assert "127.0.0.1 #3" in rows[1]
    assert all("image[" not in row for row in rows)
    assert "queued" not in "".join(lines[2:4])  # always zero
    assert "stage" in lines[3]


def test_calls_that_run_again_in_parts_are_no_loss_and_no_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def batch(number: int, elapsed: float, apart: bool) -> dict[str, object]:
        member = {"seq": 1, "id": "a", "client": "c", "units": 1.0, "asked": 1.0, "state": "waiting", "age": 0.0}
        return {
            "kind": "batch", "id": number, "group": "prod", "reason": "timeout", "cause": "idle", "at": 1.0 * number,
            "finished": number + elapsed, "elapsed": elapsed, "expected": 0.01, "cost": 0.01, "unit": "seconds",
            "size": 1, "queued": 0, "apart": apart, "members": [{**member, "outcome": "apart" if apart else "done"}],
        }  # fmt: skip

    head = {"kind": "header", "schema_version": 2}
    made = [head, batch(1, 0.0001, True), batch(2, 0.01, False)]
    (tmp_path / "apart.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    assert run(tmp_path / "apart.jsonl", "--no-picture") == 0
    out = capsys.readouterr().out
    assert "predicted ÷ measured: median 1.00, p10 1.00, p90 1.00, over 1 batch\n" in out
    assert "not answered" not in out


def test_steps_of_a_group_with_a_budget_of_zero_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    member = {"seq": 1, "id": "a", "client": "c", "units": 4.0, "asked": 4.0, "state": "waiting", "age": 0.0}
    step = {
        "kind": "batch", "id": 1, "group": "llm", "reason": "timeout", "cause": "step", "at": 1.0, "finished": 1.1,
        "elapsed": 0.1, "expected": None, "cost": 4.0, "unit": "tokens", "size": 1, "queued": 0,
        "members": [{**member, "computed": 0.0, "known": 4.0, "outcome": "done"}],
    }  # fmt: skip
    head = {"kind": "header", "schema_version": 2, "groups": {"llm": {"unit": "tokens", "budget": 0, "max_size": 8}}}
    (tmp_path / "z.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(step)}\n")
    assert run(tmp_path / "z.jsonl", "--no-picture") == 0
    assert "1 step, 4 tokens: mean 4.0 a step, peak 4\n" in capsys.readouterr().out


def test_steps_whose_call_failed_are_lost_and_break_no_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(number: int, **member: object) -> dict[str, object]:
        told = {"seq": 1, "id": "a", "client": "c", "units": 4.0, "asked": 4.0, "age": 0.0, "computed": 0, "known": 4}
        return {
            "kind": "batch", "id": number, "group": "llm", "reason": "timeout", "cause": "step", "at": 1.0 * number,
            "finished": number + 0.1, "elapsed": 0.1, "expected": None, "cost": 4.0, "unit": "tokens", "size": 1,
            "queued": 0, "apart": member["outcome"] == "apart", "members": [{**told, **member}],
        }  # fmt: skip

    made = [{"kind": "header", "schema_version": 2, "groups": {"llm": {"unit": "tokens", "budget": 8, "max_size": 8}}}]
    made += [step(1, state="waiting", outcome="apart"), step(2, state="resident", outcome="done")]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    assert run(tmp_path / "s.jsonl", "--no-picture") == 0
    out = capsys.readouterr().out
    assert "8 of them prefill, 0 decode, 4 lost to 1 failed call\n" in out
    assert "− cached: holds for all 1 request\n" in out


def test_groups_with_equal_ceilings_stand_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = {
        name: {"unit": "seconds", "budget": 0.1, "max_size": size} for name, size in (("a", 8), ("b", 4), ("c", 8))
    }
    head = {"kind": "header", "schema_version": 2, "started_at": "then", "reflex_version": "0", "groups": groups}
    (tmp_path / "g.jsonl").write_text(json.dumps(head) + "\n")
    assert run(tmp_path / "g.jsonl", "--no-picture") == 0
    ceilings = "a, c: budget 0.1 seconds, at most 8 requests; b: budget 0.1 seconds, at most 4 requests"
    assert capsys.readouterr().out.splitlines()[0].endswith(f"started then, reflex 0; {ceilings}")


def test_colours_on_a_terminal(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert run(file, "--last", 1, "--no-picture") == 0
    assert "48;2;136;204;238" in capsys.readouterr().out  # the first colour of the picture
    assert run(file, "--last", 1, "--no-picture", "--no-color") == 0
    assert "48;2" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--last", "0"], "--last=0: must be a whole number >= 1"),
        (["--last", "few"], "--last=few: must be a whole number >= 1"),
        (["--from", "-3"], "--from=-3: must be a whole number >= 0"),
        (["--from", "9", "--to", "8"], "--to=8: must be >= --from, which is 9"),
        (["--from", "900"], "--from=900: leaves no batch; ids here are in [1, 100]"),
        (["--group", "c"], "--group=c: not in this trace, which has a, b"),
        (["--out", "/dev/null/p"], "--out=/dev/null/p: cannot be written: Not a directory"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(
    file: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run(file, *argv)
    except SystemExit as error:  # argparse's own
        status = int(error.code or 0)
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"reflex trace: {says}")
    assert err.count("\n") == 1


def test_an_unreadable_trace_is_exit_1_with_file_and_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes().replace(b'"id":5,', b'"id":5,"gr\n', 1))
    assert run(file) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"reflex trace: {file}, line 6: not a whole line, and others follow it\n"


def test_a_trace_without_batches_or_footer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0])
    assert run(file) == 0
    assert "no batches" in capsys.readouterr().out
    assert len(list(file.parent.iterdir())) == 1
    file.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    assert run(file, "--no-picture") == 0
    out = capsys.readouterr().out
    assert "3 batches" in out
    assert "the trace has no footer and its last line is cut off" in out


def test_dropped_batches_are_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes().replace(b'"dropped":0', b'"dropped":7'))
    assert run(file, "--no-picture") == 0
    assert "7 lines were not written" in capsys.readouterr().out


def test_help_is_worth_reading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    out = capsys.readouterr().out
    for text in ("examples:", "--last N", "exit codes: 0 fine, 1"):
        assert text in out


def test_a_batched_function_has_no_units_and_no_guessed_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = batched(lambda items: [2 * item for item in items])
    with JournalWriter(str(tmp_path / "b.jsonl")) as trace:
        twice.add_sink(trace)
        assert twice(1) == 2
        twice.close()
    assert run(tmp_path / "b.jsonl", "--no-picture", "--no-color") == 0
    out = capsys.readouterr().out
    assert re.search(r" idle +1 +▸#0 +\d+\.\d +\d", out), out
    assert "1 batch, 1.00 members" in out
    assert "nothing was predicted" in out
