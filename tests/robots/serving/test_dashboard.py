"""What a policy server shows to those who watch it, over real sockets; the page itself is in tests/browser."""

from __future__ import annotations

import http.client
import io
import json
import re
import subprocess
import sys
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from reflex_runtime.cli import main
from reflex_runtime.cli.top import watched
from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe import top_view
from reflex_runtime.observe.live import Live, LiveClient, LiveGroup, LiveSnapshot
from reflex_runtime.observe.top_view import TopView
from reflex_runtime.web.server_address import ServerAddress, snapshot_of
from serving.harness import PATIENCE, STATE, Server

WAITS = {"queued": 4, "preparing": 1, "residents": 0, "queued_seconds": 0.5}


class Old(BaseHTTPRequestHandler):
    """A server without the stream."""

    def do_GET(self) -> None:
        self.send_error(404)


def snapshots(server: Server, key: str = "") -> Generator[Any]:
    for line in watched(ServerAddress.of(f"http://127.0.0.1:{server.port}"), key):
        yield json.loads(line)


def test_x4_a_request_is_shown_in_its_batch_with_its_client_and_its_wire(tiny: Path) -> None:
    with Server(tiny) as server:
        seen = snapshots(server)
        first = next(seen)
        assert (first["batches"], first["clients"], first["server"]["state"]) == ([], [], "ready")
        assert first["server"]["queues"]["prod"]["queued"] == 0
        assert server.act(robot_id="arm-7").status == 200
        told = next(s for s in seen if s["batches"])
        (batch,) = told["batches"]
        assert [member[0] for member in batch["members"]] == ["arm-7"]
        assert batch["took"] > 0.0
        told = told if told["clients"] else next(s for s in seen if s["clients"])
        (client,) = told["clients"]
        assert (client["name"], client["group"], client["wire"], client["answers"]) == ("arm-7", "prod", "act", 1)
        assert told["groups"][0]["outcomes"] == {"ok": 1}
        policy = told["server"]["policies"]["default"]
        assert policy["slots"] == {"prod": {"verdict": "ok"}}
        seen.close()


def test_x4_a_caller_without_a_name_is_an_address_and_a_number_that_does_not_come_again(tiny: Path) -> None:
    with Server(tiny) as server:
        seen = snapshots(server)
        next(seen)
        for _ in range(3):  # a connection each, as curl has
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            connection.request("POST", "/act", json.dumps({"state": STATE}))
            assert connection.getresponse().status == 200
            connection.close()
        told = next(s for s in seen if len(s["clients"]) == 3)
        seen.close()
    names = {client["name"] for client in told["clients"]}
    assert len(names) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1 #[0-9]{1,3}", name) for name in names)


def test_x4_watching_costs_nothing_once_all_have_left(tiny: Path) -> None:
    with Server(tiny) as server:
        seen = snapshots(server)
        assert next(seen)["server"]["watchers"] == 1
        seen.close()
        assert server.act().status == 200
        again = snapshots(server)
        assert next(again)["number"] == 1  # another fold, which has seen nothing of the time between
        assert next(again)["clients"] == []
        again.close()


def test_x4_a_server_that_drains_ends_the_stream(tiny: Path) -> None:
    with Server(tiny) as server:
        seen = snapshots(server)
        next(seen)
        server.process.terminate()
        for _ in seen:
            pass
        assert server.wait() == 0


