"""`reflex feeds` as a person meets it: what it refuses and how, how it ends, and what its screen shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from feeds.commands import Feeds, clean, figures, ran, refusal, results, scratch, screen, together
from feeds.fakes import PATIENCE, Detector
from feeds.test_source import broken
from feeds.videos import clip
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds import session
from reflex_runtime.feeds.plan import FeedPlan, plan_of
from reflex_runtime.observe.journal import read_journal

SHORT = "a=shapes:seed=1,seconds=0.2,realtime=0"
ENDLESS = "a=shapes:seed=1"


class _EndsBetween(threading.Event):
    """The start ends just after somebody has looked whether it has."""

    def is_set(self) -> bool:
        found = super().is_set()
        self.set()
        return found


def test_f11_a_signal_that_comes_as_the_start_ends_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "begin_log", lambda: None)
    run = session.FeedsSession(plan_of([ENDLESS], None, {}), Detector(), sys.stdout)
    run._begun = _EndsBetween()
    run._signalled(signal.SIGTERM)
    assert run._reasons.get(timeout=1.0) == "SIGTERM"


def test_i18_many_hangups_wait_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "begin_log", lambda: None)
    plan, read = plan_of([ENDLESS], None, {}), threading.Semaphore(0)

    def again() -> FeedPlan:
        read.release()
        raise ConfigError("no such file")

    run = session.FeedsSession(plan, Detector(), sys.stdout, again=again)
    for _ in range(50):
        run._signalled(signal.SIGHUP)

    def reloads() -> int:
        """How many threads reload, or wait to; they have ended."""
        threads = [thread for thread in threading.enumerate() if thread.name == "reflex-feeds-reload"]
        run._begun.set()
        for thread in threads:
            thread.join(PATIENCE)  # it logs: later a line would come into another test
        return len(threads)

    assert reloads() == 1
    run._signalled(signal.SIGHUP)
    reloads()
    assert read.acquire(timeout=PATIENCE)
    assert read.acquire(timeout=PATIENCE)


# -- refusals: one line, exit status 2 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no feeds: give NAME=SOURCE, such as door=rtsp://10.0.0.7/live or yard=yard.mp4, or --config FILE with "),
        (("a",), "a: must be NAME=SOURCE, such as door=rtsp://10.0.0.7/live or yard=yard.mp4"),
        (("=x.mp4",), "=x.mp4: must be NAME=SOURCE"),
        (("a=",), "a=: must be NAME=SOURCE"),
        (("a b=chaos:",), "the name must be 1 to 64 letters"),
        ((SHORT, SHORT), "two feeds are called a"),
        ((SHORT,), "no processor: give --processor MODULE:NAME or --onnx FILE"),
        ((SHORT, "--onnx", "shapes", "--processor", "mine:Sizes"), "give one of them, not both"),
        (("a=none.mp4",), "a=none.mp4: no such file"),
        (("a=0",), "a=0: no such file; the camera is /dev/video0"),
        (("a=chaos:", "a.fps=5", "a.fps=6"), "a.fps: is given twice"),
        (("a=chaos:", "a.max-batch-size=5"), "a.max-batch-size=5: not a setting of one feed: give --max-batch-size"),
        (("a=chaos:", "a.fsp=5"), "a.fsp=5: no such setting fsp; did you mean fps?"),
        (("a=chaos:", "--realtime=yes"), "--realtime or --no-realtime: takes no value"),
        (("a=.",), "a: .: holds no pictures (.bmp"),
        (("a=ftp://u:pw@h/x",), "source='ftp://h/x': must be a path"),
        (("a=chaos:seed=x",), "a: chaos:seed=x: must be a whole number"),
        (("a=mine.py", "--loop"), "a=mine.py: loop needs realtime"),
        ((SHORT, "--processor", "mine:Sizes", "--score", "0.3"), "--score needs --onnx"),
        ((SHORT, "--processor", "mine:Sizes", "--provider", "cuda"), "--provider needs --onnx"),
        ((SHORT, "--processor", "mine:Sizes", "--threads", "2"), "--threads needs --onnx"),
        (("a=shapes:fps=1e308",), "a: shapes:fps=1e+308: must be in (0, 1000]"),
        ((SHORT, "--frob"), "unrecognized arguments: --frob"),
        ((SHORT, "--onnx", "none.onnx"), "--onnx=none.onnx: no such file"),
        ((SHORT, "--onnx", "."), "--onnx=.: is a directory"),
        ((SHORT, "--config", "none.toml"), "--config=none.toml: No such file"),
        ((SHORT, "--results", "no/where"), "--results=no/where: cannot be written: there is no directory no;"),
        ((SHORT, "--results", "."), "--results=.: cannot be written: Is a directory"),
        ((SHORT, "--results", "r.Parquet"), "--results=r.Parquet: results are JSON lines, not Parquet: r.jsonl"),
        ((SHORT, "--trace", "no/where"), "--trace=no/where: cannot be written"),
        ((SHORT, "--annotate", "mine.py"), "--annotate=mine.py: cannot be made: File exists"),
        (("a=mine.py", "--results", "mine.py"), "--results=mine.py: would write over mine.py, which a reads"),
        (("a=a.mp4", "--annotate", "."), "--annotate=.: would write over a.mp4, which a reads"),
        ((SHORT, "--results", "x", "--trace", "./x"), "--trace=./x: would write over x, which --results writes"),
    ],
)
def test_f14_what_cannot_be_done_is_refused_in_one_line(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(scratch(tmp_path))
    Path("a.mp4").write_bytes(b"a video")
    assert says in refusal(capsys, *arguments)
    assert Path("a.mp4").read_bytes() == b"a video"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine", "must be MODULE:NAME, such as mypkg.vision:Detector"),
        ("nowhere_at_all:X", "there is no module 'nowhere_at_all': run reflex in the directory that contains it"),
        ("raises_at_import:X", "raises_at_import cannot be imported: RuntimeError: first second (raises_at_import.py"),
        ("exits_at_import:X", "exits_at_import cannot be imported: SystemExit: 7 (exits_at_import.py, line 1)"),
        ("mine:Missing", "mine has no 'Missing'"),
        ("mine:NoProcess", "NoProcess has no method process()"),
        ("mine:NoName", "NoName has no id"),
        ("mine:SECONDS", "float has no id"),
        ("mine:Needs", "Needs failed: TypeError: Needs.__init__() missing 1 required positional argument: 'path'"),
    ],
)
def test_f14_a_processor_that_cannot_be_had_is_refused_in_one_line(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scratch(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("raises_at_import.py").write_text("\nraise RuntimeError('first\\nsecond')", encoding="utf-8")
    Path("exits_at_import.py").write_text("raise SystemExit(7)", encoding="utf-8")
    assert f"reflex feeds: --processor={name}: {says}" in refusal(capsys, SHORT, "--processor", name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[feeds]", "or tables [[feed]] in "),
        ("feed = 3", "feed: must be tables, each beginning with [[feed]]"),
        ("[[feed]]\nsource = 'x'", "feed 1: name: must be given, as a text"),
        ("[[feed]]\nname = 'a'", "feed 1: source: must be given"),
        ("[[feed]]\nname = 'a'\nsource = 'chaos:'\ncolour = 1", "feed 1: colour: no such setting of a feed"),
        ("[[feed]]\nname = 'a'\nsource = 'chaos:'\nrestarts = inf", "feed 1: restarts=inf: must be a whole number"),
        ("[[feed]]\nname = 'a'\nsource = 'chaos:'\nmax_age_ms = 0", "feed 1: max-age-ms=0: must be in [1"),
        ("[[feed]]\nname = 'a'\nsource = 'chaos:'\nrealtime = true", "realtime: needs a file, and"),
        ("[[feed]]\nname = 'a'\nsource = 'a.mp4'\nmax_age_ms = 5", "max_age_ms: needs a live feed, and a.mp4 is"),
        ("[[feed]]\nname = 'a'\nsource = 'a.mp4'\nrestarts = 5", "restarts: needs a live feed, and a.mp4 is a file"),
        ("[[feed]]\nname = 'a'\nsource = 'a.mp4'\nread_timeout_s = 5\nrealtime = true", "read_timeout_s: needs a cam"),
        ("[feeds]\nrestarts = inf", "[feeds] restarts=inf: must be a whole number"),
        ("[[feed]]\nname = 'a'\nsource = 'chaos:'\nfsp = 1", "fsp: no such setting of a feed; did you mean fps?"),
        ("[[feed]]\nname = 'a'\nsource = 'chaos:'\nzone = 'd=1,2'", "feeds: a: zone=d: must have 3 to"),
        ("onnx = 'x'", "onnx: is in no table; write it below [feeds]"),
        ("[fedes]\nonnx = 'x'", "fedes: no such table; there may be feeds and feed; did you mean feeds?"),
    ],
)
def test_f14_a_wrong_file_is_refused_in_one_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cameras.toml"
    file.write_text(text, encoding="utf-8")
    assert says in refusal(capsys, "--config", str(file), "--onnx", "shapes")


def test_f14_a_password_is_in_no_refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    address = "rtsp://admin:hunter2@10.0.0.7/live?key=hunter2"
    file = tmp_path / "cameras.toml"
    file.write_text(f"[[feed]]\nname = 'a'\nsource = '{address}'\nloop = true\nrealtime = true\n", encoding="utf-8")
    for arguments in ([address], [f"a b={address}"], [f"a={address}", f"a={address}"], ["--config", str(file)]):
        assert "hunter2" not in refusal(capsys, *arguments, "--onnx", "shapes")


def test_f14_the_configuration_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cameras.toml"
    text = f"[feeds]\nonnx = 'shapes'\nresults = '{file}'\n[[feed]]\nname = 'a'\nsource = 'chaos:'\n"
    file.write_text(text, encoding="utf-8")
    assert f"would write over {file}, which is the configuration" in refusal(capsys, "--config", str(file))
    assert file.read_text(encoding="utf-8") == text


def test_f14_a_processor_that_does_not_start_leaves_the_results_of_the_run_before(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("of an earlier run\n", encoding="utf-8")
    ran(SHORT, "--processor", "mine:BadStart", "--results", "r.jsonl", cwd=scratch(tmp_path), status=2)
    assert (tmp_path / "r.jsonl").read_text(encoding="utf-8") == "of an earlier run\n"


def test_f14_a_processor_that_does_not_start_ends_it_with_2(tmp_path: Path) -> None:
    (tmp_path / "not.onnx").write_bytes(b"hello")
    for flags, says in (
        (("--processor", "mine:BadStart"), "mine:BadStart: on_start failed: ValueError: no weights (mine.py"),
        (("--onnx", "not.onnx"), "reflex feeds: --onnx=not.onnx: onnxruntime cannot load it"),
    ):
        feeds = ran(SHORT, *flags, cwd=scratch(tmp_path), status=2)
        assert says in feeds.log[-1]
        assert "starting: 1 feed on" in feeds.log[0]
        assert len(feeds.log) == 2


# -- where things come from --------------------------------------------------------------------------------------------


def test_f14_feeds_come_from_a_file_and_from_anywhere_between_the_options(tmp_path: Path) -> None:
    file = tmp_path / "cameras.toml"
    video = clip(10, 50)
    file.write_text(
        f"[feeds]\nprocessor = 'mine:ready'\nrealtime = true\n[[feed]]\nname = 'one'\nsource = '{video}'\n"
        f"[[feed]]\nname = 'two'\nsource = '{video}'\nrealtime = false\n"
        f"[[feed]]\nname = 'three'\nsource = '{video}'\nmax-age-ms = 500\nrestarts = 3\n",
        encoding="utf-8",
    )
    feeds = ran(
        "--config", str(file), "x=markers:feed=1,frames=3,live=0", "--results", "r.jsonl",
        "y=shapes:seconds=0.1,realtime=0",
        cwd=scratch(tmp_path),
    )  # fmt: skip
    assert "starting: 5 feeds on sizes, batches of at most 4 frames, held for at most 50 ms" in feeds.log[0]
    answered = {name: figures(feeds, name)["answered"] for name in ("one", "two", "three", "x", "y")}
    assert answered["two"] == 10
    assert answered["x"] == 3
    assert sum(answered.values()) == len(results(tmp_path / "r.jsonl"))
    assert feeds.log[-1].endswith("wrote results: r.jsonl")


def test_f14_a_processor_is_a_class_a_function_or_an_object_beside_you(tmp_path: Path) -> None:
    kinds = ("Sizes", "make", "ready")
    scratch(tmp_path)
    together(*(Feeds(SHORT, "--processor", f"mine:{kind}", "--results", kind, cwd=tmp_path) for kind in kinds))
    for kind in kinds:
        assert [line["value"]["text"] for line in results(tmp_path / kind)] == ["a"] * 3


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Raises", "a: 3 of 3 frames have no answer: ValueError: too dark"),
        ("Dies", "sizes died and answers no more: the device thread died: SystemExit: 3"),
        ("BadStop", "sizes: on_stop failed: ValueError: stuck (mine.py"),
    ],
)
def test_f14_something_missing_is_exit_status_1_and_said_in_a_line(name: str, says: str, tmp_path: Path) -> None:
    feeds = ran("a=markers:feed=1,frames=3,live=0", "--processor", f"mine:{name}", cwd=scratch(tmp_path), status=1)
    assert any(says in line for line in feeds.log), feeds


def test_f14_a_feed_given_up_is_exit_status_1_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video", encoding="utf-8")
    feeds = ran("bad=text.mp4", f"good={clip(5)}", "--processor", "mine:Sizes", cwd=scratch(tmp_path), status=1)
    assert any("bad: given up: text.mp4: " in line for line in feeds.log)
    assert figures(feeds, "good")["answered"] == 5


@pytest.mark.parametrize(
    ("flag", "says"), [("--results", "3 results are not in it"), ("--trace", "lines are not in it: No space left")]
)
def test_f14_a_full_disk_is_said_and_exit_status_1(flag: str, says: str, tmp_path: Path) -> None:
    many = "a=markers:feed=1,frames=3,live=0"
    feeds = ran(many, flag, "/dev/full", "--processor", "mine:Sizes", cwd=scratch(tmp_path), status=1)
    assert f"{flag}=/dev/full: " in feeds.log[-1]
    assert says in feeds.log[-1]
    assert figures(feeds, "a")["answered"] == 3


def test_f14_a_pipe_that_nobody_reads_ends_it_with_2(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    feeds = ran("a=chaos:", "--results", "pipe", "--processor", "mine:Sizes", cwd=scratch(tmp_path), status=2)
    assert feeds.log[-1].endswith("--results=pipe: cannot be written: nobody reads this pipe; start its reader first")
    feeds = ran("a=chaos:", "--trace", "pipe", "--processor", "mine:Sizes", cwd=tmp_path, status=2)
    assert feeds.log[-1].endswith("the trace 'pipe': cannot be written: nobody reads this pipe; start its reader first")


def test_f14_a_video_that_failed_is_not_among_those_that_were_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / "b.mp4").symlink_to("elsewhere")
    (tmp_path / "c.mp4").write_bytes(b"of the run before")
    (tmp_path / "c.txt").write_text("no video")
    feeds = ran("c=c.txt", "--annotate", ".", "--processor", "mine:Sizes", cwd=scratch(tmp_path), status=1)
    assert not any("wrote" in line for line in feeds.log)
    two = ("a=markers:feed=1,frames=3,live=0", "b=markers:feed=2,frames=3,live=0")
    feeds = ran(*two, "--annotate", ".", "--processor", "mine:Sizes", cwd=scratch(tmp_path), status=1)
    assert feeds.log[-1].endswith("wrote videos: a.mp4")
    assert any("video to b.mp4 failed: is a symbolic link; name" in line for line in feeds.log)


@pytest.mark.parametrize("more", [(), ("--realtime",)])
def test_f14_a_damaged_file_is_said_and_exit_status_1(tmp_path: Path, more: tuple[str, ...]) -> None:
    damaged = broken(tmp_path / "a.mp4", range(20, 25))
    feeds = ran(f"a={damaged}", f"b={clip(5)}", "--processor", "mine:Sizes", *more, cwd=scratch(tmp_path), status=1)
    assert feeds.log[-1].endswith("a.mp4 is damaged: 5 pictures missing or broken")
    assert any(line.startswith("a ") and line.endswith(" 5 pictures missing or broken") for line in feeds.log)
    if not more:  # else some may have made way for newer ones
        assert figures(feeds, "a") == {"frames": 25, "answered": 25}
        assert figures(feeds, "b")["answered"] == 5


def test_f14_a_signal_that_another_thread_takes_stops_it_too(tmp_path: Path) -> None:
    """The kernel may give a signal to any thread; only the main one runs handlers, and it waits."""
    taker = """import signal, threading
