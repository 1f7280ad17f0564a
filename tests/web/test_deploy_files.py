"""deploy/: Kubernetes' own schemas, what the files must agree on with the server, and the container's steps."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from websockets.sync.client import connect

from reflex_runtime.cli import build_parser
from reflex_runtime.observe.metrics import Metrics
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web.connections import HEAD_S
from serving.exports import write_tiny
from serving.harness import PATIENCE, STATE, Server
from serving.place import Place

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
# KEDA's fields of a ScaledObject, from its documentation: its CRD is not part of Kubernetes.
SCALED_OBJECT = {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "advanced", "triggers"}
PROMETHEUS = {"serverAddress", "query", "threshold"}
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


def documents(file: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / file).read_text()))


def kind(file: str, name: str) -> Any:
    return next(document for document in documents(file) if document["kind"] == name)


@pytest.mark.parametrize("file", ["k8s/reflex.yaml", "k8s/gateway.yaml"])
def test_x7_what_kubernetes_is_given_has_its_schema(file: str) -> None:
    for document in documents(file):
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_x7_the_end_of_a_pod_is_longer_than_the_drain_and_its_probes_ask_what_the_server_answers() -> None:
    pod = kind("k8s/reflex.yaml", "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = build_parser(container["args"]).parse_args(container["args"])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + float(args.drain_timeout_s)
    gateway = yaml.safe_load(kind("k8s/gateway.yaml", "ConfigMap")["data"]["envoy.yaml"])["static_resources"]
    (cluster,) = gateway["clusters"]
    (check,) = cluster["health_checks"]
    noticed = int(check["interval"][:-1]) * check["unhealthy_threshold"] + int(cluster["dns_refresh_rate"][:-1])
    assert noticed < pause, "the gateway learns that a pod ends before it drains"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health", "a listening socket is not an answer"
    assert container["readinessProbe"]["httpGet"]["path"] == check["http_health_check"]["path"] == "/health"
    assert container["ports"][0]["containerPort"] == int(args.port)
    manager = gateway["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert (cluster["lb_policy"], cluster["type"]) == ("RING_HASH", "STRICT_DNS")
    assert route["route"]["hash_policy"] == [{"header": {"header_name": "x-reflex-episode"}}]
    assert {"upgrade_type": "websocket"} in manager["upgrade_configs"]
    service = kind("k8s/reflex.yaml", "Service")["spec"]
    assert service["clusterIP"] == "None", "the gateway must see each pod"
    assert service["selector"] == kind("k8s/reflex.yaml", "Deployment")["spec"]["selector"]["matchLabels"]


def test_x7_keda_scales_the_deployment_on_series_that_exist_and_by_the_rule_of_the_package() -> None:
    (scaled,) = documents("k8s/autoscaling.yaml")
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = scaled["spec"]
    assert spec.keys() == SCALED_OBJECT
    assert spec["scaleTargetRef"]["name"] == kind("k8s/reflex.yaml", "Deployment")["metadata"]["name"]
    behaviour = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "reflex"},
        "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "reflex"},
                 "minReplicas": spec["minReplicaCount"], "maxReplicas": spec["maxReplicaCount"],
                 "behavior": behaviour},
    }  # fmt: skip
    kubernetes_validate.validate(autoscaler, "1.37", strict=True)  # what KEDA makes of it
    assert behaviour["scaleDown"]["policies"][0]["value"] == 1
    series = {family.name + ("_total" if family.type == "counter" else "") for family in Metrics().registry.collect()}
    thresholds = {}
    for trigger in spec["triggers"]:
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
        told = trigger["metadata"]
        assert told.keys() == PROMETHEUS
        (name,) = re.findall(r"reflex_\w+", told["query"])
        assert name in series
        thresholds[name] = float(told["threshold"])
    assert thresholds == {"reflex_backlog_seconds": 0.2, "reflex_device_busy_seconds_total": 0.8}


def test_x7_the_configurations_for_ray_name_settings_that_exist_and_agree() -> None:
    plain = documents("ray/serve.yaml")[0]["applications"][0]
    service = documents("ray/rayservice.yaml")[0]["spec"]
    within = yaml.safe_load(service["serveConfigV2"])["applications"][0]
    assert plain == within
    module, name = plain["import_path"].split(":")
    text = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text()
    assert f"def {name}(" in text
    own = set(re.findall(r'"(\w+)"', text[text.index("OWN: Final") :].partition("\n")[0]))
    assert plain["args"].keys() <= ServeConfig.__dataclass_fields__.keys() | own
    cluster = service["rayClusterConfig"]
    for pod in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["template"]["spec"]},
            "1.37", strict=True,
        )  # fmt: skip


# -- nginx -------------------------------------------------------------------------------------------------------------


@contextmanager
def nginx(folder: Path, port: int, *servers: Server) -> Iterator[str]:
    """deploy/nginx/reflex.conf in front of two servers; host and port. Its own files are in the folder."""
    text = (DEPLOY / "nginx" / "reflex.conf").read_text().replace("listen 8000;", f"listen 127.0.0.1:{port};")
    for number, server in enumerate(servers, 1):
        text = text.replace(f"127.0.0.1:800{number} ", f"127.0.0.1:{server.port} ")
    (folder / "reflex.conf").write_text(text)
    own = "".join(f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    within = f"access_log off; {own} include {folder}/reflex.conf;"
    (folder / "nginx.conf").write_text(f"daemon off; pid {folder}/pid; events {{}} http {{ {within} }}")
    command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "error_log stderr;"]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        reachable(port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


def reachable(port: int) -> None:
    """Return when something listens there."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < until


