"""deploy/: every expression of the Grafana dashboard and of the alerts, asked of Debian's Prometheus on a real run."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from reflex_runtime.demo import POLICY
from serving.harness import PATIENCE, Server

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="Debian's prometheus is not installed")


def panels() -> Iterator[tuple[str, str]]:
    """Every expression of the dashboard, by its panel; its variables mean all servers and a window of the test."""
    for panel in json.loads((DEPLOY / "grafana" / "reflex.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$instance", ".*").replace("$__rate_interval", "10m")


def alerts() -> Iterator[tuple[str, str]]:
    """Every alert and its expression, over a window of the test."""
    text = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    for name, block in re.findall(r"- alert: (\w+)\n(.*?)(?=\n      - alert|\Z)", text, re.S):
        found = re.search(r"expr: >?\n?(.+?)\n        (?:for|labels):", block, re.S)
        assert found is not None, name
        whole = " ".join(found[1].split())
        yield name, re.sub(r"\[\d+m\]", "[10m]", whole)


def triggers() -> Iterator[str]:
    """What KEDA asks in deploy/k8s, over a window of the test."""
    text = (DEPLOY / "k8s" / "autoscaling.yaml").read_text()
    for expression in re.findall(r"query: (.+)", text):
        yield re.sub(r"\[\d+[ms]\]", "[10m]", expression)


class Prometheus:
    """Debian's, scraping one server twice a second."""

    def __init__(self, server: Server, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        config = config.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}").replace("5s", "500ms")
        shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text(config)
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(PROMETHEUS), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
                 f"--web.listen-address=127.0.0.1:{self.port}"],
                stdout=log, stderr=log,
            )  # fmt: skip

    def wait_scraped(self) -> None:
        """Until it has read the server's metrics once. A machine where it runs but reaches nobody skips the test; what
        it reads and cannot parse is a failure."""
        why = "it answers nobody"
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                (target,) = self.ask("targets")["activeTargets"]
                if target["health"] == "up":
                    return
                why = target["lastError"] or "nothing was scraped yet"
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

    def reached(self, expression: str, answer: bool = True) -> bool:
        """Whether it has an answer within a minute; or none, if `answer` says so: on a busy machine one scrape may
        fail."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                if bool(self.value(expression)) is answer:
                    return True
            except OSError:
                pass  # on a busy machine one question may fail
            self._pause()
        return False


def test_x4_every_expression_has_an_answer_and_no_alert_fires_on_a_server_that_is_well(
    tmp_path: Path,
) -> None:
    picture = io.BytesIO()
    PIL.Image.new("RGB", (96, 96)).save(picture, "PNG")
    body = {"instruction": "open the door", "state": [0.1] * 4, "image": base64.b64encode(picture.getvalue()).decode()}
    with Server(POLICY, "--record", str(tmp_path / "recordings")) as server:
        assert server.post(body | {"episode_id": "e1"}).status == 200
        told = server.ask("POST", "/episodes/e1/outcome", b'{"success": true}', {"Content-Type": "application/json"})
        assert told.status == 200
        prometheus = Prometheus(server, tmp_path)
        try:
            prometheus.wait_scraped()
            assert prometheus.reached("reflex_requests_total")
            for i in range(3):  # a rate needs values that change between two scrapes
                assert server.post(body | {"robot_id": f"arm-{i}"}).status == 200
                assert prometheus.reached(f"sum(reflex_requests_total{{outcome='ok'}}) >= {i + 2}")
            for title, expression in panels():
                assert prometheus.reached(expression), (title, expression)
            for expression in triggers():
                assert prometheus.reached(expression), expression
            rules = prometheus.ask("rules")["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
            assert [rule["name"] for rule in rules] == [name for name, _ in alerts()]
            for name, expression in alerts():
                compared = re.split(r" (?:>|==) (?=[\d.]+(?: \*|$))", expression)
                assert prometheus.reached(compared[0]), (name, compared[0])
                if name != "ReflexMispredicts":  # a handful of batches on a busy machine may be so
                    assert prometheus.reached(expression, answer=False), f"{name} fires"
        finally:
            prometheus.process.terminate()
            prometheus.process.wait(PATIENCE)
