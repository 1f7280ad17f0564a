"""The journal while serving: it never waits, never raises, and loses little to whatever befalls disk and process."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from reflex_runtime.core.batch import RequestAnswered
from reflex_runtime.observe import journal_writer as module
from reflex_runtime.observe.journal import JournalError, RequestLine, read_journal
from reflex_runtime.observe.journal_writer import turn_all
from reflex_runtime.robots.analysis.report import report
from reflex_runtime.robots.policy.observation import decode_image
from serving.harness import PATIENCE
from serving.pair import until

from .test_journal_recording import Run, asked, record, recorder

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)


def encoded(kind: str) -> bytes:
    out = io.BytesIO()
    PIL.Image.fromarray(PIXELS).save(out, kind)
    return out.getvalue()


def written(directory: Path, images: dict[str, Any], mode: str) -> RequestLine:
    (line,) = read_journal(record(directory, [asked(0, images=images)], images=mode)).requests
    return line


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_t3_full_keeps_the_very_bytes(tmp_path: Path, kind: str) -> None:
    sent = encoded(kind)
    text = base64.b64encode(sent).decode()
    for i, image in enumerate([sent, text, f"data:image/x;base64,{text}"]):
        line = written(tmp_path / str(i), {"image": image}, "full")
        assert line.request.images() == {"image": sent}
        assert line.request.image_b64 == text
        assert line.request.image_sha256 == hashlib.sha256(sent).hexdigest()


def test_t3_raw_arrays_come_back_pixel_for_pixel(tmp_path: Path) -> None:
    images = {"front": PIXELS, "wrist": PIXELS[::-1, ::2]}
    line = written(tmp_path, images, "full")
    assert line.request.image_b64 is not None
    found = line.request.images()
    assert list(found) == ["front", "wrist"]
    for name, pixels in images.items():
        assert (decode_image(found[name]) == pixels).all()
        assert line.request.hashes()[name] == hashlib.sha256(pixels.tobytes()).hexdigest()


def test_t3_hash_only_keeps_hashes_and_none_keeps_nothing(tmp_path: Path) -> None:
    sent = {"image": encoded("PNG"), "image_wrist": encoded("JPEG")}
    line = written(tmp_path / "hash", sent, "hash_only")
    assert line.request.image_b64 is None
    assert line.request.image_sha256 == {name: hashlib.sha256(data).hexdigest() for name, data in sent.items()}
    line = written(tmp_path / "none", sent, "none")
    assert (line.request.image_b64, line.request.image_sha256) == (None, None)


def test_t3_images_that_were_refused_are_recorded_all_the_same(tmp_path: Path) -> None:
    sent = {"image": "no base64 at a!!", "odd": np.zeros((2, 2), np.float32), "junk": b"junk"}
    line = written(tmp_path, sent, "full")
    assert line.request.images()["junk"] == b"junk"
    assert "odd" not in line.request.images()


def test_text_that_is_not_unicode_does_not_end_a_recording(tmp_path: Path) -> None:
    path = record(tmp_path, [asked(0, instruction="open \ud800"), asked(1)])
    first, second = read_journal(path).requests
    assert first.request.instruction == "open \\ud800"
    assert second.request.instruction == "open the door"


def test_an_answer_that_cannot_be_written_is_dropped_alone(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    run = Run(made)
    run.batch(asked(0, actions=np.zeros(3, np.float32)))  # not a matrix
    run.batch(asked(1))
    assert made.close()
    assert (made.error, made.dropped, made.recorded) == (None, 1, 1)


def test_a_header_that_cannot_be_written_ends_the_recording_alone(tmp_path: Path) -> None:
    made = recorder(tmp_path, header={"model_hash": 7})
    Run(made).batch(asked(0))
    assert made.close() is False
    assert "ValidationError" in str(made.error)


# -- parts -------------------------------------------------------------------------------------------------------------


def test_t3_a_recording_goes_on_in_another_file_when_one_is_full(tmp_path: Path) -> None:
    made = recorder(tmp_path, gzip=False, max_bytes=20_000)
    run = Run(made)
    for i in range(100):
        run.batch(asked(i))
    assert made.close()
    parts = sorted(map(read_journal, tmp_path.iterdir()), key=lambda found: found.header.part)
    assert [part.header.part for part in parts] == list(range(1, len(parts) + 1))
    assert len(parts) > 2
    assert len({part.header.session_id for part in parts}) == len({part.header.origin for part in parts}) == 1
    assert [line.seq for part in parts for line in part.requests] == list(range(100))
    assert made.recorded == 100
    for part in parts:
        assert part.footer is not None
        assert part.footer.total_requests == len(part.requests)
        assert 20_000 <= part.path.stat().st_size < 45_000 or part is parts[-1]


def test_t3_a_report_counts_the_parts_of_a_recording_once(tmp_path: Path) -> None:
    made = recorder(tmp_path, gzip=False, max_bytes=5_000)
    run = Run(made)
    run.batch(asked(100, actions=np.zeros(3, np.float32)))  # not a matrix: it is dropped
    for i in range(100):
        run.batch(asked(i))
    assert made.close()
    found = report([tmp_path])
    assert (found.slots["prod"].requests, found.unfinished, found.dropped) == (100, 0, 1)


def test_t3_turning_a_recording_begins_another_file_with_what_comes_next(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    run = Run(made)
    made.turn()  # nothing is there to be turned
    run.batch(asked(0))
    while made.recorded < 1:
        pass
    first = made.path
    assert first is not None
    turn_all()
    until(lambda: read_journal(first).footer)
    run.batch(asked(1))
    assert made.close()
    assert made.path != first
    assert [len(read_journal(path).requests) for path in (first, made.path or first)] == [1, 1]


def test_t3_a_close_that_comes_just_as_the_thread_looks_ends_it(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    clear = made._hurry.clear

    def comes() -> None:
        made._hurry.clear = clear  # type: ignore[method-assign]
        made._closed = True
        made._hurry.set()
        made._some.set()
        clear()

    made._hurry.clear = comes  # type: ignore[method-assign]
    Run(made).batch(asked(0))
    made._thread.join(PATIENCE)
    assert not made._thread.is_alive()
    assert made.path is not None
    assert read_journal(made.path).footer is not None


@pytest.mark.parametrize(("images", "mode"), [("full", 0o600), ("hash_only", 0o644)])
def test_t3_a_recording_with_images_is_for_its_owner_alone(tmp_path: Path, images: str, mode: int) -> None:
    before = os.umask(0o022)
    try:
        path = record(tmp_path, [asked(0)], images=images)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_t3_a_directory_that_vanished_stops_the_recording_and_nobody_else(tmp_path: Path) -> None:
    made = recorder(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    run = Run(made)
    run.batch(asked(0))
    assert made.close() is False
    assert isinstance(made.error, FileNotFoundError)
    run.batch(asked(1))  # still harmless
    made.note("outcome", episode_id="x", success=True)
    assert (made.recorded, made.dropped) == (0, 2)  # the request and its batch


FULL = """
    import resource, signal, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from observe.test_journal_recording import Run, asked, recorder
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    made = recorder(Path({directory!r}), gzip={gzip})
    run = Run(made)
    run.batch(asked(0))
    made._hurry.set()
    while made.path is None:
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    for i in range(2000):
        run.batch(asked(i))
    print(made.close(), type(made.error).__name__, made.error.errno, made.path)
    run.batch(asked(0))