from mine import Sizes
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # and of all threads that come later
"""
    (scratch(tmp_path) / "deaf.py").write_text(taker)
    with Feeds(ENDLESS, "--processor", "deaf:Sizes", "--results", "-", cwd=tmp_path) as feeds:
        feeds.wait_out(2)
        assert feeds.stop(signal.SIGTERM) == 0


def test_f14_a_signal_stops_in_order(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    arguments = (ENDLESS, f"b={clip(200, 50)}", "--processor", "mine:Sizes", "--results", "-", "--trace")
    scratch(tmp_path)
    with ExitStack() as closing:
        slow = {"SECONDS_EACH": "0.02"}
        runs = [closing.enter_context(Feeds(*arguments, n.name, cwd=tmp_path, env=slow)) for n in numbers]
        for number, feeds in zip(numbers, runs, strict=True):
            feeds.wait_out(5)
            assert feeds.stop(number) == 0  # `a` has no end
            feeds.wait_log(f"stopped by {number.name}")
    for number, feeds in zip(numbers, runs, strict=True):
        seen = [figures(feeds, name) for name in "ab"]
        assert len(feeds.out) == sum(figure["answered"] for figure in seen)
        assert all(2 * figure["frames"] == sum(figure.values()) for figure in seen), "answered or dropped for a reason"
        assert sum(batch.size for batch in read_journal(tmp_path / number.name).batches) >= len(feeds.out)


def test_f14_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with Feeds(ENDLESS, "--processor", "mine:Hangs", cwd=scratch(tmp_path)) as feeds:
        feeds.wait_log("hangs now")
        while feeds.process.poll() is None:  # two that come together are one
            feeds.process.send_signal(signal.SIGINT)
        assert feeds.wait() == 130
        assert "stopped by SIGINT without waiting" in feeds.log[-1]


def test_f14_a_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    with Feeds(ENDLESS, "--processor", "mine:StartsLate", cwd=scratch(tmp_path)) as feeds:
        feeds.wait_log("starting: ")
        assert feeds.stop() == 130
        assert "stopped by SIGINT before it had started" in feeds.log[-1]


def test_f14_it_ends_when_the_reader_of_its_results_left(tmp_path: Path) -> None:
    command = f"{sys.executable} -m reflex_runtime feeds {ENDLESS} --processor mine:Sizes --results - | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, cwd=scratch(tmp_path), env=clean(),
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert b"stopped: the reader of standard output has left" in done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert b"Error" not in done.stderr
    assert b"Broken" not in done.stderr


@pytest.mark.long
def test_f14_a_log_that_nobody_reads_ends_nothing(tmp_path: Path) -> None:
    command = f"{sys.executable} -m reflex_runtime feeds a={clip(20, 25)} --realtime --processor mine:Sizes"
    done = subprocess.run(
        ["bash", "-c", f"{command} --results r.jsonl 2>&1 | head -n 1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, cwd=scratch(tmp_path), env=clean(), timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert results(tmp_path / "r.jsonl")[-1]["sequence"] == 19


# -- the screen --------------------------------------------------------------------------------------------------------


def test_f14_nothing_but_results_is_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "import logging\nfrom mine import Sizes\nprint('imported')\nclass Noisy(Sizes):\n    def on_start(self):\n"
        "        logging.basicConfig()\n        logging.getLogger('noisy').warning('one\\x1b[31m\\ntwo')\n"
        "    def process(self, entries):\n        print('asked', flush=True)\n"
        "        return super().process(entries)\n",
        encoding="utf-8",
    )
    arguments = (SHORT, "--processor", "noisy:Noisy", "--max-batch-size", "1")
    piped = Feeds(*arguments, "--results", "-", cwd=scratch(tmp_path), terminal=(80, 24))
    plain = Feeds(*arguments, cwd=tmp_path, terminal=(80, 24))
    together(piped, plain)
    assert [line["sequence"] for line in piped.wait_out(3)] == [0, 1, 2]
    shown = screen(piped.raw)
    assert any(line.endswith("one [31m two") for line in shown), "as one line, its control characters gone"
    assert "imported" in shown
    assert "asked" in shown
    assert plain.out == ["imported", *["asked"] * 3], "what somebody else prints stays where he sent it"
