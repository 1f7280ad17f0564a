"""The reader of journals: what a crash leaves behind is read, what is no journal is refused."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from reflex_runtime.core.batch import RequestAnswered, RequestRejected
from reflex_runtime.core.errors import QueueFull
from reflex_runtime.core.request import Request
from reflex_runtime.observe import journal
from reflex_runtime.observe.journal import JournalError, JournalReader, read_journal

from .test_journal_recording import Run, asked, record, recorder


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    """header, (batch, request) three times, footer."""
    path = record(tmp_path / "whole", *([asked(i)] for i in range(3)), gzip=False)
    return path.read_bytes().splitlines(keepends=True)


def put(tmp_path: Path, lines: Iterable[bytes]) -> Path:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def test_t4_a_missing_footer_blank_lines_and_a_torn_last_line_are_read(tmp_path: Path, lines: list[bytes]) -> None:
    read = read_journal(put(tmp_path, lines[:-1]))
    assert (len(read.requests), read.footer, read.torn) == (3, None, False)
    read = read_journal(put(tmp_path, [lines[0], b"\n", lines[1], b" \n", *lines[2:]]))
    assert (len(read.requests), read.torn) == (3, False)
    last = next(i for i in range(len(lines) - 1, 0, -1) if b'"kind":"request"' in lines[i])
    for cut in (1, 25, len(lines[last]) - 2):
        read = read_journal(put(tmp_path, [*lines[:last], lines[last][:cut]]))
        assert (len(read.requests), read.footer, read.torn) == (2, None, True)


def test_t4_millions_of_blank_lines_are_read_in_chunks(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(lines[0] + b"\n" * 3_000_000 + lines[1] + b" \n" * 1_000_000 + b"x\n" + lines[2]))
    with pytest.raises(JournalError, match=r"line 4000003: not a whole line, and others follow it"):
        read_journal(path)
    assert sum(1 for _ in JournalReader(path)._read) < 1_000_000


def test_t4_a_line_of_spaces_is_joined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Spaces(bytes):
        def isspace(self) -> bool:
            asked.append(self)
            return True

    monkeypatch.setattr(journal, "_parts", lambda path: iter([b" ", b'{"a', *[Spaces(b" ")] * 3, b"\n"]))
    with pytest.raises(JournalError, match="line 1: not a journal: not JSON"):
        read_journal(tmp_path / "r.jsonl")
    assert asked == []  # each answer was a copy of the line so far


def test_t4_causes_of_older_journals_are_read_in_the_words_of_today(tmp_path: Path, lines: list[bytes]) -> None:
    older = {b"timeout": "held", b"budget_reached": "full", b"single_request_over_budget": "over_budget"}
    for word, now in older.items():
        kept = [line.replace(b'"cause":"idle"', b'"cause":"' + word + b'"') for line in lines]
        assert {batch.cause for batch in read_journal(put(tmp_path, kept)).batches} == {now}


WARM = (
    b'{"kind":"warm","slot":"prod","shape":"","cost_class":"","wants":1,"batches":[["",1000000000000,0.1]],"shares":[]}\n'
)
GROUPS = (
    b'{"kind":"header","schema_version":2,"groups":{"prod":{"unit":"seconds","budget":0.1,"max_size":4,'
    b'"cost":{"stages":["prefix"]}}}}\n'
)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda x: [], r"r\.jsonl, line 1: empty, not even a header"),
        (lambda x: [x[0][:30]], "line 1: no whole header"),
        (lambda x: [x[1], x[0]], "line 1: .*not a header"),
        (lambda x: [b"hello\n", *x], "line 1: not a journal: not JSON: .*reflex serve --trace FILE"),
        (lambda x: [b"\n"], "line 1: empty"),
        (lambda x: [b'{"some": "json"}\n', *x], "line 1: not a journal"),
        (lambda x: [x[0], x[-1], x[1]], "line 3: comes after the footer"),
        (lambda x: [x[0], x[1][:40] + b"\n", *x[2:]], "line 2: not a whole line, and others follow it"),
        (lambda x: [x[0], b"\n", x[1], x[2][:-20] + b"\n", *x[3:]], "line 4: not a whole line"),
        (lambda x: [x[0], *x], "line 2: a second header"),
        (lambda x: [*x, x[1]], "line 9: comes after the footer"),
        (lambda x: [x[0], b"[1]\n", *x[1:]], "line 2: not a line of a journal"),
        (lambda x: [x[0], x[1], x[2].replace(b'"seq":0', b'"seq":"x"'), *x[3:]], r"line 3: .*\$\.seq"),
        (lambda x: [x[0], x[1].replace(b'"elapsed":0', b'"elapsed":1e300,"e":0'), *x[2:]], r"line 2: .*\$\.elapsed"),
        (lambda x: [x[0], WARM, *x[1:]], r"line 2: .*<= 1000000 - at `\$\.batches\[0\]\[1\]"),
        (lambda x: [GROUPS], r"line 1: .*missing required field `affine` - at `\$\.groups\[\.\.\.\]\.cost"),
    ],
)
def test_t4_what_is_no_journal_is_refused_with_its_line(
    tmp_path: Path, lines: list[bytes], make: Callable[[list[bytes]], list[bytes]], says: str
) -> None:
    with pytest.raises(JournalError, match=says):
        read_journal(put(tmp_path, make(lines)))


def nested(depth: int) -> bytes:
    return b'"x":' + b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda x: [x[0][:-2] + b"," + nested(50_000) + b"}\n", *x[1:]], "line 1"),
        (lambda x: [b'{"kind":"header","schema_version":1,' + nested(50_000) + b"}\n"], "line 1"),
        (lambda x: [x[0], x[1][:-2] + b"," + nested(50_000) + b"}\n", *x[2:]], "line 2"),
        (lambda x: [x[0], b'{"kind":"decision",' + nested(50_000) + b"}\n", *x[1:]], "line 2"),
    ],
)
def test_values_nested_without_end_are_refused_with_their_line(
    tmp_path: Path, lines: list[bytes], make: Callable[[list[bytes]], list[bytes]], where: str
) -> None:
    with pytest.raises(JournalError, match=f"{where}: values nested too deeply"):
        read_journal(put(tmp_path, make(lines)))


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_line_without_end_is_refused_before_it_takes_the_memory(
    tmp_path: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(journal, "LONGEST", 1 << 20)
    whole = lines[0] + b'{"kind":"decision","why":"' + bytes(60 << 20)
    (tmp_path / name).write_bytes(gzip.compress(whole) if name.endswith(".gz") else whole)
    tracemalloc.start()
    try:
        with pytest.raises(JournalError, match="line 2: longer than 1 MiB"):
            read_journal(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_lines_longer_than_a_part_are_read_whole(
    tmp_path: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_CHUNK", 7)
    long = b'{"kind":"decision","why":"' + b"x" * 99_999 + b'"}\n'
    read = read_journal(put(tmp_path, [lines[0], long, *lines[1:-1]]))
    assert [len(note.fields["why"]) for note in read.notes] == [99_999]
    assert (len(read.requests), read.torn, read.footer) == (3, False, None)


def test_refusals_of_one_id_keep_their_own_schedules(tmp_path: Path) -> None:
    """A caller that tries again often sends the same id."""
    made = recorder(tmp_path / "again")
    again = asked(7, actions=None)
    made(RequestAnswered(1000.1, "prod", "client_error", 422, 0.001, None, again, 0.001))  # came to no scheduler
    for at in (1000.5, 1001.5):
        made(RequestRejected(at, Request(id=again.request_id, group="prod"), QueueFull()))
        made(RequestAnswered(at, "prod", "shed", 503, 0.001, None, again, 0.001))
    Run(made, now=1002.0).batch(asked(7))
    assert made.close()
    assert made.path is not None
    schedules = [line.schedule for line in read_journal(made.path).requests]
    assert schedules[0] is None
    assert [s and (s.ticket, s.arrived) for s in schedules[1:]] == [(None, 1000.5), (None, 1001.5), (0, 1001.999)]


def test_t4_a_gz_that_was_cut_off_gives_what_it_holds(tmp_path: Path) -> None:
    whole = record(tmp_path, *([asked(i)] for i in range(600))).read_bytes()
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    read = read_journal(cut)
    assert 200 < len(read.requests) < 600
    assert read.footer is None
    cut.write_bytes(b"\x1f\x8b nonsense")
    with pytest.raises(JournalError, match="line 1: not readable as gzip"):
        read_journal(cut)
    with pytest.raises(JournalError, match=r"gone\.jsonl: No such file"):
        read_journal(tmp_path / "gone.jsonl")


def test_lines_and_keys_of_later_versions_are_passed_over(tmp_path: Path, lines: list[bytes]) -> None:
    later = [line.replace(b'{"kind"', b'{"later":[1],"kind"') for line in lines]
    read = read_journal(put(tmp_path, [*later[:2], b'{"kind":"telepathy","who":"robot"}\n', *later[2:]]))
    assert len(read.requests) == 3
    assert [(n.kind, n.fields) for n in read.notes] == [("telepathy", {"who": "robot"})]


def test_a_recording_is_read_line_by_line(tmp_path: Path, lines: list[bytes]) -> None:
    """The reader has not looked at the end when it yields the beginning: a broken end is met only there."""
    path = put(tmp_path, [*lines[:-1], b"{\n", b"{\n"])
    reader = JournalReader(path)
    found = iter(reader)
    assert len([next(found) for _ in range(6)]) == 6
    with pytest.raises(JournalError, match="line 8: not a whole line"):
        next(found)


def test_a_file_of_another_version_is_refused_in_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    old = b'{"kind":"header","schema_version":3,"started_at":"","origin":0.0,"reflex_version":"9.0.0","groups":{}}\n'
    path = put(tmp_path, [old, b'{"kind":"batch","id":1}\n'])
    with pytest.raises(JournalError) as caught:
        read_journal(path)
    assert str(caught.value) == (
        f"{path}, line 1: schema_version 3, by reflex 9.0.0; this release reads 1 and 2: read the file with the "
        "release that wrote it, or write it again with this one"
    )


def test_newer_keys_are_passed_over_in_every_line(tmp_path: Path, lines: list[bytes]) -> None:
    path = put(tmp_path, [line.replace(b'{"kind"', b'{"wire":"zmq","later":{},"kind"') for line in lines])
    read = read_journal(path)
    assert (len(read.requests), len(read.batches), read.footer is not None) == (3, 3, True)
