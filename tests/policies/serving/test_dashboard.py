"""What a policy server shows to those who watch it, over real sockets; the page itself is in tests/browser."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from reflex_runtime.cli import main
from reflex_runtime.cli.server_address import ServerAddress
from reflex_runtime.cli.top import TopView, watched
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.telemetry.live import LiveSnapshot
from serving.harness import STATE, Server


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
        told = told if told["clients"] else next(seen)
        (client,) = told["clients"]
        assert (client["name"], client["group"], client["wire"], client["answers"]) == ("arm-7", "prod", "act", 1)
        assert told["groups"][0]["outcomes"] == {"ok": 1}
        policy = told["server"]["policies"]["default"]
        assert policy["slots"] == {"prod": {"verdict": "ok"}}
        seen.close()


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
        assert server.process.wait(30) == 0


def test_h5_top_says_that_a_key_is_wanted(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny, "--api-key", "s3cret") as server:
        with pytest.raises(ConfigError, match="wants a key: --api-key KEY"):
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
        told = [next(seen), next(seen)]
        seen.close()
    view, console = TopView("here"), Console(width=120, record=True)
    for snapshot in told:
        console.print(view.show(msgspec.convert(snapshot, LiveSnapshot), 120))
    text = console.export_text()
    for words in ("batch 1 of prod: 1,", "█ arm-7", "act", "pred/meas"):
        assert words in text, text


def test_x4_top_says_what_does_not_answer_or_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "ftp://nowhere"]) == 2
    assert "must be like http://127.0.0.1:8000" in capsys.readouterr().err
    with pytest.raises(ReflexError, match="nothing listens there"):
        next(watched(ServerAddress.of("http://127.0.0.1:9")))
