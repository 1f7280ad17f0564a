"""H5 without a key: programs on this machine may ask, web pages and what came through a proxy may not. Both servers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings import LLMServeConfig, ServeConfig
from reflex_runtime.settings.read import load
from reflex_runtime.web.access import Trust
from reflex_runtime.web.errors import Forbidden
from serving.harness import STATE, Answer, Server, refusal
from serving.openai_toy import Toy
from serving.pair import Pair, two

FORWARDING = (
    "Forwarded", "Via", "X-Real-IP", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Client-IP",
    "CF-Connecting-IP", "True-Client-IP", "X-Cluster-Client-IP", "X-Original-Forwarded-For", "Fastly-Client-IP",
    "Fly-Client-IP", "X-Envoy-External-Address",
)  # fmt: skip


@pytest.fixture(scope="module")
def duo(pair: Pair) -> Iterator[Server]:
    with two(pair) as server:
        yield server


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy() as found:
        yield found


Ask = Callable[[str, str, Mapping[str, str]], Answer]


@pytest.fixture(scope="module", params=["policies", "models"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Ask one of the servers with further headers: a GET, or a POST that is right."""
    if request.param == "policies":
        server: Server = request.getfixturevalue("duo")
        body = json.dumps({"state": STATE, "episode_id": "e"}).encode()
        return lambda method, path, headers: server.ask(
            method, path or "/act", body if method == "POST" else None, headers
        )
    toy: Toy = request.getfixturevalue("toy")
    prompt = json.dumps({"model": "toy", "prompt": "hello", "max_tokens": 1}).encode()
    return lambda method, path, headers: toy.ask(
        method, path or "/v1/completions", prompt if method == "POST" else None, dict(headers)
    )


def code_of(answer: Answer) -> str:
    error = answer.json["error"]
    return str(error["code"] if isinstance(error, dict) else error)


