"""Feeds that are added, changed and removed while others run, and a detector that is replaced, over real sockets."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feeds.fakes import Camera, Collector
from feeds.graphs import BLUE, RED, bright_graph, lit
from feeds.pages import PATIENCE, Page
from reflex_runtime.config import FeedsConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.drivers.batch_processor import BatchConfig
from reflex_runtime.feeds import control, fleet
from reflex_runtime.feeds.fleet import FeedFleet
from reflex_runtime.feeds.fresh import check_fresh
from reflex_runtime.feeds.onnx import FrameLimits, OnnxFrames
from reflex_runtime.feeds.opening import DRAWN
from reflex_runtime.feeds.pictures import FeedPictures
from reflex_runtime.feeds.replaceable import ReplaceableDetector, version_of
from reflex_runtime.feeds.runtime import Runtime
from reflex_runtime.feeds.source import SourceError
from reflex_runtime.feeds.spec import PER_FEED, specs_of
from reflex_runtime.feeds.video import VideoSource
from reflex_runtime.feeds.watching import FeedPages

SIZE = (64, 48)
KEY = "s3cret"


class Run:
    """A run of feeds on a detector, with the pages that control it. cameras: by what stands behind `shapes:`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.graph = bright_graph(folder / "first.onnx", "raw", SIZE)
        self.runtime = Runtime()
        self.detector = ReplaceableDetector(OnnxFrames(self.graph))
        coordinator = self.runtime.coordinator(self.detector, BatchConfig(max_batch_size=4, max_latency=0.0))
        self.pictures = FeedPictures(lambda: self.runtime.names)
        self.found = Collector()
        self.cameras: dict[str, Camera] = {}
        config = FeedsConfig(port=0, **settings)
        self.fleet = FeedFleet(
            self.runtime,
            coordinator,
            self.detector,
            config,
            lambda spec: [self.found, self.pictures.take],
            lambda asked: OnnxFrames(Path(asked.onnx), score=asked.score, classes=list(asked.classes)),
        )
        self.page = Page(lambda: FeedPages(self.runtime, coordinator, self.pictures, self.fleet), api_key=KEY)

    def camera(self, text: str) -> Camera:
        made = self.cameras[text.partition(":")[2]] = Camera(live=not text.startswith("shapes:file"))
        return made

    def ask(self, method: str, path: str, /, key: str = KEY, **fields: Any) -> tuple[int, Any]:
        body = json.dumps(fields).encode() if method in ("POST", "PATCH") else None
        status, _, told = self.page.ask(path, method, body, X_Reflex_Key=key)
        return status, json.loads(told)

    def begin(self, name: str, source: str) -> Camera:
        assert self.ask("POST", "/feeds", name=name, source=source)[0] == 201
        return self.cameras[source.partition(":")[2]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(tmp_path, api_key=KEY)
    monkeypatch.setitem(DRAWN, "shapes", made.camera)
    with made.page.server, made.runtime:
        yield made


def test_i18_an_added_source_is_read_from_its_own_address_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[VideoSource] = []

    class Noted(VideoSource):
        def open(self) -> None:
            made.append(self)
            raise SourceError("not here", retryable=False)

    monkeypatch.setattr("reflex_runtime.feeds.opening.VideoSource", Noted)
    assert run.ask("POST", "/feeds", name="door", source="http://192.0.2.1/live")[0] == 201
    run.runtime.remove("door")
    assert [source._direct for source in made] == [True]


_NAMES = ("door", "Tür-2_a.b", "a.b", ".", "..", "a/b", "a b", "", "x" * 64, "x" * 65, "a.jpg", "a.mjpeg", "jpg")


@pytest.mark.parametrize("name", _NAMES)
def test_h7_a_name_is_accepted_if_and_only_if_the_document_allows_it(run: Run, name: str) -> None:
    document = run.ask("GET", "/openapi.json")[1]
    body = document["paths"]["/feeds"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    allowed = re.search(body["properties"]["name"]["pattern"], name) is not None
    assert (run.ask("POST", "/feeds", name=name, source="shapes:1")[0] == 201) == allowed


def test_i18_a_feed_is_added_told_of_and_removed_while_the_run_goes_on(run: Run) -> None:
    status, told = run.ask("POST", "/feeds", name="door", source="shapes:1", max_age_ms=300, restarts=2)
    assert (status, told["name"], told["source"], told["mode"]) == (201, "door", "shapes:1", "live")
    assert (told["settings"]["max_age_ms"], told["settings"]["restarts"]) == (300, 2)
    run.cameras["1"].give((lit((8, 8, 40, 40), RED, SIZE), 0.0))
    run.found.wait(1)
    assert run.found.results[0].feed == "door"
    assert run.ask("GET", "/feeds/door")[1]["answered"] == 1
    assert run.ask("POST", "/feeds", name="door", source="shapes:2") == (
        409, told_of("name=door: there is such a feed", "invalid_request"),
    )  # fmt: skip
    with run.page.asked("/feeds/door.mjpeg", X_Reflex_Key=KEY) as watched:
        assert run.ask("DELETE", "/feeds/door") == (200, {"name": "door", "ended": True})
        assert watched.read() == b"--frame\r\n"  # it ends
    assert run.cameras["1"].closes >= 1
    for method in ("GET", "PATCH", "DELETE"):
        assert run.ask(method, "/feeds/door")[0] == 404
    run.begin("door", "shapes:3").give((lit((8, 8, 40, 40), RED, SIZE), 0.0))  # the name is free again
    run.found.wait(2)
    assert run.found.closed == 1


class told_of(dict[str, Any]):  # noqa: N801
    """Equal to the body of an error with this message and code."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message=message, error=code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and all(other.get(key) == value for key, value in self.items())

    __hash__ = None  # type: ignore[assignment]


def test_i18_limits_of_a_feed_change_from_its_next_batch_on_and_of_no_other(run: Run) -> None:
    door, yard = run.begin("door", "shapes:1"), run.begin("yard", "shapes:2")
    dim = tuple(value * 6 // 10 for value in RED)
    picture = lit((8, 8, 40, 40), dim, SIZE)  # scores 0.6

    def found(camera: Camera) -> list[Any]:
        before = len(run.found.results)
        camera.give((picture, 0.0))
        run.found.wait(before + 1)
        return list(run.found.results[-1].value["labels"])

    assert (found(door), found(yard)) == (["red"], ["red"])
    assert run.ask("PATCH", "/feeds/door", score=0.7)[1]["score"] == 0.7
    assert (found(door), found(yard)) == ([], ["red"])
    assert run.ask("PATCH", "/feeds/door", score=None, classes=["blue", "green"])[1]["classes"] == ["blue", "green"]
    assert (found(door), found(yard)) == ([], ["red"])
    assert run.ask("PATCH", "/feeds/door", classes=[0])[1]["score"] is None
    assert (found(door), found(yard)) == (["red"], ["red"])
    assert run.ask("POST", "/feeds", name="hall", source="shapes:4", classes=["blue"])[0] == 201
    assert found(run.cameras["4"]) == []
    assert run.ask("PATCH", "/feeds/door", classes=["re"]) == (
        422, told_of("classes=re: the graph has 3 classes; did you mean red?", "invalid_request"),
    )  # fmt: skip
    assert found(door) == ["red"]


def test_i18_changes_that_wait_for_each_other_do_not_undo_each_other(run: Run) -> None:
    run.begin("a", "shapes:1")
    limit, waiting = run.detector.limit, threading.Event()
    other = threading.Thread(target=lambda: run.ask("PATCH", "/feeds/a", classes=["red"]))

    def limited(feed: str, wanted: FrameLimits) -> None:
        """While one change is made, another one comes and waits."""
        if not other.ident:
            run.fleet._turn = Waited(run.fleet._turn, waiting)  # type: ignore[assignment]
            other.start()
            assert waiting.wait(PATIENCE)
        limit(feed, wanted)

    run.detector.limit = limited  # type: ignore[method-assign]
    assert run.ask("PATCH", "/feeds/a", score=0.6)[0] == 200
    other.join(PATIENCE)
    told = run.ask("GET", "/feeds/a")[1]
    assert (told["score"], told["classes"]) == (0.6, ["red"])


class Waited:
    """A lock that tells when somebody comes to wait for it."""

    def __init__(self, lock: Any, waiting: threading.Event) -> None:
        self._lock, self._waiting = lock, waiting

    def __enter__(self) -> None:
        self._waiting.set()
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def test_i18_the_rate_of_a_feed_changes_from_its_next_picture_on(run: Run) -> None:
    camera = run.begin("file", "shapes:file")
    picture = lit((8, 8, 40, 40), RED, SIZE)

    def show(second: int, count: int, of: int = 11) -> None:
        """Pictures a tenth of a second apart, of which so many are taken, the last one too."""
        before = len(run.found.results)
        camera.give(*[(picture, second + n / 10) for n in range(of)])
        run.found.wait(before + count)

    show(0, 11)
    assert run.ask("PATCH", "/feeds/file", fps=5)[1]["settings"]["fps"] == 5
    show(2, 6)
    told = run.ask("PATCH", "/feeds/file", fps=None, every=3)[1]["settings"]
    assert (told["fps"], told["every"]) == (0, 3)
    show(4, 3, of=9)
    assert run.ask("PATCH", "/feeds/file", every=0, score=0.9)[1]["field"] == "every"
    assert run.ask("GET", "/feeds/file")[1]["score"] is None
    assert run.ask("PATCH", "/feeds/file", every=None)[1]["settings"]["every"] == 1
    show(6, 11)
    seen = [result.frame.pts for result in run.found.results]
    assert seen[11:17] == [2.0, 2.2, 2.4, 2.6, 2.8, 3.0]
    assert seen[20] == 6.0


def test_i18_frames_of_one_batch_have_the_limits_of_their_feeds(tmp_path: Path) -> None:
    from reflex_runtime.drivers.batch_processor import BatchEntry
    from reflex_runtime.feeds.onnx import FrameLimits

    made = OnnxFrames(bright_graph(tmp_path / "a.onnx", "raw", SIZE), classes=["red", "green"])
    made.on_start()
    made.limits = {"b": FrameLimits(0.99), "c": FrameLimits(None, ("blue",)), "e": FrameLimits(None, ())}
    colours = {"a": (200, 0, 0), "b": (200, 0, 0), "c": (0, 0, 200), "d": BLUE, "e": (0, 0, 200)}
    frames = [BatchEntry(name, lit((8, 8, 40, 40), c, SIZE), None, 0, None, 0.0) for name, c in colours.items()]
    assert [found["labels"] for found in made.process(frames)] == [["red"], [], ["blue"], [], ["blue"]]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field", "says"),
    [
        ("POST", "/feeds", "{", 400, None, "the body is not JSON"),
        ("POST", "/feeds", "[]", 422, "body", "the body must be an object"),
        ("POST", "/feeds", {"name": "a"}, 422, "source", "source: must be there"),
        ("POST", "/feeds", {"name": "a", "source": 3}, 422, "source", "source: must be text"),
        ("POST", "/feeds", {"name": "a b", "source": "shapes:1"}, 422, "name", "the name must be 1 to 64"),
        ("POST", "/feeds", {"name": "..", "source": "shapes:1"}, 422, "name", "and neither . nor .."),
        ("POST", "/feeds", {"name": "a.jpg", "source": "shapes:1"}, 422, "name", "must not end like a picture's"),
        ("POST", "/feeds", {"name": "a", "source": "shapes:1", "speed": 1}, 422, "speed", "speed: no such field"),
        ("POST", "/feeds", {"name": "a", "source": "shapes:1", "scor": 1}, 422, "scor", "did you mean score?"),
        ("POST", "/feeds", {"name": "a", "source": "shapes:1", "restarts": "x"}, 422, "restarts", "must be a whole"),
        ("POST", "/feeds", {"name": "a", "source": "shapes:1", "max_age_ms": 0}, 422, "max_age_ms", "must be in [1, "),
        ("POST", "/feeds", {"name": "a", "source": "shapes:1", "loop": True}, 422, "loop", "loop: is for files"),
        ("POST", "/feeds", {"name": "a", "source": "shapes:1", "score": 2}, 422, "score", "must be a number in [0, 1]"),
        ("POST", "/feeds", {"name": "a", "source": "shapes:1", "classes": "red"}, 422, "classes", "must be a list"),
        ("POST", "/feeds", {"name": "a", "source": "shapes:1", "classes": ["x"]}, 422, "classes", "has 3 classes"),
        ("POST", "/feeds", {"name": "a", "source": "door.mp4"}, 422, "source", "--add-files"),
        ("POST", "/feeds", {"name": "a", "source": "ftp://u:pw@x/y"}, 422, "source", "ftp://x/y: must start with"),
        ("POST", "/feeds", {"name": "a", "source": "file:///etc/passwd"}, 422, "source", "must start with rtsp://"),
        ("POST", "/feeds", {"name": "a", "source": "rtsp://u:pw@127.0.0.1/x"}, 422, "source", "is this machine"),
        ("PATCH", "/feeds/none", {"score": 0.5}, 404, None, "there is no feed none"),
        ("PATCH", "/feeds/none", {"source": "shapes:1"}, 422, "source", "no such field"),
        ("PATCH", "/feeds/none", {"fps": 5}, 404, None, "there is no feed none"),
        ("POST", "/admin/load", {}, 422, "path", "path: must be there"),
        ("POST", "/admin/load", {"path": "x.onnx", "provider": "cuda"}, 422, "provider", "no such field"),
    ],
)
def test_i18_what_cannot_be_is_refused_by_field_and_changes_nothing(
    run: Run, method: str, path: str, body: Any, status: int, field: str | None, says: str
) -> None:
    raw = body if isinstance(body, str) else json.dumps(body)
    code, _, told = run.page.ask(path, method, raw.encode(), X_Reflex_Key=KEY)
    error = json.loads(told)
    assert (code, error.get("field")) == (status, field), error
    assert says in error["message"]
    assert "pw" not in error["message"]
    assert run.runtime.names == frozenset()
    assert run.detector.limits == {}


def test_i18_there_are_only_so_many_feeds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MOST", 1)
    run.begin("a", "shapes:1")
    status, told = run.ask("POST", "/feeds", name="b", source="shapes:2")
    assert (status, told["message"]) == (409, "there are 1 feeds, which is the most")


def test_i18_only_so_many_changes_wait(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_WAITING", 0)
    status, told = run.ask("POST", "/feeds", name="b", source="shapes:2")
    assert (status, told["message"]) == (409, "0 changes wait already, which is the most")


def test_i18_what_cannot_be_started_leaves_no_limits(run: Run) -> None:
    run.runtime.stop()
    assert run.ask("POST", "/feeds", name="a", source="shapes:1", score=0.5)[0] == 503
    assert run.detector.limits == {}


def test_h5_only_those_with_the_key_may_change_feeds_and_without_one_only_programs_of_this_machine(
    run: Run, tmp_path: Path
) -> None:
    asked = [("POST", "/feeds"), ("PATCH", "/feeds/a"), ("DELETE", "/feeds/a"), ("GET", "/feeds/a")]
    asked.append(("POST", "/admin/load"))
    assert {run.ask(method, path, key="wrong")[0] for method, path in asked} == {401}
    assert run.page.ask("/feeds")[0] == 200  # the page holds nothing
    status, headers, _ = run.page.ask("/feeds/a", "PUT", X_Reflex_Key=KEY)
    assert (status, headers["Allow"]) == (405, "GET, PATCH, DELETE")
    open_run = Run(tmp_path)
    open_run.page = Page(open_run.page.server._pages)
    with open_run.page.server:
        for method, path in asked:
            through = open_run.page.ask(path, method, b"{}", X_Forwarded_For="10.0.0.9")[0]
            assert through == (404 if method == "GET" else 401)
            assert open_run.page.ask(path, method, b"{}", Origin="http://evil.example")[0] == 403


@pytest.mark.parametrize(
    ("source", "address", "why"),
    [
        ("rtsp://cam.local/live", "10.0.0.7", ""),
        ("https://user:pw@cam.example:8443/x", "2001:db8::7", ""),
        ("rtsps://10.1.2.3", "10.1.2.3", ""),
        ("rtsp://cam.local/live", "127.0.0.1", "is this machine"),
        ("http://metadata/latest", "169.254.169.254", "is this machine or its link"),
        ("http://x/", "::ffff:127.0.0.1", "is this machine"),
        ("http://x/", "fe80::1%eth0", "is this machine or its link"),
        ("http://x/", "0.0.0.0", "is this machine"),
        ("rtsp:///live", "10.0.0.7", "has no host"),
        ("rtsp://cam:99999/live", "10.0.0.7", "has no host"),
        ("rtsp://gone/live", "", "gone cannot be looked up"),
        ("ftp://cam/live", "10.0.0.7", "must start with rtsp://"),
        ("shapes:seed=1", "", ""),
        ("rtsp://cam/\n", "10.0.0.7", "none of control"),
    ],
)
def test_i18_which_addresses_may_be_added(source: str, address: str, why: str) -> None:
    def look_up(host: str, port: int, type: int) -> list[Any]:
        if not address:
            raise socket.gaierror("unknown")
        return [(None, None, None, None, (address, port))]

    if why:
        with pytest.raises(ConfigError, match=why) as refused:
            check_fresh("a", source, {"shapes"}, "", look_up)
        assert "pw" not in str(refused.value)
    else:
        check_fresh("a", source, {"shapes"}, "", look_up)


def test_i18_which_files_may_be_added(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path / "secret.mp4")
    check_fresh("a", str(folder / "door.mp4"), (), str(folder))
    for outside in (tmp_path / "secret.mp4", folder / ".." / "secret.mp4", folder / "out", "/dev/video0"):
        with pytest.raises(ConfigError, match="must be below"):
            check_fresh("a", str(outside), (), str(folder))


def test_h7_the_document_describes_every_path_and_who_may_ask(run: Run) -> None:
    document = json.loads(run.page.ask("/openapi.json")[2])
    paths = {path: methods.keys() for path, methods in document["paths"].items()}
    server = run.page.server
    pages = server._pages()  # those that are served
    own = {path.replace("NAME", "{name}") for path in pages.routes if not path.startswith("/dashboard/")}
    own |= {path.replace("NAME", "{name}") for path in ("/feeds/NAME", "/feeds/NAME.jpg", "/feeds/NAME.mjpeg")}
    assert own - {"/openapi.json", "/docs"} <= paths.keys()
    for path, methods in document["paths"].items():
        for method in methods:
            status = run.page.ask(path.replace("{name}", "x"), method.upper(), b"{}")[0]
            assert (status == 401) == ("security" in methods[method]), (method, path, status)
    fields = document["paths"]["/feeds"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"name", "source", "score", "classes", *PER_FEED} == fields.keys()
    assert fields["fps"]["maximum"] == 1000
    docs = run.page.ask("/docs")[2].decode()
    assert "PATCH /feeds/{name}" in docs
    assert "DELETE /feeds/{name}" in docs


# -- another detector --------------------------------------------------------------------------------------------------


def test_i18_a_detector_is_replaced_between_batches_and_no_frame_is_lost(run: Run, tmp_path: Path) -> None:
    cameras = [run.begin(f"file{i}", f"shapes:file{i}") for i in range(3)]
    picture = lit((8, 8, 40, 40), RED, SIZE)
    for camera in cameras:
        camera.give(*[(picture, n / 10) for n in range(40)])
    run.found.wait(10)
    other = bright_graph(tmp_path / "other.onnx", "rows", (96, 96), batch=2)  # another form, size and batch
    status, told = run.ask("POST", "/admin/load", path=str(other))
    names = {"model_version": version_of(other), "path": str(other), "before": version_of(run.graph)}
    assert (status, told) == (200, names)
    of_three = sizes(run).get(3, 0)
    for camera in cameras:
        camera.give(*[(picture, n / 10) for n in range(40, 60)], None)
    run.found.wait(180)
    for i in range(3):
        results = [result for result in run.found.results if result.feed == f"file{i}"]
        assert [result.frame.sequence for result in results] == list(range(60))
        versions = [result.value["model"] for result in results]
        assert versions == sorted(versions, key=[version_of(run.graph), version_of(other)].index)  # never back
        assert versions[-20:] == [version_of(other)] * 20
        assert {tuple(map(round, result.value["boxes"][0])) for result in results} == {(8, 8, 40, 40)}
    assert sizes(run).get(3, 0) <= of_three + 1  # one may have been formed when it was replaced


def sizes(run: Run) -> Any:
    """How many batches had each size."""
    return run.runtime.snapshot().coordinators["onnx"].batch_sizes


def test_i18_a_detector_that_cannot_be_used_leaves_everything_as_it_was(run: Run, tmp_path: Path) -> None:
    camera = run.begin("door", "shapes:1")
    assert run.ask("PATCH", "/feeds/door", classes=["red"])[0] == 200
    camera.give((lit((8, 8, 40, 40), RED, SIZE), 0.0))
    run.found.wait(1)
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    others = bright_graph(tmp_path / "others.onnx", "raw", SIZE, metadata={"names": "{0: 'cat', 1: 'dog', 2: 'cow'}"})
    wrong = {"broken.onnx": "broken.onnx", "gone.onnx": "gone.onnx", others.name: "feed door: classes=red"}
    for path, says in wrong.items():
        status, told = run.ask("POST", "/admin/load", path=str(tmp_path / path))
        assert (status, told["field"]) == (422, "path"), told
        assert says in told["message"]
    assert run.ask("POST", "/admin/load", path=str(others), score=7)[1]["field"] == "score"
    camera.give((lit((8, 8, 40, 40), RED, SIZE), 0.1))
    run.found.wait(2)
    assert [result.value["model"] for result in run.found.results] == [version_of(run.graph)] * 2
    assert run.detector.current.name == version_of(run.graph)


def test_i18_a_detector_is_tried_on_the_newest_frame_before_it_is_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    camera = run.begin("door", "shapes:1")
    camera.give((lit((8, 8, 40, 40), RED, SIZE), 0.0))
    run.found.wait(1)

    def fails(self: OnnxFrames, entries: Any) -> list[Any]:
        return [ConfigError("no light")] * len(entries)

    with monkeypatch.context() as patched:
        patched.setattr(OnnxFrames, "process", fails)
        status, told = run.ask("POST", "/admin/load", path=str(bright_graph(tmp_path / "other.onnx", "raw", SIZE)))
    assert (status, told["message"][-43:]) == (422, "fails on the newest frame of door: no light")
    assert run.detector.current.name == version_of(run.graph)


def test_f6_a_new_detector_is_timed_anew(run: Run, tmp_path: Path) -> None:
    camera = run.begin("door", "shapes:1")
    for n in range(5):
        camera.give((lit((8, 8, 40, 40), RED, SIZE), n / 10))
        run.found.wait(n + 1)
    (coordinator, _) = run.runtime._coordinators["onnx"]
    model = coordinator._scheduler.cost_model("onnx")
    assert model.snapshot()[0]["samples"] >= 3
    assert run.ask("POST", "/admin/load", path=str(bright_graph(tmp_path / "other.onnx", "raw", SIZE)))[0] == 200
    assert model.snapshot() == []


def test_i18_a_run_with_a_port_may_begin_without_feeds() -> None:
    assert specs_of([], None, FeedsConfig(port=0)) == []
    with pytest.raises(ConfigError, match="no feeds: give NAME=SOURCE"):
        specs_of([], None, FeedsConfig())