def test_x4_the_socket_of_one_that_left_is_closed(tiny: Path) -> None:
    with Server(tiny) as server:
        seen = snapshots(server)
        next(seen)
        seen.close()
        process = psutil.Process(server.process.pid)
        server.wait_until(lambda: all(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp")))


def test_h5_top_says_that_a_key_is_wanted(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny, "--api-key", "s3cret") as server:
        with pytest.raises(ConfigError, match="needs a key: --api-key KEY"):
            next(snapshots(server))
        with pytest.raises(ConfigError, match="another key"):
            next(snapshots(server, "wrong"))
        url = f"http://127.0.0.1:{server.port}"
        assert main(["top", url, "--api-key", "s3cret", "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["server"]["product"] == "policies"


def test_x4_top_shows_batches_clients_and_queues(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny) as server:
        assert main(["top", f"127.0.0.1:{server.port}", "--once"]) == 0
        out = capsys.readouterr().out
        assert "ready" in out
        assert "no batch yet" in out
        seen = snapshots(server)
        next(seen)
        assert server.post({"state": STATE, "robot_id": "arm-7"}).status == 200
        told = [next(s for s in seen if s["batches"])]
        told += told if told[0]["clients"] else [next(s for s in seen if s["clients"])]
        seen.close()
    view, console = TopView("here"), Console(width=120, record=True)
    for snapshot in told:
        console.print(view.show(msgspec.convert(snapshot, LiveSnapshot), 120))
    text = console.export_text()
    for words in ("batch 1 of prod: 1,", "█ arm-7", "act", "pred/meas"):
        assert words in text, text


def test_x4_top_into_a_pipe_is_a_line_a_snapshot(tiny: Path) -> None:
    with Server(tiny) as server:
        command = [sys.executable, "-m", "reflex_runtime", "top", f"127.0.0.1:{server.port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
            assert top.stdout is not None
            lines = [top.stdout.readline(), top.stdout.readline()]
            top.stdout.close()  # as head does
            server.post({"state": STATE})
            assert top.wait(PATIENCE) == 0
    assert [line.split("  ")[:2] for line in lines] == [[f"127.0.0.1:{server.port}: ready", "0.0 answers/s"]] * 2


def test_x4_a_shadow_is_no_client_and_answers_nobody(tiny: Path) -> None:
    with Server(tiny, "--shadow-policy", str(tiny), "--shadow-sample", "1") as server:
        seen = snapshots(server)
        next(seen)
        for _ in range(4):
            assert server.act(robot_id="arm-7").status == 200
        told = next(s for s in seen if any(g["name"] == "shadow" and g["outcomes"] for g in s["groups"]))
        seen.close()
    assert [client["name"] for client in told["clients"]] == ["arm-7"]
    snapshot = msgspec.convert(told, LiveSnapshot)
    for group in snapshot.groups:
        group.rate, group.p99 = {"prod": (3.0, 0.25), "shadow": (2.0, 0.5)}[group.name]
    console = Console(width=120, record=True)
    console.print(TopView("here").show(snapshot, 120))
    head = console.export_text().splitlines()[0]
    assert "  3.0 answers/s" in head
    assert "p99 250 ms" in head


def test_x4_texts_of_cameras_and_models_break_no_row_of_top() -> None:
    feed = {"state": "lost", "fps": 1.0, "age": 0.1, "p95": None, "frames": 1, "restarts": 0, "drops": {}}
    server = {"state": "failed", "error": "no\x1b[2J\nmodel", "feeds": {"gate": feed | {"error": "no\x1b[31m\nroute"}}}
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(TopView("here").show(LiveSnapshot(0.0, 1, [], [], 0, [], [], 0, server), 120))
    lines = console.export_text().splitlines()
    assert "no·[2J·model" in lines
    assert [line for line in lines if "gate" in line and line.rstrip().endswith("no·[31m·route")]


def test_x4_top_says_what_it_cannot_read() -> None:
    with pytest.raises(ReflexError, match=r"here: runs another version of reflex: .*`at`"):
        snapshot_of(b'{"number": 1}\n', "here")
    with pytest.raises(ReflexError, match="here: ended in the middle"):
        snapshot_of(b'{"number": 1', "here")


def test_x4_top_shows_groups_without_a_queue_and_keeps_a_bounded_number_of_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(top_view, "NAMES", 20)
    live = Live(0.0)
    scheduler = Scheduler([GroupConfig(name="generate")])
    view, console = TopView("here"), Console(width=120, record=True)
    for i in range(25):
        ticket = scheduler.submit(Request(None, group="generate", client=f"c{i}"), 0.0)
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        scheduler.complete(batch, [Done()], 0.1, 0.1)
        for event in scheduler.take_events():
            if type(event) in Live.events:
                live(event)
        assert ticket.outcome is not None
    console.print(view.show(live.snapshot(1.0, {"queues": {"worker-0": WAITS}}), 120))
    rows = [text.split() for text in console.export_text().splitlines()]
    assert ["worker-0", "3", "1", "0", "500", "ms"] in rows
    assert any(row[:5] == ["generate", "–", "–", "–", "–"] for row in rows)
    assert len(view._colours) == 20


@pytest.mark.parametrize(("width", "shown"), [(120, 9), (80, 8), (60, 5), (40, 3)])
def test_x4_top_leaves_out_columns_on_a_narrow_terminal(width: int, shown: int) -> None:
    client = LiveClient("robot-arm-1", "prod", "openpi", 2.0, 0.1, 30, 0.02, 1, "queue_full")
    group = LiveGroup("prod", 0.5, 1, 3, 2.0, 0.01, 0.02, 0.03, 1.0, {"ok": 3, "failed": 1})
    snapshot = LiveSnapshot(1.0, 1, [], [], 0, [group], [client], 1, {"queues": {"prod": WAITS}})
    console = Console(width=width, record=True)
    console.print(TopView("here").show(snapshot, width))
    lines = console.export_text().splitlines()
    (row,) = [line for line in lines if line.startswith("█ robot-arm-1")]
    assert len(re.split(r"  +", row.strip())) == shown
    (groups,) = [line for line in lines if line.startswith("prod")]
    assert "30.0 ms" in groups
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("width", [120, 80, 60])
def test_x4_top_shows_feeds_and_processes_however_narrow_a_terminal_is(width: int) -> None:
    drops = {"overrun": 3, "queue_full": 12}
    feed = {"fps": 14.5, "age": 0.02, "p95": 0.08, "frames": 77_000, "drops": drops, "restarts": 4, "state": "running"}
    feeds = {f"cam-{i}": feed | {"error": "rtsp://10.0.0.7/live: Connection refused " * 5} for i in range(22)}
    process = {"name": "worker-0", "pid": 14224, "state": "restarting", "restarts": 2, "memory": 130_400_000}
    process |= {"running": 3, "waiting": None, "why": "its process was ended by SIGKILL " * 5}
    server = {"state": "failing", "error": "cam-1 is reconnecting", "feeds": feeds, "processes": [process]}
    console = Console(width=width, record=True)
    console.print(TopView("here").show(LiveSnapshot(1.0, 1, [], [], 0, [], [], 0, server), width))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert "cam-1 is reconnecting" in lines
    assert any(re.match(r"█ cam-19 +running +14\.5 +20\.0 ms ", line) for line in lines)
    assert [line.rstrip() for line in lines if "more" in line] == ["and 2 more"]
    (row,) = [line for line in lines if line.startswith("worker-0")]
    assert re.match(r"worker-0  restarting +(14224 +)?2  130 MB +3 +–", row)
    assert ("ended" in row) == (width == 120)  # its beginning


def test_x4_top_once_says_what_those_who_watch_see(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny, "--max-consecutive-crashes", "1", "--inject-fault", "prod:raise:1") as server:
        assert server.act(robot_id="arm-7").status == 500
        seen = snapshots(server)
        told = next(seen)["server"]
        seen.close()
        (process,) = told["processes"]
        assert process["pid"] == server.process.pid
        assert process["memory"] == pytest.approx(psutil.Process(process["pid"]).memory_info().rss, rel=0.2)
        assert main(["top", "--once", f"127.0.0.1:{server.port}"]) == 1
        shown = capsys.readouterr().out
    version = told["policies"]["default"]["versions"]["prod"]
    assert re.search(rf"^default +degraded +prod +drained +{re.escape(version)} ", shown, re.MULTILINE), shown
    assert re.search(rf"^server +degraded +{process['pid']} +0 +\d+ MB +0 +0", shown, re.MULTILINE), shown
    assert re.search(r"^prod +0 +0 +0 ", shown, re.MULTILINE), shown


def test_x4_top_says_what_does_not_answer_or_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "ftp://nowhere"]) == 2
    assert "must be like http://127.0.0.1:8000" in capsys.readouterr().err
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:  # it takes no GET: 501
        Thread(target=other.handle_request).start()
        with pytest.raises(ReflexError, match="answers 501 at /dashboard/stream; is it a server of reflex"):
            next(watched(ServerAddress.of(f"http://127.0.0.1:{other.server_port}")))
    with HTTPServer(("127.0.0.1", 0), Old) as old:
        Thread(target=old.handle_request).start()
        with pytest.raises(ReflexError, match="has no /dashboard/stream; is it a server of this version"):
            next(watched(ServerAddress.of(f"http://127.0.0.1:{old.server_port}")))
    with pytest.raises(ReflexError, match="nothing listens there"):
        next(watched(ServerAddress.of("http://127.0.0.1:9")))
