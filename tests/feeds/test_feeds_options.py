"""Every option of `reflex feeds` does something: each is shown against a real run of the command."""

from __future__ import annotations

import hashlib
import re
import socket
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from statistics import median

import psutil
import pytest
from PIL import Image

from feeds.commands import PATIENCE, Feeds, figures, ran, refusal, results, scratch, together
from feeds.graphs import RED, bright_graph, lit
from feeds.rtsp import RtspCamera
from feeds.videos import clip, picture, write_video
from reflex_runtime.cli import build_parser
from reflex_runtime.observe.journal import read_journal
from serving.collector import Collector
from serving.pair import until
from serving.place import Place

SIZES = ("--processor", "mine:Sizes")


def frames(count: int) -> str:
    """A source that waits for its reader, as a file does."""
    return f"markers:feed=1,frames={count},live=0"


def test_feeds_may_stand_before_and_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["feeds", "a=1.mp4", "--port", "9", "b=2.mp4", "--onnx=x", "c=3.mp4"]
    assert build_parser(words).parse_args(words).feeds == ["a=1.mp4", "b=2.mp4", "c=3.mp4"]
    words = ["serve", "./export", "--port", "9", "more"]
    with pytest.raises(SystemExit):  # of no other verb
        build_parser(words).parse_args(words)
    assert "unrecognized arguments: more" in capsys.readouterr().err


def test_a_number_is_called_one_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser(["feeds"]).parse_args(["feeds", "--help"])
    options = re.findall(r"--[a-z-]+ [A-Z]+", capsys.readouterr().out)
    assert {"--fps N", "--track-score N", "--host TEXT"} <= set(options)


def test_f14_processor_is_imported_from_beside_you_and_answers(tmp_path: Path) -> None:
    ran(f"a={frames(3)}", *SIZES, "--max-batch-size", "1", "--results", "r.jsonl", cwd=scratch(tmp_path))
    assert [line["value"] for line in results(tmp_path / "r.jsonl")] == [{"size": 1, "text": "a"}] * 3


def test_f14_onnx_runs_a_model_and_score_says_what_is_left_out(tmp_path: Path) -> None:
    arguments = ("a=shapes:seed=1,seconds=0.5,realtime=0", "--onnx", "shapes", "--score")
    together(*(Feeds(*arguments, score, "--results", score, cwd=tmp_path) for score in ("0.2", "0.99")))
    found = {
        score: [value for line in results(tmp_path / score) for value in line["value"]["scores"]]
        for score in ("0.2", "0.99")
    }
    assert len(found["0.2"]) > 8
    assert min(found["0.2"]) >= 0.2
    assert found["0.99"] == [score for score in found["0.2"] if score >= 0.99]


def detected(folder: Path, name: str, *options: str) -> Feeds:
    """A run on two pictures of a red rectangle, whose results are in a file of this name. One graph finds it alone, the
    other twice."""
    graph = "wide.onnx" if "--size" in options else "graph.onnx"
    arguments = ("cam=lit.mp4", "--onnx", graph, "--results", f"{name}.jsonl", *options)
    return Feeds(*arguments, cwd=folder)


def test_f14_what_a_detector_reports_is_said_by_its_options(tmp_path: Path) -> None:
    """size and resize: boxes are as exact as rows of the input are small. iou: the graph says everything twice,
    with 0.1 less the second time. names: of the file, not of the graph."""
    write_video(tmp_path / "lit.mp4", [lit((40, 58, 120, 120), RED, (320, 160))] * 2)
    bright_graph(tmp_path / "graph.onnx", open_size=True)
    bright_graph(tmp_path / "wide.onnx", "raw", (160, 160), metadata={"imgsz": "[64, 64]"}, open_size=True)
    (tmp_path / "names.txt").write_text("rouge\nvert\nbleu\n", encoding="utf-8")
    runs = {
        "plain": (),
        "size": ("--size", "160"),
        "stretch": ("--resize", "stretch"),
        "names": ("--names", "names.txt"),
        "iou": ("--iou", "0.99"),
        "most": ("--iou", "0.99", "--max-detections", "1"),
        "other": ("--classes", "green,blue"),
        "same": ("--classes", "0,blue"),
    }
    together(*(detected(tmp_path, name, *options) for name, options in runs.items()))
    found = {name: [line["value"] for line in results(tmp_path / f"{name}.jsonl")] for name in runs}
    assert all(len(values) == 2 for values in found.values())
    first = {name: values[0] for name, values in found.items()}
    labels = {name: value["labels"] for name, value in first.items()}
    assert labels == {
        "plain": ["red"],
        "size": ["red"],
        "stretch": ["red"],
        "names": ["rouge"],
        "iou": ["red", "red"],
        "most": ["red"],
        "other": [],
        "same": ["red"],
    }
    top = {name: first[name]["boxes"][0][1] for name in ("plain", "size", "stretch")}
    assert top == {"plain": 60, "size": 58, "stretch": 57.5}, "a row of the input is five, two, and two and a half"