def ask(address: str, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    """The answer on a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"} | named)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.skipif(NGINX is None, reason="Debian's nginx-light is not installed")
def test_x7_behind_nginx_an_episode_stays_on_one_server_and_a_websocket_passes(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "export")
    with Server(export) as one, Server(export) as two, Place() as at, nginx(tmp_path, at.port, one, two) as address:

        def server_of(episode: str) -> str:
            """What answers: each server's own ids begin alike."""
            body = {"instruction": "go", "state": STATE, "episode_id": episode}
            status, answer = ask(address, "/act", json.dumps(body).encode(), x_reflex_episode=episode)
            assert status == 200, answer
            return str(json.loads(answer)["request_id"]).partition("-")[0]

        owners = {f"e{i}": server_of(f"e{i}") for i in range(32)}
        assert len(set(owners.values())) == 2, "both have episodes"
        assert {episode: server_of(episode) for episode in reversed(owners)} == owners
        with connect(f"ws://{address}/", open_timeout=PATIENCE) as robot:
            assert robot.recv(PATIENCE), "openpi's metadata"
        status, answer = ask(address, "/admin/reset", b"{}")
        assert (status, b"proxy" in answer) == (401, True), "without a key nobody changes state through a proxy"
        of_two = str(two.act().json["request_id"]).partition("-")[0]
        two.kill()
        two.wait()
        assert {server_of(episode) for episode in owners} == set(owners.values()) - {of_two}


def test_x7_the_limits_of_nginx_are_those_of_the_server() -> None:
    text, config = (DEPLOY / "nginx" / "reflex.conf").read_text(), ServeConfig()
    told = dict(re.findall(r"^ +(\w+) (\d+)[sm];", text, re.MULTILINE))
    assert int(told["client_max_body_size"]) * 2**20 == config.max_body_bytes
    assert float(told["client_header_timeout"]) == HEAD_S
    assert float(told["client_body_timeout"]) == config.body_timeout_s
    assert int(re.findall(r"keepalive_timeout (\d+)s", text)[0]) < config.idle_timeout_s


# -- containers --------------------------------------------------------------------------------------------------------


def steps() -> list[str]:
    """The instructions of the Containerfile, with continued lines joined."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_x7_the_container_for_ray_has_the_program_with_which_kuberay_probes_it(tmp_path: Path) -> None:
    (tmp_path / "apt-get").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "apt-get").chmod(0o755)
    (step,) = (step.removeprefix("RUN ") for step in steps() if "apt-get" in step)
    step = step.replace("/var/lib/apt/lists/", f"{tmp_path}/lists/")
    for extras, installs in (("ray", True), ("grpc,ray", True), ("", False), ("array", False)):
        path = f"{tmp_path}:/usr/bin:/bin"
        done = subprocess.run(
            ["sh", "-c", step], env={"PATH": path, "EXTRAS": extras}, capture_output=True, text=True, check=True
        )
        assert ("wget" in done.stdout) is installs


@pytest.mark.long  # builds a wheel
def test_x7_the_container_copies_what_is_there_and_builds_a_package_whose_command_runs(tmp_path: Path) -> None:
    """Its COPY and RUN steps by hand: copy the same files, build the package from them alone, run its entry point."""
    tree = tmp_path / "src"
    tree.mkdir()
    ignored = (ROOT / ".containerignore").read_text().split()
    for step in steps():
        words = step.split()
        if words[0] == "COPY" and not words[1].startswith("--"):
            for name in words[1:-1]:
                assert f"!{name.removeprefix('./')}" in ignored, f"{name} does not reach the build"
                copy = partial(shutil.copytree, ignore=shutil.ignore_patterns("__pycache__"))  # others write there
                (copy if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tree / Path(name).name)
    (install,) = (step for step in steps() if step.startswith("RUN") and "pip install" in step)
    expand = ["sh", "-c", f"EXTRAS=; printf %s {install.split()[-1]}"]
    what = subprocess.run(expand, capture_output=True, text=True, check=True).stdout
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-build-isolation",
               "--disable-pip-version-check", "--target", tmp_path / "prefix", what]  # fmt: skip
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    entry = next(step for step in steps() if step.startswith("ENTRYPOINT"))
    assert entry == 'ENTRYPOINT ["reflex"]'
    run = subprocess.run(
        [sys.executable, tmp_path / "prefix" / "bin" / "reflex", "serve", "--help"],
        env={"PYTHONPATH": str(tmp_path / "prefix"), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "--max-batch-cost-ms" in run.stdout


def test_x7_the_container_does_not_run_as_root_and_its_command_and_check_are_whole() -> None:
    found = {step.split()[0]: step for step in steps()}
    assert found["USER"] == "USER 10001"
    arguments = yaml.safe_load(found["CMD"].partition(" ")[2])
    assert build_parser(arguments).parse_args(arguments).host == "0.0.0.0"
    checks = next(step for step in steps() if step.startswith("HEALTHCHECK"))
    program = yaml.safe_load(checks[checks.index("[") :])
    compile(program[2], "HEALTHCHECK", "exec")
    assert "/health" in program[2]