"""


def script(text: str, **values: Any) -> list[str]:
    here = str(Path(__file__).resolve().parent.parent)
    return [sys.executable, "-c", textwrap.dedent(text).format(tests=here, **values)]


@pytest.mark.parametrize("gzip", [True, False])
def test_t3_a_full_disk_stops_the_recording_and_leaves_it_readable(tmp_path: Path, gzip: bool) -> None:
    """The file may not grow beyond 20 kB: the write that does not fit fails as on a full disk."""
    ran = subprocess.run(
        script(FULL, directory=str(tmp_path), gzip=gzip), capture_output=True, text=True, timeout=60, check=True
    )
    closed, kind, errno, path = ran.stdout.split()
    assert (closed, kind, int(errno)) == ("False", "OSError", 27)  # EFBIG
    read = read_journal(path)
    assert 0 < len(read.requests) < 2000
    assert read.footer is None


def test_t3_lines_beyond_the_queue_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    encode = module.JournalWriter._line
    monkeypatch.setattr(module.JournalWriter, "_line", lambda self, item: gate.wait(20) and encode(self, item))
    made = recorder(tmp_path, capacity=5)
    run = Run(made)
    for i in range(50):
        run.batch(asked(i))
    assert made.dropped >= 100 - 5 - 1  # a batch and a request each; five in the queue, one in the thread's hands
    dropped = made.dropped
    gate.set()
    assert made.close()
    assert made.path is not None
    read = read_journal(made.path)
    assert read.footer is not None
    assert read.footer.dropped == dropped
    assert [r.seq for r in read.requests] == list(range(made.recorded))
    assert len(read.requests) + len(read.batches) == 100 - dropped


def test_t3_images_beyond_the_memory_bound_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IMAGE_BYTES", 1000)
    made = recorder(tmp_path)
    run = Run(made)
    run.batch(asked(0, images={"image": b"x" * 900}))
    run.batch(asked(1, images={"image": b"x" * 1100}))
    assert made.dropped == 1
    assert made.close()
    assert made.recorded == 1


# -- kill -9 -----------------------------------------------------------------------------------------------------------

ENDLESS = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from observe.test_journal_recording import Run, asked, recorder
    made = recorder(Path({directory!r}), gzip={gzip}, capacity=1_000_000)
    run = Run(made)
    i = 0
    while True:
        run.batch(asked(i))
        i += 1
        if i % 100 == 0:
            time.sleep(0.02)  # a pace that any disk and any core keeps: it is about what is flushed, not about floods
"""