def test_f14_size_is_refused_where_the_graph_has_its_own_or_where_it_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bright_graph(tmp_path / "graph.onnx")
    run = ran("a=chaos:", "--onnx", "graph.onnx", "--size", "32", cwd=tmp_path, status=2)
    assert "--onnx=graph.onnx: size 32x32: input 'images' takes width 64 and height 64" in run.log[-1]
    assert not any("connected" in line for line in run.log), "before any camera is opened"
    bundled = ran("a=chaos:", "--onnx", "shapes", "--size", "32", cwd=tmp_path, status=2).log[-1]
    assert "--onnx=shapes: size 32x32: input 'image' takes width 320 and height 240" in bundled
    monkeypatch.chdir(tmp_path)
    for wrong in ("0", "64x", "99999", "a"):
        said = refusal(capsys, "a=chaos:", "--onnx", "graph.onnx", "--size", wrong)
        assert f"--size={wrong}: must be pixels of a side" in said


def test_f14_a_model_that_means_nothing_known_is_refused_before_a_camera_opens(tmp_path: Path) -> None:
    bright_graph(tmp_path / "graph.onnx", "raw rows", metadata={"names": ""})
    said = ran("a=chaos:", "--onnx", "graph.onnx", cwd=tmp_path, status=2).log
    assert "'output0' [n, 84, 7] for a picture of 64 × 64" in said[-1]
    assert "give the names of its classes: --names FILE" in said[-1]
    assert len(said[-1]) < 700
    assert not any("connected" in line for line in said)

def test_f14_what_is_taken_of_a_feed_is_said_by_its_options(tmp_path: Path) -> None:
    """every and fps: which pictures. rotate and roi: where the rectangle is then, in pixels of the turned picture and
    of the whole one. hwaccel: no decoder of this format uses `drm`, and a line says so. A setting of one feed goes
    before that for all, and results of a directory name the file."""
    write_video(tmp_path / "lit.mp4", [lit((40, 58, 120, 120), RED, (320, 160))] * 12)
    (tmp_path / "pictures").mkdir()
    Image.fromarray(lit((40, 58, 120, 120), RED, (320, 160))).save(tmp_path / "pictures" / "lit.png")
    bright_graph(tmp_path / "graph.onnx", "raw", (320, 320), metadata={"imgsz": "[64, 64]"}, open_size=True)
    feeds = Feeds(
        *(f"{name}=lit.mp4" for name in ("all", "few", "slow", "turned", "part")), "folder=pictures",
        "few.every=5", "slow.every=1", "slow.fps=10", "turned.rotate=90", "part.roi=20,30,220,130",
        "--every", "11", "--fps", "1000", "--rotate", "180", "--roi", "0,0,320,160", "--hwaccel", "drm",
        "--onnx", "graph.onnx", "--size", "320", "--results", "r.jsonl", cwd=tmp_path,
    )  # fmt: skip
    together(feeds)
    lines = results(tmp_path / "r.jsonl")
    taken = {name: [line["sequence"] for line in lines if line["feed"] == name] for name in ("all", "few", "slow")}
    assert taken == {"all": [0, 11], "few": [0, 5, 10], "slow": [0, 2, 5, 7, 10]}
    boxes = {line["feed"]: line["value"]["boxes"][0] for line in lines}
    upside_down = pytest.approx([200, 40, 280, 102], abs=4)
    assert boxes["all"] == boxes["folder"] == upside_down
    assert boxes["turned"] == pytest.approx([40, 40, 102, 120], abs=4), "clockwise, in pixels of the turned picture"
    assert boxes["part"] == pytest.approx([200, 40, 240, 102], abs=4), "cut off where the region ends"
    assert [line["file"] for line in lines if line["feed"] == "folder"] == ["lit.png"]
    said = [line for line in feeds.log if "hwaccel=drm: decoded by the CPU" in line]
    assert len(said) == 5, "each feed that is a video says it"


