"""Files that are written: what a run before left is kept, links are not followed, and there is one writer."""

from __future__ import annotations

import os
import queue
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from reflex_runtime.core.group import GroupConfig
from reflex_runtime.feeds.outputs.json_lines import JsonLines
from reflex_runtime.observe import files
from reflex_runtime.observe.journal_writer import JournalWriter


def mode(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_what_is_there_is_kept_once(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.jsonl", tmp_path / "a.jsonl.1"
    for text in (b"one", b"two", b"three"):
        with files.create(path) as file:
            files.write_all(file, text)
    assert (path.read_bytes(), kept.read_bytes()) == (b"three", b"two")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "a.jsonl.1"]


def test_an_empty_file_is_not_worth_keeping(tmp_path: Path) -> None:
    path, kept = tmp_path / "a", tmp_path / "a.1"
    kept.write_bytes(b"of the run before")
    files.check(path)
    files.create(path).close()
    assert kept.read_bytes() == b"of the run before"


@pytest.mark.parametrize("verb", [files.create, files.append, files.check])
@pytest.mark.parametrize("leads", ["to a file", "nowhere"])
def test_a_link_is_not_followed(verb: Callable[[Path], object], leads: str, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if leads == "to a file":
        target.write_bytes(b"precious")
    link.symlink_to(target)
    with pytest.raises(OSError, match="is a symbolic link; name the file itself"):
        verb(link)
    assert (target.read_bytes() if target.exists() else None) == (b"precious" if leads == "to a file" else None)
    assert link.is_symlink()


def test_a_picture_takes_the_place_of_a_link_and_leaves_what_it_leads_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "p.svg"
    target.write_bytes(b"precious")
    link.symlink_to(target)
    files.replace(link, b"<svg/>")
    assert (target.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"precious", b"<svg/>", False)
    assert sorted(os.listdir(tmp_path)) == ["p.svg", "target"]


def test_a_link_in_the_place_of_the_kept_file_is_replaced(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "a"
    target.write_bytes(b"precious")
    path.write_bytes(b"old")
    (tmp_path / "a.1").symlink_to(target)
    files.create(path).close()
    assert (target.read_bytes(), (tmp_path / "a.1").read_bytes()) == (b"precious", b"old")


def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with files.create(path) as first:
        files.write_all(first, b"mine")
        for verb in (files.create, files.append, files.check):
            with pytest.raises(OSError, match="is being written by another program"):
                verb(path)
        assert path.read_bytes() == b"mine"
    files.create(path).close()
    assert (tmp_path / "a.1").read_bytes() == b"mine"


def test_a_file_of_pictures_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        files.create(tmp_path / "a", private=True).close()
        files.create(tmp_path / "b").close()
        (tmp_path / "c").write_bytes(b"open to all")
        files.create(tmp_path / "c", private=True).close()
    finally:
        os.umask(before)
    assert (mode(tmp_path / "a"), mode(tmp_path / "b"), mode(tmp_path / "c")) == (0o600, 0o644, 0o600)


def test_what_cannot_be_kept_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    (tmp_path / "a.1").mkdir()
    with pytest.raises(OSError, match=r"what is there cannot be kept as a\.1: Is a directory"):
        files.create(path)
    assert path.read_bytes() == b"old"


def test_a_device_is_written_as_it_is() -> None:
    with files.create("/dev/null") as file:
        files.write_all(file, b"x")
    assert not Path("/dev/null.1").exists()


def test_every_writer_keeps_what_the_run_before_left_and_follows_no_link(tmp_path: Path) -> None:
    trace, lines = tmp_path / "t.jsonl", tmp_path / "r.jsonl"
    for path in (trace, lines):
        path.write_bytes(b"old")
    JournalWriter(trace, [GroupConfig(name="g")]).close()
    results = JsonLines(lines)
    results.begin()
    results.close()
    assert [Path(f"{path}.1").read_bytes() for path in (trace, lines)] == [b"old", b"old"]
    assert lines.read_bytes() == b""


def test_a_check_leaves_a_pipe_to_its_reader(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check = threading.Thread(target=files.check, args=(pipe,), daemon=True)
    check.start()
    check.join(10.0)
    waits = check.is_alive()  # for a reader, who would read the end
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
    assert not waits


def test_a_pipe_without_a_reader_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe, told = tmp_path / "pipe", queue.SimpleQueue[object]()
    os.mkfifo(pipe)

    def create() -> None:
        try:
            told.put(files.create(pipe))
        except OSError as error:
            told.put(error.strerror)

    threading.Thread(target=create, daemon=True).start()
    try:
        assert told.get(timeout=10.0) == "nobody reads this pipe; start its reader first"
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        with files.create(pipe) as writer:
            assert os.get_blocking(writer.fileno())  # a full pipe waits
    finally:
        os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
    os.close(reader)
