"""`reflex serve` of an embedding model: its options, each of which does something, and one real run of it."""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from llm.embedding.directories import write_graph, write_json
from reflex_runtime.cli import main
from reflex_runtime.cli.embedding_settings import load_encoder
from reflex_runtime.config import EmbeddingServeConfig
from reflex_runtime.core.events import BatchScheduled
from reflex_runtime.core.sized_cost import SizedCost
from reflex_runtime.llm.embedding import load as loading
from reflex_runtime.llm.serving import local_models, server
from reflex_runtime.options import flag
from reflex_runtime.sources import load as load_settings
from serving.collector import Collector
from serving.embedding_toy import EmbeddingToy
from serving.harness import Server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("embedding") / "my-model")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command would serve: (its plan, its open, seconds of the end), one each time it gets as far."""
    from reflex_runtime.web import serve as module

    found: list[Any] = []

    def serve(made: tuple[Any, ...], sock: socket.socket, drain_s: float, *told: Any) -> tuple[int, bool]:
        sock.close()
        (plan,) = made[3]
        found.append((plan, made[2], drain_s))
        return 0, True

    monkeypatch.setattr(server, "serving", lambda *made: made)
    monkeypatch.setattr(module, "serve", serve)
    monkeypatch.setattr(logging, "basicConfig", lambda **given: None)
    for name in (f.name for f in fields(EmbeddingServeConfig)):
        monkeypatch.delenv(f"REFLEX_{name.upper()}", raising=False)
    return found


def begun(root: Path, *options: str) -> None:
    assert main(["serve", "--no-supervise", str(root), "--port", "0", *options]) == 0


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line a start that must fail prints."""
    try:
        status = main(["serve", "--no-supervise", *arguments])
    except SystemExit as exit:
        status = int(exit.code or 0)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    return line


def test_h10_an_embedding_model_is_served_under_the_directorys_name_unless_said(root: Path, served: list[Any]) -> None:
    begun(root)
    begun(root, "--served-model-name", "other", "--drain-timeout-s", "7", "--pooling", "cls", "--max-model-len", "9")
    assert [plan.name for plan, *_ in served] == ["my-model", "other"]
    assert [made[-1] for made in served] == [30.0, 7.0]
    assert [(plan.model.pooling, plan.model.max_model_len) for plan, *_ in served] == [(("mean",), 64), (("cls",), 9)]


def test_h10_what_is_said_of_an_embedding_model_goes_to_its_loader(
    root: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(loading, "load", lambda model, *options: asked.append(options))
    monkeypatch.setattr(loading, "check", lambda *given: None)
    begun(root)
    options = "--device cuda --runner torch --dtype bfloat16 --threads 3 --cache-dir kept"
    begun(root, *options.split())
    for plan, *_ in served:
        load_encoder(plan)
    assert asked == [("auto", "auto", "auto", None, ""), ("cuda", "torch", "bfloat16", 3, "kept")]


def test_h10_max_batch_cost_ms_bounds_what_shares_a_batch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = SizedCost(6.0 * 8).work
    taken = [((tokens,), 0.001 * work(tokens)) for tokens in (4, 16, 64)]  # a millisecond a token, of brief texts
    monkeypatch.setattr(local_models, "measure", lambda model, encoder: taken)

    def sizes(**config: Any) -> list[int]:
        with EmbeddingToy(root, **config) as toy:
            assert toy.embed(["a"] * 12).status == 200  # 36 tokens
            return [len(event.batch) for event in toy.log.of(BatchScheduled)]

    assert sizes() == [12]
    assert sizes(max_batch_cost_ms=10)[0] == 3


def test_b19_a_batch_that_hangs_is_answered_after_watchdog_s(root: Path) -> None:
    with EmbeddingToy(root, watchdog_s=0.2) as toy:
        toy.runner.stop()
        answer = toy.embed("a")
        assert (answer.status, toy.error(answer)["code"]) == (500, "processor_hung")
        assert answer.seconds < 30
        toy.runner.go()
        toy.until(lambda: toy.model.state == "ready")
        assert toy.embed("a").status == 200


def test_h10_a_body_over_max_body_bytes_is_413(root: Path) -> None:
    with EmbeddingToy(root, max_body_bytes=2000, api_key="k") as toy:
        assert toy.embed("a").status == 401
        key = {"authorization": "Bearer k"}
        asked = {"model": "toy", "input": "a " * 1000}
        assert toy.post("/v1/embeddings", asked, **key).status == 413
        assert toy.post("/v1/embeddings", asked | {"input": "a"}, **key).status == 200


def test_x6_an_embedding_has_its_tokens_in_its_span_and_its_batch_is_linked(root: Path) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with Collector() as collector:
        with EmbeddingToy(root, otel=collector.url, otel_sample=0.0) as toy:
            toy.embed("not sampled")
            asked = {"model": "toy", "input": ["robot", "a"]}
            toy.post("/v1/embeddings", asked, traceparent=parent)
            toy.post("/v1/embeddings", {"model": "toy", "input": ""}, traceparent=parent)
        spans = collector.wait(2, lambda s: s.trace == parent.split("-")[1])
        good, bad = sorted(spans, key=lambda s: s.attributes["http.response.status_code"])
        assert (good.name, good.attributes["gen_ai.operation.name"]) == ("embeddings toy", "embeddings")
        assert good.attributes["gen_ai.usage.input_tokens"] == 6
        assert bad.attributes["http.response.status_code"] == 400
        (batch,) = collector.wait(1, lambda s: bool(s.links))
        assert {span for _, span in batch.links} == {good.span}
        assert not [s for s in collector.wait(3, lambda s: True) if s.attributes.get("gen_ai.usage.input_tokens") == 4]


def test_h10_what_only_embedding_models_have_stands_in_the_environment_too() -> None:
    assert load_settings(EmbeddingServeConfig, "serve", None, {"REFLEX_POOLING": "cls"}, {}).pooling == "cls"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--max-model-len 513", "--max-model-len=513: must be at most 512, what the model has places for"),
        ("--pooling max", "--pooling=max: must be one of auto, mean, cls, last"),
        ("--max-num-seqs 3", "--max-num-seqs is an option of models that generate"),
        ("--runner torch", "has no weights"),
        ("--trace /no/such/place", "--trace=/no/such/place: cannot be written"),
    ],
)
def test_b2_options_that_cannot_be_are_named(root: Path, capsys: Any, options: str, says: str) -> None:
    assert says in said(capsys, str(root), *options.split())