def test_f14_provider_is_the_one_onnx_runtime_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "a=chaos:", "--onnx", "shapes", "--provider", "NoSuchProvider")
    assert "--provider=NoSuchProvider: not in this onnxruntime, which has " in said
    arguments = ("a=shapes:seconds=0.1,realtime=0", "--onnx", "shapes", "--provider", "CPUExecutionProvider")
    assert figures(ran(*arguments, cwd=tmp_path), "a")["answered"] == 2


@pytest.mark.timing  # CPU
def test_f14_threads_are_onnx_runtimes_own(tmp_path: Path) -> None:
    arguments = ("a=shapes:seed=1", "--onnx", "shapes", "--results", "-", "--threads")
    with Feeds(*arguments, "1", cwd=tmp_path) as one, Feeds(*arguments, "5", cwd=tmp_path) as five:
        for feeds in (one, five):
            feeds.wait_out(1)
        few, many = (psutil.Process(feeds.process.pid) for feeds in (one, five))
        until(lambda: many.num_threads() - few.num_threads() == 4)  # not at once: the start needs some more


def test_f14_max_batch_size_bounds_a_call(tmp_path: Path) -> None:
    feeds = [f"f{k}={frames(12)}" for k in range(6)]
    runs = []
    for size in ("2", "6"):
        arguments = (*feeds, *SIZES, "--max-batch-size", size, "--results", size)
        runs.append(Feeds(*arguments, cwd=scratch(tmp_path), env={"SECONDS_EACH": "0.01"}))
    together(*runs)
    most = {size: max(line["value"]["size"] for line in results(tmp_path / str(size))) for size in (2, 6)}
    assert most == {2: 2, 6: 6}


def test_f14_max_latency_ms_lets_cameras_that_are_due_share_calls(tmp_path: Path) -> None:
    """Two cameras on a processor that does two pictures as fast as one take turns unless they wait for each other."""
    files = ("one=markers:feed=1,fps=4", "two=markers:feed=2,fps=4", "--duration-s", "4")

    def running(most: str) -> Feeds:
        arguments = (*files, *SIZES, "--results", most, "--max-latency-ms", most)
        return Feeds(*arguments, cwd=scratch(tmp_path), env={"SECONDS_EACH": "0.15"})

    def size(most: str) -> float:
        return median(line["value"]["size"] for line in results(tmp_path / most))

    for most, wanted in (("80", 2), ("0", 1)):
        for _ in range(4):  # on a busy machine a camera is late, or both begin at once and share every call by chance
            together(running(most))
            if size(most) == wanted:
                break
        assert size(most) == wanted


def test_f14_watchdog_s_says_that_a_batch_hangs_and_releases_its_feeds(tmp_path: Path) -> None:
    with Feeds("a=markers:feed=1", "--processor", "mine:Hangs", "--watchdog-s", "0.3", cwd=scratch(tmp_path)) as feeds:
        feeds.wait_log("hangs now")
        feeds.wait_log("sizes: 1 batch failed: ")
        assert feeds.stop() == 1
        feeds.wait_log("did not end in time and is abandoned")
    assert figures(feeds, "a")["failed"] == 1


def test_f14_realtime_plays_a_file_as_a_camera_sends_it(tmp_path: Path) -> None:
    arguments = (f"a={clip(25, 50)}", *SIZES)
    slow = {"SECONDS_EACH": "0.05"}
    as_camera = Feeds(*arguments, "--realtime", "--max-age-ms", "60000", cwd=scratch(tmp_path), env=slow)
    as_file = Feeds(*arguments, "--no-realtime", cwd=tmp_path, env=slow)
    together(as_camera, as_file)
    seen = figures(as_camera, "a")
    assert seen["overrun"] > 0
    assert seen["answered"] + seen["overrun"] == 25
    assert figures(as_file, "a") == {"frames": 25, "answered": 25}


def test_f14_loop_starts_a_file_over(tmp_path: Path) -> None:
    arguments = (f"a={clip(5, 50)}", "--realtime", "--loop", *SIZES, "--results", "-")
    with Feeds(*arguments, cwd=scratch(tmp_path)) as feeds:
        lines = feeds.wait_out(12)
        assert feeds.stop() == 0
    assert [line["sequence"] for line in lines] == sorted({line["sequence"] for line in lines})
    assert lines[11]["pts"] > 5 / 50