def seen(directory: Path) -> int:
    """Requests a reader finds now."""
    try:
        return sum(len(read_journal(path).requests) for path in directory.iterdir())
    except JournalError:  # not even the header is whole yet
        return 0


@pytest.mark.parametrize("gzip", [True, False])
def test_t3_a_killed_process_loses_nothing_that_could_be_read(tmp_path: Path, gzip: bool) -> None:
    """kill -9 in the middle: everything flushed is read, at most the last line is torn."""
    with subprocess.Popen(script(ENDLESS, directory=str(tmp_path), gzip=gzip)) as process:
        until(lambda: seen(tmp_path) >= 300)
        before = seen(tmp_path)
        process.kill()
    (path,) = tmp_path.iterdir()
    read = read_journal(path)
    assert read.footer is None
    assert [r.seq for r in read.requests] == list(range(len(read.requests)))
    assert len(read.requests) >= before


@pytest.mark.parametrize("gzip", [True, False])
def test_t3_what_was_recorded_can_be_read_while_nothing_follows(tmp_path: Path, gzip: bool) -> None:
    """While the recorder is open and idle: nothing waits for a close that kill -9 would prevent."""
    made = recorder(tmp_path, gzip=gzip)
    Run(made).batch(asked(0), asked(1))
    until(lambda: seen(tmp_path) == 2)
    assert made.close()


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_t3_the_caller_pays_microseconds_and_the_thread_keeps_up(tmp_path: Path) -> None:
    """Bounds a few times what it takes on a quiet machine (4 us an answer; 70 us of the thread): no wait hides here."""
    made = recorder(tmp_path, capacity=100_000)
    images = {"image": encoded("JPEG")}
    answers = [asked(i, images=images) for i in range(2000)]
    began = time.thread_time()
    for answered in answers:
        made(RequestAnswered(1001.0, "prod", "ok", 200, 0.02, None, answered))
    spent = (time.thread_time() - began) / 2000
    assert made.close(30.0)
    assert (made.recorded, made.dropped) == (2000, 0)
    assert spent < 25e-6
    assert made.cpu / 2000 < 400e-6


def test_answers_without_detail_are_not_requests(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made(RequestAnswered(1.0, "prod", "client_error", 404, 0.0))
    assert made.close()
    assert list(tmp_path.iterdir()) == []
