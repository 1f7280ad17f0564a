"""H5, operators: their key alone opens what changes a server and what shows who asked. All servers, every route."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from feeds.fakes import Detector
from feeds.pages import Page
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.pages import FeedPages
from reflex_runtime.feeds.pictures import FeedPictures
from reflex_runtime.feeds.runtime.runtime import Runtime
from reflex_runtime.functions.app import application as application_of_functions
from reflex_runtime.functions.server import FunctionServer
from reflex_runtime.functions.source import read_functions
from reflex_runtime.llm.app import ModelServer
from reflex_runtime.robots.app import application
from reflex_runtime.robots.serving.runtime import PolicyPlan, PolicyRuntime
from reflex_runtime.robots.sources.export_directory import Export
from reflex_runtime.run.coordinator import BatchConfig
from reflex_runtime.settings import FeedsConfig, FunctionsConfig, LLMServeConfig, ServeConfig
from reflex_runtime.settings.read import load
from reflex_runtime.web.access import Keys
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import PLAIN, Unauthorized
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from serving.exports import write_tiny
from serving.harness import Server
from serving.openai_toy import Model, Toy, toy_model
from serving.pair import Pair, two
from web.test_replicas import own_urls

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
COLUMNS = ("policies", "language models", "feeds")
BOTH = Keys("callers", "operators")
NEEDED = {b"": "none", b"callers": "callers", b"operators": "operators"}
OPTIONS = ("--api-key", "callers", "--admin-key", "operators")
Table = dict[str, str]  # the key that each method and path needs

Status = Callable[[str, str, str], int]  # of a method and a path, with a key


# -- the page ----------------------------------------------------------------------------------------------------------


def page_of_feeds() -> FeedPages:
    """The pages of a runtime without feeds."""
    runtime = Runtime()
    coordinator = runtime.coordinator(Detector(), BatchConfig())
    return FeedPages(runtime, coordinator, FeedPictures(lambda: ()), CollectorRegistry(), BOTH)


async def routes_of(tmp_path: Path) -> tuple[Iterable[Route], ...]:
    """Of each server, in the order of the columns."""
    spec = {"prod": Export.load(write_tiny(tmp_path / "tiny"))}
    policies = application(PolicyRuntime(ServeConfig(), [PolicyPlan("default", ServeConfig(), spec)]))
    model, feeds = ModelServer(toy_model(Model())), page_of_feeds()
    return (
        policies.routes.values(),
        [*model.app.routes.values(), model._model_route],
        [*feeds.routes.values(), *feeds._pictures.every],
    )


def table_of(routes: Iterable[Route]) -> Table:
    """As the page has it: the files of the dashboard are one row."""
    named = {route: re.sub(r"^/dashboard/.*[.].*", "/dashboard/*", route.path) for route in routes}
    return {f"{route.method} {path}": NEEDED[BOTH.of(route)] for route, path in named.items()}


def documented() -> dict[str, Table]:
    """What the page says of each server."""
    found = re.findall(r"^\| (`[A-Z]+ /.*?`) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    rows = [(path.strip("`"), *keys) for paths, *keys in found for path in paths.split(", ")]
    return {name: {row[0]: row[1 + i] for row in rows if row[1 + i] != "–"} for i, name in enumerate(COLUMNS)}


def test_h5_the_page_says_which_key_every_route_needs(tmp_path: Path) -> None:
    found = asyncio.run(routes_of(tmp_path))
    assert documented() == dict(zip(COLUMNS, map(table_of, found), strict=True))


def test_h5_functions_have_the_paths_of_policies_and_predict() -> None:
    async def routes() -> Iterable[Route]:
        config = FunctionsConfig()
        functions = read_functions(["python:functions.served:double"], config)
        return application_of_functions(FunctionServer(config, functions, None)).routes.values()

    found, policies = table_of(asyncio.run(routes())), documented()["policies"]
    own = {row: key for row, key in found.items() if row not in policies}
    assert own == {"POST /predict": "callers", "POST /predict/double": "callers"}
    assert {row: policies[row] for row in found.keys() - own} == {row: found[row] for row in found.keys() - own}


def test_h5_below_the_name_of_a_policy_the_same_holds(tmp_path: Path) -> None:
    spec = {"prod": Export.load(write_tiny(tmp_path / "tiny"))}

    async def several() -> App:
        return application(
            PolicyRuntime(ServeConfig(), [PolicyPlan(name, ServeConfig(), spec) for name in ("arm", "leg")])
        )

    app = asyncio.run(several())
    rows = [row.split() for row in documented()["policies"] if "{" not in row and "/dashboard" not in row]
    rows.remove(["GET", "/diagnostics/journal"])  # of the whole server
    for method, path in rows:
        route = app._find(f"/policies/leg{path}")
        assert route is not None
        assert NEEDED[BOTH.of(route)] == documented()["policies"][f"{method} {path}"], path


# -- the servers -------------------------------------------------------------------------------------------------------


def check(table: Table, status: Status) -> None:
    """Nobody, callers and operators are answered as the page says."""
    for row, needed in table.items():
        method, path = row.replace("{", "").replace("}", "").replace("*", "link.js").split(" ")
        method = "HEAD" if method == "GET" else method  # streams do not end
        refused = [key for key in ("", "callers", "operators") if status(method, path, key) == 401]
        assert refused == {"none": [], "callers": [""], "operators": ["", "callers"]}[needed], row


def headers_of(key: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def test_h5_admin_key_guards_operators_paths_of_policies(pair: Pair) -> None:
    with two(pair, *OPTIONS) as server:
        check(documented()["policies"], lambda method, path, key: server.ask(method, path, b"", headers_of(key)).status)
        shown = server.get("/config", **headers_of("callers")).json["server"]
        assert shown["admin_key"] == "set"
        assert not any("operators" in line for line in server.log)
        through = {**headers_of("operators"), "Via": "1.1 proxy", "Host": "robots.example"}
        assert server.ask("POST", "/admin/split", b'{"split": 10}', through).status == 200


def test_h5_admin_key_guards_operators_paths_of_models() -> None:
    with Toy(api_key="callers", admin_key="operators") as toy:
        table = documented()["language models"]
        check(table, lambda method, path, key: toy.ask(method, path, b"", headers_of(key)).status)


def test_h5_the_operators_key_of_a_model_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("operators\n", encoding="utf-8")
    with Toy(admin_key=f"@{tmp_path / 'key'}") as toy:
        assert [toy.get("/status", **headers_of(key)).status for key in ("", "operators")] == [401, 200]


def test_h5_admin_key_guards_operators_paths_of_feeds() -> None:
    page = Page(page_of_feeds, api_key="callers", admin_key="operators")
    with page.server:
        check(documented()["feeds"], lambda method, path, key: page.ask(path, method, b"", **headers_of(key))[0])


def test_h5_admin_key_guards_the_own_port_of_each_worker(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("operators\n", encoding="utf-8")
    with Server(
        tiny, "--replicas", "2", "--api-key", "callers", "--admin-key", f"@{tmp_path / 'key'}", supervised=True
    ) as server:
        for url in own_urls(server):
            requests = {
                key: urllib.request.Request(f"{url}/diagnostics/cost-model", headers=headers_of(key))
                for key in ("", "callers", "operators")
            }
            server.wait_until(lambda request=requests["operators"]: status_of(request) == 200)  # it is loaded
            assert [status_of(requests[key]) for key in ("", "callers")] == [401, 401]


def status_of(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_h5_admin_key_alone_leaves_callers_without_a_key(tiny: Path) -> None:
    with Server(tiny, "--admin-key", "operators") as server:
        assert server.act().status == 200
        assert server.get("/health", Host="evil.example").status == 403
        assert server.get("/diagnostics/rollout").status == 401
        assert server.get("/diagnostics/rollout", **headers_of("operators"), Host="robots.example").status == 200


# -- without the operators' key ----------------------------------------------------------------------------------------


async def done(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200)


@pytest.mark.parametrize("operators", [True, False])
@pytest.mark.parametrize("key", ["", "callers"])
@pytest.mark.parametrize("client", [("127.0.0.1", 5), ("unix", 1), ("10.0.0.9", 5), None])
def test_h5_without_admin_key_only_this_machine_changes_anything(
    client: tuple[str, int] | None, key: str, operators: bool
) -> None:
    """The key of callers opens what is theirs from everywhere: the outcome of an episode."""
    route = Route("/change", done, "POST", operators=operators, changes=True)
    app = App(ServeConfig(api_key=key), {"/change": route}, PLAIN)
    headers = [(name.lower().encode(), value.encode()) for name, value in headers_of(key).items()]
    request = HttpRequest(
        app, {"method": "POST", "path": "/change", "headers": headers, "client": client}, never, never
    )
    here = client is not None and client[0] != "10.0.0.9"
    if here or (key and not operators):
        assert app._route(request) is route
        return
    with pytest.raises(Unauthorized, match=f"without --{'admin' if operators else 'api'}-key this path answers on"):
        app._route(request)


@pytest.mark.parametrize("key", ["", "operators"])
def test_h5_the_operators_key_opens_what_is_the_callers_where_they_have_none(key: str) -> None:
    route = Route("/change", done, "POST", changes=True)
    app = App(ServeConfig(admin_key="operators"), {"/change": route}, PLAIN)
    headers = [(name.lower().encode(), value.encode()) for name, value in headers_of(key).items()]
    headers.append((b"host", b"localhost"))
    scope = {"method": "POST", "path": "/change", "headers": headers, "client": ("10.0.0.9", 5)}
    request = HttpRequest(app, scope, never, never)
    assert app.may_change(request) is bool(key)
    if key:
        assert app._route(request) is route
        return
    with pytest.raises(Unauthorized):
        app._route(request)


async def never(*_: Any) -> Any:
    raise AssertionError


# -- the setting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ServeConfig, LLMServeConfig, FeedsConfig])
def test_h5_the_operators_key_is_read_as_that_of_callers(kind: type, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("operators\n", encoding="utf-8")
    port = {"port": "0"}
    config = load(kind, "serve", None, {}, {"admin_key": f"@{file}", **port})
    assert (config.admin_key, config.api_key) == ("operators", "")
    wrong = {
        "--admin-key is empty: give a key": {"admin_key": " "},
        "--admin-key and --api-key: must differ": {"admin_key": "k", "api_key": "k"},
        f"--admin-key=@{tmp_path}: cannot be read": {"admin_key": f"@{tmp_path}"},
    }
    for says, flags in wrong.items():
        with pytest.raises(ConfigError, match=re.escape(says)):
            load(kind, "serve", None, {}, {**flags, **port})