def test_f14_max_age_ms_drops_what_is_too_old_to_be_worth_it(tmp_path: Path) -> None:
    cameras = [f"c{k}=markers:feed={k},fps=4,frames=6" for k in range(8)]  # 1.6 times what can be done
    arguments = (*cameras, *SIZES, "--max-batch-size", "1", "--max-age-ms")
    slow = {"SECONDS_EACH": "0.05"}
    runs = together(*(Feeds(*arguments, most, cwd=scratch(tmp_path), env=slow) for most in ("120", "60000")))
    stale = [sum(figures(feeds, f"c{k}").get("stale", 0) for k in range(8)) for feeds in runs]
    assert stale[1] == 0 < stale[0]


def test_f14_restarts_is_how_often_a_camera_is_tried_again(tmp_path: Path) -> None:
    with Place() as away:
        where = f"a=rtsp://127.0.0.1:{away.port}/x"
        feeds = ran(where, *SIZES, "--restarts", "1", cwd=scratch(tmp_path), status=1)
    assert len([line for line in feeds.log if "trying again in" in line]) == 1
    feeds.wait_log("a: given up: rtsp://127.0.0.1:")


def test_f14_a_camera_that_never_connected_is_no_success(tmp_path: Path) -> None:
    with ExitStack() as closing:
        url = f"rtsp://127.0.0.1:{closing.enter_context(Place()).port}/x"
        feeds = Feeds("b=markers:feed=1,fps=20", f"a={url}", *SIZES, cwd=scratch(tmp_path))
        closing.enter_context(feeds)
        feeds.wait_log("trying again in", 2)  # the first may come before the start is over, whose end is 130
        feeds.stop()
        assert feeds.wait() == 1
        assert f"a: never connected to {url}: " in "\n".join(feeds.log)
        assert f"{url}: {url}" not in "\n".join(feeds.log)
        assert "b: never" not in "\n".join(feeds.log)


def test_f14_read_timeout_s_is_how_long_a_camera_may_be_silent(tmp_path: Path) -> None:
    with RtspCamera([picture(i) for i in range(30)], fps=25) as camera:
        arguments = (f"a={camera.url}", *SIZES, "--read-timeout-s", "0.4", "--results", "-")
        with Feeds(*arguments, cwd=scratch(tmp_path)) as feeds:
            feeds.wait_out(3)
            camera.freeze()
            feeds.wait_log(" for 0.4 s; trying again in")  # no frame; no answer if it was lost a moment before
            feeds.stop()


def test_f14_duration_s_ends_it(tmp_path: Path) -> None:
    feeds = ran("a=markers:feed=1,fps=20", *SIZES, "--duration-s", "2", cwd=scratch(tmp_path))
    assert 1 <= figures(feeds, "a")["frames"] <= 400, "neither milliseconds nor minutes"
    assert not any("stopped by" in line for line in feeds.log)


