"""deploy/: boards and alerts name series that exist, all of them are on a board, and every expression is asked of
Debian's Prometheus on real runs."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import count
from math import isnan
from pathlib import Path
from typing import Any, Self

import PIL.Image
import pytest
import yaml
from tools import boards

from feeds.broker import Receiver
from feeds.commands import Feeds
from reflex_runtime.demo import POLICY
from serving.collector import Collector
from serving.harness import PATIENCE, Server
from serving.place import Place
from web.alert_cases import CASES

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="Debian's prometheus is not installed")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool, of Debian's prometheus, is not installed")
SELDOM = (
    "reflex_shadow_delay_seconds"  # a step of the shadow runs when a request comes: it exists, mostly without values
)


def panels(board: str) -> Iterator[tuple[str, str]]:
    """Every expression of a board, by its panel; its variables mean all servers and a window of the test."""
    for panel in json.loads((boards.FOLDER / f"{board}.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$instance", ".*").replace("$__rate_interval", "10m")


def groups() -> dict[str, dict[str, str]]:
    """The expression of every alert, by its group and name."""
    found = yaml.safe_load(ALERTS.read_text())["groups"]
    return {
        group["name"]: {rule["alert"]: " ".join(rule["expr"].split()) for rule in group["rules"]} for group in found
    }


def triggers() -> Iterator[str]:
    """What KEDA asks in deploy/k8s."""
    return iter(re.findall(r"query: (.+)", (DEPLOY / "k8s" / "autoscaling.yaml").read_text()))


def table_name(name: str) -> str:
    """The series of the table that a name of a scrape belongs to."""
    return name if name in boards.ROWS else re.sub(r"_(bucket|sum|count)$", "", name)


def widened(expression: str) -> str:
    """Over a window of the test."""
    return re.sub(r"\[\d+[smhd]\]", "[10m]", expression)


# -- as they are written -----------------------------------------------------------------------------------------------


def test_x4_the_boards_are_those_that_the_script_makes() -> None:
    made = {f"{name}.json": boards.board(name) for name in boards.BOARDS}
    assert {file.name: file.read_text() for file in boards.FOLDER.iterdir()} == made, "run: python tools/boards.py"


def test_x4_every_series_is_on_a_board_or_named_as_left_out() -> None:
    """What a server can export is in the table, as the tests below see in real scrapes."""
    on = {name for _, _, sections in boards.BOARDS.values() for drawn in sections.values() for panel in drawn
          for name in boards.names(panel)}  # fmt: skip
    assert on & set(boards.LEFT_OUT) == set()
    assert on | set(boards.LEFT_OUT) == set(boards.ROWS)


def test_x4_every_series_of_boards_alerts_and_triggers_exists_and_has_the_labels() -> None:
    asked = [expression for board in boards.BOARDS for _, expression in panels(board)] + [*triggers()]
    asked += [expression for rules in groups().values() for expression in rules.values()]
    for expression in asked:
        for name, selected in re.findall(r"(reflex_\w+)(?:{([^}]*)})?", expression):
            row, labels = boards.ROWS[table_name(name)]
            assert name == row.name or row.kind == "histogram", expression
            assert set(re.findall(r"(\w+)(?==)", selected)) <= {"instance", "job", *labels}, expression


@needs_promtool
def test_x4_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    assert list(CASES) == [name for rules in groups().values() for name in rules]
    of = {side: {name: case[i] for name, case in CASES.items()} for i, side in enumerate(("loud", "quiet"))}
    series = [
        {"series": one.replace('"a"', f'"{side}-{name}"', 1), "values": values}
        for side, cases in of.items()
        for name, case in cases.items()
        for one, values in case.items()
    ]
    expected = {
        "expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})',
        "eval_time": "40m",
        "exp_samples": [{"labels": f'{{alertname="{name}", instance="loud-{name}"}}', "value": 1} for name in CASES],
    }
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [expected]}]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    for words in (["check", "rules", str(ALERTS)], ["test", "rules", str(file)]):
        done = subprocess.run([str(PROMTOOL), *words], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# -- a real Prometheus -------------------------------------------------------------------------------------------------


class Prometheus:
    """Debian's, scraping servers twice a second. Use it in a with statement."""

    def __init__(self, ports: Iterable[int], folder: Path) -> None:
        self._place = Place()
        self.port = self._place.port
        config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        servers = '", "'.join(f"127.0.0.1:{port}" for port in ports)
        config = config.replace("127.0.0.1:8000", servers).replace("5s", "500ms")
        shutil.copy(ALERTS, folder)
        (folder / "prometheus.yml").write_text(config)
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(PROMETHEUS), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
                 f"--web.listen-address=127.0.0.1:{self.port}"],
                stdout=log, stderr=log,
            )  # fmt: skip

    def __enter__(self) -> Self:
        try:
            self._wait_scraped()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        self._place.close()

    def _wait_scraped(self) -> None:
        """Until it has read every server's metrics once. A machine where it runs but reaches nobody skips the test;
        what it reads and cannot parse is a failure."""
        why = "it answers nobody"
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                targets = self.ask("targets")["activeTargets"]
                if targets and all(target["health"] == "up" for target in targets):
                    return
                why = next(
                    (target["lastError"] for target in targets if target["lastError"]), "nothing was scraped yet"
                )
            except (OSError, ValueError) as error:  # it starts
                why = repr(error)
            self._pause()
        log = self._log.read_text(errors="replace")[-2000:]
        if re.search(r"deadline exceeded|connect|proxy|answers nobody|Error\(|nothing was scraped", why):
            pytest.skip(f"prometheus cannot reach a server on this machine: {why}\n{log}")
        pytest.fail(f"prometheus cannot read /metrics: {why}\n{log}")

    def _pause(self) -> None:
        """Between two questions; shorter where it ends."""
        try:
            self.process.wait(0.05)
        except subprocess.TimeoutExpired:
            return
        raise AssertionError(f"prometheus ended: {self._log.read_text(errors='replace')[-2000:]}")

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]

    def value(self, expression: str) -> list[float]:
        """What the expression is now, a number for each series."""
        values = [float(found["value"][1]) for found in self.ask("query", query=expression)["result"]]
        return [value for value in values if not isnan(value)]

    def reached(self, expression: str, answer: bool = True, meanwhile: Callable[[], Any] = int) -> bool:
        """Whether it has an answer within a minute; or none, if `answer` says so: on a busy machine one scrape may
        fail."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                if bool(self.value(expression)) is answer:
                    return True
            except OSError:
                pass  # on a busy machine one question may fail
            meanwhile()
            self._pause()
        return False

    def check(self, board: str, rules: Iterable[str], meanwhile: Callable[[], Any]) -> None:
        """Every panel has an answer while the servers are busy with `meanwhile`, no alert of these groups fires, and
        what was scraped is in the table of series."""
        for title, expression in panels(board):
            if SELDOM in expression:
                expression = f"{SELDOM}_bucket"
            assert self.reached(expression, meanwhile=meanwhile), (title, expression)
        for name, expression in ((name, widened(of)) for group in rules for name, of in groups()[group].items()):
            first = re.split(r" (?:>=|>|==) (?=[\d.]+(?: \*|$| and))| and ", expression)[0]
            first = re.sub("{.*?}", "", first)  # a server that is well has no answers with 500
            assert self.reached(first, meanwhile=meanwhile), (name, first)
            if name != "ReflexMispredicts":  # a handful of batches on a busy machine may be so
                assert self.reached(expression, answer=False, meanwhile=meanwhile), f"{name} fires"
        scraped = {name for name in self.ask("label/__name__/values") if name.startswith("reflex_")}
        assert {table_name(name) for name in scraped} <= set(boards.ROWS)
        assert {rule["health"] for group in self.ask("rules")["groups"] for rule in group["rules"]} <= {"ok", "unknown"}


@pytest.mark.long  # Prometheus itself looks at every board and alert
@needs_prometheus
def test_x4_every_expression_has_an_answer_and_no_alert_fires_on_a_policy_that_is_well(tmp_path: Path) -> None:
    picture = io.BytesIO()
    PIL.Image.new("RGB", (96, 96)).save(picture, "PNG")
    body = {"instruction": "open the door", "state": [0.1] * 4, "image": base64.b64encode(picture.getvalue()).decode()}
    episodes = count()
    with ExitStack() as running:
        collector = running.enter_context(Collector())
        options = ("--record", str(tmp_path / "recordings"), "--otel", collector.url, "--shadow-policy", str(POLICY))
        server = running.enter_context(Server(POLICY, *options))

        def ask() -> None:
            """A rate needs values that change between two scrapes."""
            episode = f"e{next(episodes)}"
            assert server.post(body | {"episode_id": episode}).status == 200
            said = {"Content-Type": "application/json"}
            assert server.ask("POST", f"/episodes/{episode}/outcome", b'{"success": true}', said).status == 200

        ask()
        prometheus = running.enter_context(Prometheus([server.port], tmp_path))
        prometheus.check("policies", ("servers", "policies"), ask)
        for expression in triggers():
            assert prometheus.reached(widened(expression)), expression


@needs_prometheus
@pytest.mark.long  # three servers
def test_x4_the_same_of_a_language_model_with_workers_and_of_feeds(tmp_path: Path) -> None:
    with ExitStack() as running:
        collector, receiver = running.enter_context(Collector()), Receiver()
        llm = running.enter_context(Server("scribe", "--workers", "1", "--otel", collector.url))
        behind = ("--track", "--zone", "z=0,0,300,0,300,200", "--line", "l=160,0,160,240", "--webhook", receiver.url)
        feeds = running.enter_context(
            Feeds("a=shapes:seconds=600", "b=shapes:seed=2,seconds=600", "--onnx", "shapes", *behind, "--port", "0",
                  "--otel", collector.url, cwd=tmp_path)
        )  # fmt: skip

        def ask() -> None:
            body = json.dumps({"model": "scribe", "prompt": "Once", "max_tokens": 8}).encode()
            assert llm.ask("POST", "/v1/completions", body, {"Content-Type": "application/json"}).status == 200

        (tmp_path / "own.py").write_text("def same(items: list[int]) -> list[int]: return list(items)\n")
        before = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
        own = running.enter_context(Server("python:own:same", "--otel", collector.url, before=before))

        def predict() -> None:
            assert own.ask("POST", "/predict", b"1", {"Content-Type": "application/json"}).status == 200

        ask()
        predict()
        prometheus = running.enter_context(Prometheus([llm.port, feeds.port, own.port], tmp_path))
        prometheus.check("functions", (), predict)
        prometheus.check("tokens", ("language models", "workers"), ask)
        prometheus.check("feeds", ("feeds",), ask)
