"""H7: /openapi.json says what is true. Schemathesis reads it and tries both servers, with all of its checks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.robots.app import application
from reflex_runtime.robots.openapi import act_example, document
from reflex_runtime.robots.serving.runtime import PolicyPlan, PolicyRuntime
from reflex_runtime.robots.sources.export_directory import Export
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web.access import NO_KEYS, Keys
from reflex_runtime.web.app import App
from reflex_runtime.web.openapi import PAGES, Operation
from reflex_runtime.web.openapi import described as described_routes
from reflex_runtime.web.request import HttpRequest, Route
from robots.tiny import write_export
from serving.exports import write_tiny
from serving.harness import Server
from serving.openai_toy import Toy
from serving.pair import Pair, two

RUN = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
SEED = "12"


def tried(folder: Path, port: int, examples: int, *options: str) -> None:
    """Every check of schemathesis on every operation: what fits is taken, what does not is refused, every status and
    body is as described, other methods are answered 405, nothing is a 500. With one example, of each operation the
    first that fits; with more, also one for each limit of each field."""
    here = Path(__file__).parent
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": _paths(here)}
    command = ["run", f"http://127.0.0.1:{port}/openapi.json", "--checks", "all", "--seed", SEED, "--no-shrink"]
    phases = "coverage,fuzzing" if examples > 1 else "fuzzing"
    command += ["--max-examples", str(examples), "--phases", phases, "--warnings", "off", *options]
    # Which tensors fit, the model's metadata say; the others answer for as long as they are read.
    command += ["--exclude-path-regex", "/v2/.*/infer|/dashboard/stream|/diagnostics/journal"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *command],
        capture_output=True, text=True, env=environment, check=False, cwd=folder,  # its cache stays there
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def _paths(here: Path) -> str:
    return os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH", ""))))


def described(server: Any) -> Any:
    return json.loads(server.get("/openapi.json").body)


@pytest.mark.parametrize("examples", [1, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.timeout(600)  # minutes on a busy machine
def test_h7_a_policy_server_is_as_it_is_described(tmp_path: Path, examples: int) -> None:
    with Server(write_export(tmp_path / "export")) as server:
        tried(tmp_path, server.port, examples, "--exclude-path", "/admin/faults")  # a drill would be one
        if examples > 1:
            tried(tmp_path, server.port, examples, "--include-path", "/admin/faults", "--mode", "negative")
        assert server.metrics()("reflex_requests_total", outcome="ok") > 0
        assert server.metrics()("reflex_requests_total", outcome="failed") == 0


@pytest.mark.timeout(600)  # minutes on a busy machine
@pytest.mark.parametrize("examples", [0, pytest.param(3, marks=pytest.mark.long)])
def test_h7_so_is_one_with_two_policies_and_a_key(pair: Pair, tmp_path: Path, examples: int) -> None:
    with two(pair, "--api-key", "secret") as server:
        for path, methods in described(server)["paths"].items():
            (method,) = methods.keys() - {"parameters"}
            refused = server.ask(method.upper(), path.replace("{", "").replace("}", "")).status == 401
            assert ("401" in methods[method]["responses"], "security" in methods[method]) == (refused, refused), path
        header = ("-H", "Authorization: Bearer secret")
        if examples:
            tried(tmp_path, server.port, examples, *header, "--exclude-path", "/admin/faults")


@pytest.mark.long
@pytest.mark.timeout(600)  # minutes on a busy machine
def test_h7_a_model_server_is_as_it_is_described(tmp_path: Path) -> None:
    with Toy(max_queue=20) as server:
        same_fields = "/v1/messages/count_tokens"  # as /v1/messages
        # Its document has types; ranges, and which fields go together, the answer 400 names.
        beyond = ("--exclude-checks", "positive_data_acceptance")
        tried(tmp_path, server.port, 5, "--exclude-path", same_fields, *beyond)
        assert set(_references(described(server))) <= {
            f"#/components/schemas/{name}" for name in described(server)["components"]["schemas"]
        }


def test_h7_a_path_that_is_served_cannot_lack_a_description() -> None:
    routes = [Route("/docs", never, open=True), Route("/new", never, "POST"), Route("/dashboard/a.js", never)]
    operation = Operation("new", codes=("404",))
    paths = json.loads(described_routes("R", routes, PAGES | {"/new": operation}, {}, Keys("k")))["paths"]
    assert {path: set(methods) for path, methods in paths.items()} == {"/docs": {"get"}, "/new": {"post"}}
    assert ("401" in paths["/docs"]["get"]["responses"], "security" in paths["/new"]["post"]) == (False, True)
    with pytest.raises(KeyError, match="/new"):
        described_routes("R", routes, PAGES, {}, Keys("k"))


def test_h7_every_route_of_a_policy_server_is_in_its_document(tmp_path: Path) -> None:
    config = ServeConfig(oip_grpc="", gr00t="")
    spec = {"prod": Export.load(write_tiny(tmp_path / "tiny"))}

    async def documents(*names: str) -> tuple[App, dict[str, Any]]:
        app = application(PolicyRuntime(config, [PolicyPlan(name, config, spec) for name in names]))
        (route,) = [route for route in app.routes.values() if route.path == "/openapi.json"]
        answer = await route.run(HttpRequest(app, {"path": "/openapi.json", "headers": []}, never, never))
        assert answer is not None
        return app, json.loads(answer.body)["paths"]

    app, paths = asyncio.run(documents("default"))
    plain = {route.path for route in app.routes.values() if route.socket is None and "." not in route.path[1:]}
    assert plain | {"/openapi.json", "/"} == set(paths)
    assert {"/v2/models/{model}/versions/{version}/infer", "/episodes/{id}/outcome", "/diagnostics/journal"} <= plain
    _, several = asyncio.run(documents("arm", "hand"))
    live = {"/dashboard", "/dashboard/stream", "/diagnostics/journal"}
    for name in ("arm", "hand"):
        assert {f"/policies/{name}{path}" for path in set(paths) - live} <= set(several)


def test_what_a_server_has_is_listed_where_a_browser_begins(tmp_path: Path) -> None:
    with Server(write_tiny(tmp_path / "tiny"), "--api-key", "secret") as server:
        told = server.get("/").json
        assert told["paths"]["POST /act"] == "One observation in, one chunk of actions out"
        assert [server.ask(method, "/").status for method in ("HEAD", "POST")] == [200, 405]
        page = server.ask("GET", "/", headers={"Accept": "text/html,*/*"})
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.body == server.get("/docs").body
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        assert server.ask("GET", "/", headers=upgrade | {"Sec-WebSocket-Key": "A" * 22 + "=="}).status == 401


def test_h7_what_the_policies_need_is_required_and_nothing_else(tmp_path: Path) -> None:
    with Server(write_export(tmp_path / "seeing")) as server:
        document = described(server)
        schema = document["paths"]["/act"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["required"] == ["instruction", "state"]
        assert (schema["properties"]["state"]["minItems"], schema["properties"]["state"]["maxItems"]) == (2, 2)
        (images,) = schema["allOf"]
        assert [way["required"] for way in images["anyOf"]] == [["image"], ["images"]]
        assert "no policy served here has this camera" in schema["properties"]["image_wrist"]["description"]
        assert "security" not in document["paths"]["/act"]["post"]
        assert set(_references(document)) <= {f"#/components/schemas/{n}" for n in document["components"]["schemas"]}
    with Server(write_tiny(tmp_path / "blind")) as server:
        schema = described(server)["paths"]["/act"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["required"] == ["state"]
        assert "allOf" not in schema


@pytest.mark.parametrize("make", [write_export, write_tiny])
def test_h7_the_example_of_the_document_is_answered(make: Callable[[Path], Path], tmp_path: Path) -> None:
    with Server(make(tmp_path / "export")) as server:
        assert example_sent(server, "/act").status == 200


def test_h7_the_document_of_a_model_server_has_its_own_words_for_503() -> None:
    with Toy() as server:
        answers = described(server)["paths"]["/v1/completions"]["post"]["responses"]
    assert answers["503"]["description"].startswith("deadline_unreachable, not_ready, shutting_down,")
    assert answers["429"]["description"].startswith("queue_full, ")


def test_h7_the_names_of_tools_have_a_pattern_that_every_dialect_of_expressions_has() -> None:
    with Toy() as server:
        schemas = described(server)["components"]["schemas"]
    for kind in ("ToolFunction", "FlatTool", "NamedTool"):
        assert schemas[kind]["properties"]["name"]["pattern"] == "^[a-zA-Z0-9_.-]{1,64}$"


def test_h7_the_example_of_a_model_servers_document_is_answered() -> None:
    with Toy() as server:
        assert example_sent(server, "/v1/completions").status == 200


def test_h7_the_example_has_every_camera_under_the_name_it_is_sent(tmp_path: Path) -> None:
    export = Export.load(write_export(tmp_path / "export"))
    for cameras, top, further in (
        (["front"], ["image"], []),
        (["image", "image_wrist"], ["image", "image_wrist"], []),
        (["image", "left", "right"], ["image"], ["left", "right"]),
    ):
        body = act_example([replace(export, images=dict.fromkeys(cameras, (8, 8)))])
        assert [name for name in body if name.startswith("image") and name != "images"] == top
        assert list(body.get("images", {})) == further


def example_sent(server: Any, path: str) -> Any:
    """The answer to the example of a path."""
    content = described(server)["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return server.ask("POST", path, json.dumps(content["example"]).encode(), {"Content-Type": "application/json"})


def act_document(export: Export, keys: Keys) -> bytes:
    return document([Route("/act", never, "POST")], {"default": {"prod": export}}, keys)


async def never(*_: Any) -> Any:
    raise AssertionError


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [found for part in value.values() for found in _references(part)]
    return [found for part in value for found in _references(part)] if isinstance(value, list) else []


def test_whole_numbers_may_come_as_floats(tmp_path: Path) -> None:
    """In JSON 3.0 is an integer."""
    with Server(write_tiny(tmp_path / "tiny")) as server:
        as_int, as_float = server.act(seed=3), server.act(seed=3.0)
        assert as_float.status == 200
        assert as_float.json["actions"] == as_int.json["actions"]
        answer = server.act(seed=3.5)
        assert (answer.status, answer.json["field"]) == (422, "seed")


def test_a_key_in_one_document_is_in_no_other(tmp_path: Path) -> None:
    export = Export.load(write_tiny(tmp_path / "tiny"))
    open_before = json.loads(act_document(export, NO_KEYS))
    assert "security" in json.dumps(json.loads(act_document(export, Keys("key"))))
    assert json.loads(act_document(export, NO_KEYS)) == open_before