def test_f14_results_go_to_a_file_which_is_written_anew_or_to_standard_output(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("of an earlier run\n", encoding="utf-8")
    alone = (f"a={frames(3)}", *SIZES, "--max-batch-size", "1", "--results")
    ran(*alone, "r.jsonl", cwd=scratch(tmp_path))
    lines = results(tmp_path / "r.jsonl")
    assert [line["sequence"] for line in lines] == [0, 1, 2]
    with Feeds(*alone, "-", cwd=tmp_path) as feeds:
        assert feeds.wait() == 0
    assert [{**line, "latency_ms": 0} for line in feeds.wait_out(3)] == [{**line, "latency_ms": 0} for line in lines]
    (tmp_path / "r.jsonl").write_text("of an earlier run\n", encoding="utf-8")
    ran(f"a={frames(3)}", "--processor", "mine:Raises", "--results", "r.jsonl", cwd=tmp_path, status=1)
    assert results(tmp_path / "r.jsonl") == [], "no result, and none of another run"


def test_f14_annotate_and_trace_write_where_they_were_told(tmp_path: Path) -> None:
    long = "\N{CJK UNIFIED IDEOGRAPH-20000}" * 64  # 256 bytes: too long for the name of a file
    arguments = (*(f"{name}=shapes:seconds=0.2,realtime=0" for name in ("a", long)), "--onnx", "shapes")
    feeds = ran(*arguments, "--annotate", "out/deep", "--trace", "t.jsonl", cwd=tmp_path)
    name = f"feed-{hashlib.sha256(long.encode()).hexdigest()[:16]}.mp4"
    assert sorted(path.name for path in (tmp_path / "out" / "deep").iterdir()) == ["a.mp4", name]
    assert sum(batch.size for batch in read_journal(tmp_path / "t.jsonl").batches) == 6
    said = f"wrote videos: out/deep/a.mp4, out/deep/{name}; trace: t.jsonl (reflex trace t.jsonl)"
    assert feeds.log[-1].endswith(said)


def test_f14_otel_sends_spans_of_frames_and_of_batches_linked_to_them(tmp_path: Path) -> None:
    frames = [f"{name}=markers:feed=1,frames=3,live=no" for name in "ab"]
    with Collector() as collector:
        ran(*frames, *SIZES, "--otel", collector.url, cwd=scratch(tmp_path))
        spans = {span.ids: span for span in collector.spans if span.name == "frame sizes"}
        links = [link for span in collector.spans if span.name == "batch sizes" for link in span.links]
    assert len(spans) == 6
    assert sorted(links) == sorted(spans)
    assert {span.attributes["reflex.feed"] for span in spans.values()} == {"a", "b"}
    assert {(span.attributes["reflex.outcome"], span.kind) for span in spans.values()} == {("ok", 1)}


def test_f14_the_sampler_of_the_environment_is_the_share_of_frames_that_get_a_span(tmp_path: Path) -> None:
    half = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    with Collector() as collector:
        ran("a=markers:feed=1,frames=40", *SIZES, "--otel", collector.url, cwd=scratch(tmp_path), env=half)
        assert 5 < sum(span.name == "frame sizes" for span in collector.spans) < 35


def test_f14_port_and_host_are_where_metrics_and_health_answer(tmp_path: Path) -> None:
    arguments = ("a=markers:feed=1", *SIZES, "--port", "0", "--host")
    with Feeds(*arguments, "127.0.0.2", cwd=scratch(tmp_path)) as feeds:
        assert re.search(r"http://127\.0\.0\.2:\d+/dashboard, /feeds, /metrics and /health", feeds.wait_log("/metrics"))
        with closing(socket.create_connection(("127.0.0.2", feeds.port), timeout=PATIENCE)) as sock:
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert b"coordinators" in b"".join(iter(lambda: sock.recv(4096), b""))
        taken = str(feeds.port)
        again = ran("a=markers:feed=1", *SIZES, "--host", "127.0.0.2", "--port", taken, cwd=tmp_path, status=2)
    (line,) = again.log
    assert f"--host=127.0.0.2 --port={taken}: cannot be bound: Address already in use; use --port N" in line


def test_f14_who_may_watch_feeds_is_as_on_every_server(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of-the-file\n", encoding="utf-8")
    (tmp_path / "admin").write_text("file\n", encoding="utf-8")
    arguments = ("a=markers:feed=1", *SIZES, "--port", "0")
    with (
        Feeds(*arguments, "--api-key", "of-the-line", "--admin-key", "line", cwd=scratch(tmp_path)) as line,
        Feeds(*arguments, "--api-key", "@key", "--admin-key", "@admin", cwd=tmp_path) as file,
        Feeds(*arguments, "--allow-host", "cams.example", cwd=tmp_path) as named,
    ):
        for feeds, key in ((line, "line"), (file, "file")):
            keys = ("wrong", f"of-the-{key}", key)
            assert [asked(feeds, {"X-Reflex-Key": sent}) for sent in keys] == [401, 401, 200]
            assert [asked(feeds, {"X-Reflex-Key": sent}, "/feeds.mjpeg") for sent in keys] == [401, 200, 200]
        assert asked(line, {"X-Reflex-Key": "line", "Host": "cams.example"}) == 200
        assert [asked(named, {"Host": host}) for host in ("cams.example", "other.example")] == [200, 403]


def asked(feeds: Feeds, headers: dict[str, str], path: str = "/dashboard/stream") -> int:
    """The status of a request to watch."""
    with closing(HTTPConnection("127.0.0.1", feeds.port, timeout=PATIENCE)) as connection:
        connection.request("HEAD", path, headers=headers)
        return connection.getresponse().status