# -- Host --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.8.9.1:80", "[::1]:8000"]
)
def test_h5_without_a_key_it_answers_to_the_names_of_this_machine(host: str, ask: Ask) -> None:
    assert ask("GET", "/health", {"Host": host}).status == 200
    assert ask("POST", "", {"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "0.0.0.0", "localhost@evil.x", "[", ""],
)
def test_h5_without_a_key_it_answers_to_no_other_name(host: str, ask: Ask) -> None:
    for method, path in (("GET", "/health"), ("GET", "/metrics"), ("GET", "/nowhere"), ("POST", "")):
        answer = ask(method, path, {"Host": host})
        assert (answer.status, code_of(answer)) == (403, "forbidden"), path
        assert "--allow-host" in answer.body.decode()


# -- Origin ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://localhost.evil.example", "null", "file://", "http://["]
)
@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_h5_without_a_key_no_page_of_another_site_may_post(origin: str, kind: str, ask: Ask) -> None:
    for path in ("", "/health"):
        answer = ask("POST", path, {"Origin": origin, "Content-Type": kind})
        assert (answer.status, code_of(answer)) == (403, "forbidden")
        assert f"Origin: {origin}: pages of other sites" in answer.body.decode()


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:8000", "https://[::1]"])
def test_h5_a_page_of_this_machine_may_post(origin: str, ask: Ask) -> None:
    assert ask("POST", "", {"Origin": origin}).status == 200


# -- proxies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", FORWARDING)
def test_h5_without_a_key_nothing_that_came_through_a_proxy_changes_state(header: str, duo: Server) -> None:
    body = b'{"split": 10}'
    verbs = ("split", "rollback", "reset", "load", "faults")
    for path in (*(f"/admin/{verb}" for verb in verbs), "/episodes/e/outcome"):
        answer = duo.ask("POST", path, body, {header: "for=10.0.0.7"})
        assert (answer.status, answer.code) == (401, "unauthorized")
        assert "came through a proxy" in answer.json["message"]
    assert duo.ask("POST", "/act", json.dumps({"state": STATE}).encode(), {header: "x"}).status == 200
    assert duo.get("/diagnostics/rollout").json["split"] == 50


def test_h5_with_a_key_neither_names_nor_proxies_matter(pair: Pair) -> None:
    with two(pair, "--api-key", "secret") as server:
        told = {"X-Reflex-Key": "secret", "Host": "robots.example", "Origin": "http://x.example", "Via": "1.1 proxy"}
        assert server.ask("GET", "/diagnostics/rollout", None, told).status == 200
        assert server.ask("POST", "/episodes/e/outcome", b'{"success": true}', told).status in (200, 404)
        answer = server.ask("POST", "/admin/split", b'{"split": 10}', told)
        assert (answer.status, "without --admin-key" in answer.json["message"]) == (401, True)
        assert server.ask("POST", "/admin/split", b'{"split": 10}', {"X-Reflex-Key": "secret"}).status == 200
    with Toy(api_key="secret") as toy:
        assert toy.ask("GET", "/v1/models", None, told).status == 200


# -- what a server is called -------------------------------------------------------------------------------------------


def right(trust: Trust, host: str, origin: str = "") -> bool:
    headers = {b"host": host.encode()} | ({b"origin": origin.encode()} if origin else {})
    try:
        trust.check("POST", headers)
    except Forbidden:
        return False
    return True


def test_h5_the_address_it_is_bound_to_is_a_name_of_it() -> None:
    trust = Trust("robot-7.lab")
    assert right(trust, "robot-7.lab:8000")
    assert right(trust, "Robot-7.lab.")
    assert not right(trust, "robot-8.lab")
    assert right(Trust("10.0.0.5"), "10.0.0.5:80")
    assert not right(Trust("10.0.0.5"), "10.0.0.6:80")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_h5_bound_to_every_address_it_answers_to_every_address_and_to_its_host_name_but_to_no_other(host: str) -> None:
    trust = Trust(host)
    for name in ("10.0.0.5:80", "[fe80::1]:80", "localhost", socket.gethostname()):
        assert right(trust, name)
    for name in ("evil.example", "", "10.0.0.5.evil.example"):
        assert not right(trust, name)
    assert right(trust, "10.0.0.5:80", "http://10.0.0.5:80")  # its own page
    assert right(trust, "10.0.0.5:80", "https://10.0.0.5:80")  # the same with --ssl-certfile
    assert not right(trust, "10.0.0.5:80", "http://10.0.0.66")  # that of another machine


def test_h5_allow_host_names_what_else_it_is_called(tiny: Path) -> None:
    with Server(tiny, "--allow-host", "robots.example", "--allow-host", "svc") as server:
        for host, status in (("robots.example:8000", 200), ("svc", 200), ("other.example", 403)):
            assert server.ask("GET", "/health", None, {"Host": host}).status == status
        page = {"Host": "robots.example", "Origin": "https://robots.example"}
        assert server.act_with(page).status == 200
        assert server.act_with({"Origin": "https://other.example"}).status == 403
    with Toy(allow_host=("*",)) as toy:
        assert toy.ask("GET", "/health", None, {"Host": "anything.example"}).status == 200


def test_h5_allow_host_is_a_name_and_needs_that_there_is_no_key(tiny: Path) -> None:
    assert "--allow-host=http://x: must be a host name" in refusal(tiny, "--allow-host", "http://x")
    assert "--allow-host has no effect with --api-key" in refusal(tiny, "--allow-host", "x", "--api-key", "k")


# -- the key -----------------------------------------------------------------------------------------------------------


def test_h5_the_key_may_stand_in_a_file(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret-ü\n", encoding="utf-8")
    with Server(tiny, "--api-key", f"@{file}") as server:
        assert server.get("/config").status == 401
        answer = server.get("/config", Authorization="Bearer " + "s3cret-ü".encode().decode("latin-1"))
        assert answer.json["server"]["api_key"] == "set"
        assert "s3cret" not in "\n".join(server.log)
    with Toy(api_key=f"@{file}") as toy:
        assert toy.get("/v1/models").status == 401


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "must hold one line of at most 4096 characters"),
        (b" \n", "must hold one line"),
        (b"one\ntwo\n", "must hold one line"),
        (b"x" * 5000, "must hold one line"),
        (b"\xff", "is no UTF-8 text"),
        (None, "cannot be read: No such file"),
    ],
)
@pytest.mark.parametrize("kind", [ServeConfig, LLMServeConfig])
def test_h5_a_file_without_a_key_is_refused(kind: type, text: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ConfigError, match=f"--api-key=@{file}: {says}"):
        load(kind, "serve", None, {}, {"api_key": f"@{file}"})


@pytest.mark.parametrize("kind", [ServeConfig, LLMServeConfig])
def test_h5_an_empty_key_is_no_open_door(kind: type) -> None:
    for empty in ("", " "):
        with pytest.raises(ConfigError, match="--api-key is empty: give a key"):
            load(kind, "serve", None, {}, {"api_key": empty})
        with pytest.raises(ConfigError, match="REFLEX_API_KEY is empty"):
            load(kind, "serve", None, {"REFLEX_API_KEY": empty}, {})


def test_h5_the_command_refuses_an_empty_key(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny), "--api-key", ""]) == 2
    assert capsys.readouterr().err == "reflex serve: --api-key is empty: give a key, or leave it out\n"