def test_h11_an_embedding_server_from_outside_without_a_key_warns_and_a_port_in_use_is_one_line(
    root: Path, served: list[Any], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(root, "--host", "0.0.0.0")
    assert "--host=0.0.0.0 is reachable from outside" in caplog.text
    capsys.readouterr()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port={port}: cannot be bound" in said(capsys, str(root), "--port", str(port))


def test_l8_a_directory_that_cannot_be_served_is_one_line_before_the_port_opens(tmp_path: Path, capsys: Any) -> None:
    write_json(tmp_path / "config.json", {"model_type": "bert", "architectures": ["BertForSequenceClassification"]})
    assert "is a classifier or reranker" in said(capsys, str(tmp_path))


def test_l9_a_real_run_logs_in_json_and_ends_with_zero(root: Path, tmp_path: Path) -> None:
    """The command, in a process of its own: supervised, then not."""
    with Server(root, "--log-format", "json") as server:
        asked = json.dumps({"model": "my-model", "input": "a robot arm"}).encode()
        answer = server.ask("POST", "/v1/embeddings", asked, {"Content-Type": "application/json"})
        assert answer.status == 200
        assert answer.json["usage"]["prompt_tokens"] == 5
    assert all(json.loads(line) for line in server.log if line.strip() not in ("", "<end>"))


def test_h10_every_option_of_an_embedding_model_has_a_flag(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", str(root), "--help"])
    text = capsys.readouterr().out
    assert all(flag(field.name) in text for field in fields(EmbeddingServeConfig))


def connection(toy: EmbeddingToy, sent: bytes) -> socket.socket:
    """A connection on which this was sent."""
    sock = socket.create_connection(("127.0.0.1", toy.port), timeout=60.0)
    sock.sendall(sent)
    return sock


def until_closed(sock: socket.socket) -> bytes:
    with sock:
        data = b""
        while part := sock.recv(65536):
            data += part
        return data


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n"


def test_h10_what_every_server_has_holds_for_embeddings_too(root: Path, tmp_path: Path) -> None:
    page = {"Origin": "http://page.example"}
    with EmbeddingToy(
        root, allow_host=("svc",), cors=(page["Origin"],), idle_timeout_s=0.2, head_timeout_s=0.3, body_timeout_s=0.4
    ) as toy:
        assert toy.get("/health", Host="svc").status == 200
        answer = toy.post("/v1/embeddings", {"model": "toy", "input": "a"}, **page)
        assert answer.headers["access-control-allow-origin"] == page["Origin"]
        assert b" 200 " in until_closed(connection(toy, GET)).splitlines()[0]
        assert b"within 0.3 s" in until_closed(connection(toy, GET[:20]))
        assert b"within 0.4 s" in until_closed(connection(toy, POST + b"{"))
    (tmp_path / "key").write_text("secret")
    with EmbeddingToy(root, api_key_file=str(tmp_path / "key"), max_connections=2, max_bodies_mb=1) as toy:
        assert toy.embed("a").status == 401
        first, second = (connection(toy, GET) for _ in range(2))
        for sock in (first, second):
            assert sock.recv(65536)
        assert toy.get("/health").status == 200
        assert until_closed(first) == b""  # idle for longest, so it made room
        key = b"Authorization: Bearer secret\r\n"
        head = POST.replace(b"Content-Length", key + b"Content-Length")
        second.sendall(head + b" " * 800_000)
        toy.until(lambda: toy.model is not None and toy.bodies.held == 800_000)
        with connection(toy, head + b" " * 300_000) as third:
            assert b" 503 " in third.recv(65536).splitlines()[0]
        second.close()


def test_without_a_supervisor_the_process_is_the_embedding_server(root: Path) -> None:
    with Server(root, "--no-supervise", supervised=True) as server:
        assert psutil.Process(server.process.pid).children() == []
        assert "restarts" not in server.get("/health").json

