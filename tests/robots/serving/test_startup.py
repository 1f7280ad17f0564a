"""What happens before the first request: settings, ranges, refusals, warnings, the table."""

from __future__ import annotations

import re
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from forked import reflex
from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.versions.ramp import Objective
from reflex_runtime.settings import ServeConfig
from reflex_runtime.settings.declare import flag
from serving.exports import write_tiny
from serving.harness import STATE, Server, refusal
from serving.requests import busy

RANGED = [f for f in fields(ServeConfig) if f.metadata["low"] is not None]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line a start that must fail prints, in this process; nothing of it gets as far as a port."""
    try:
        status = main(["serve", "--no-supervise", *arguments])
    except SystemExit as exit:
        status = int(exit.code or 0)
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err.strip()


@pytest.mark.parametrize("field", RANGED, ids=lambda f: f.name)
def test_b2_a_value_out_of_range_names_flag_value_and_range(
    field: Any, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low, high = field.metadata["low"], field.metadata["high"]
    for value in (low - 1, high + 1):
        line = said(capsys, str(tiny), f"{flag(field.name)}={value}")
        assert f"{flag(field.name)}={value:.10g}: must be in [{low:g}, {high:.10g}]" in line
    line = said(capsys, str(tiny), flag(field.name), "much")
    assert f"{flag(field.name)}=much: must be a" in line


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_batch_cost_ms", 10, 10_000),
        ("batch_timeout_ms", 0, 1000),
        ("max_queue", 1, 100_000),
        ("drain_timeout_s", 0, 600),
    ],
)
def test_b2_the_documented_ranges(name: str, low: float, high: float) -> None:
    for value in (low, high):
        ServeConfig(**{name: value})
    found = next(f for f in RANGED if f.name == name)
    assert (found.metadata["low"], found.metadata["high"]) == (low, high)


def test_b2_the_process_exits_with_status_2_and_one_line(tiny: Path) -> None:
    assert refusal(tiny, "--max-batch-cost-ms", "9.5") == (
        "reflex serve: --max-batch-cost-ms=9.5: must be in [10, 10000] ms"
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--cost-model", "mean"], "--cost-model=mean: must be one of affine, median"),
        (["--slo-mode", "shout"], "--slo-mode=shout: must be one of log_only, 503"),
        (["--on-bad-action", "zero"], "--on-bad-action=zero: must be one of error, hold"),
        (["--slo", "150ms"], "--slo=150ms: must be pNN=MSms"),
        (["--slo", "p99=\n5"], "--slo='p99=\\n5': must be"),
        (["--inject-fault", "prod:crash:1"], "KIND"),
        (["--inject-fault", "a:raise:1"], "--inject-fault=a:raise:1: slot a is not served"),
        (["--max-batch-cost-ms", "nan"], "--max-batch-cost-ms=nan: must be a number"),
        (["--max-batch-cost-ms", "inf"], "--max-batch-cost-ms=inf: must be in [10, 10000] ms"),
        (["--max-queue", "1.5"], "--max-queue=1.5: must be a whole number"),
        (["--max-queue"], "--max-queue: expected one argument"),
        (["--no-such-option"], "--no-such-option"),
        (["--config", "/nowhere/at/all.toml"], "--config=/nowhere/at/all.toml: No such file"),
        (["--trace", "/nowhere/at/all.jsonl"], "--trace=/nowhere/at/all.jsonl: cannot be written"),
        (["--host", "no.such.host.invalid"], "--host=no.such.host.invalid --port=8000: cannot be bound"),
    ],
    ids=lambda p: "-".join(p).replace("\n", "")[:40] if isinstance(p, list) else "",
)
def test_b2_any_wrong_option_is_one_line(
    arguments: list[str], part: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in said(capsys, str(tiny), *arguments)


def test_a_missing_export_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = said(capsys, str(tmp_path / "nowhere"))
    assert "nowhere: not found, expected an export directory" in nowhere
    assert "hub" not in nowhere
    hub = said(capsys, "Qwen/Qwen3-0.6B")
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in hub
    assert "reflex serve ./Qwen3-0.6B" in hub


def test_a_missing_provider_is_refused_before_the_port_opens(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a port that could not be opened: it was not tried
        line = said(capsys, str(tiny), "--provider", "NoSuchProvider", "--port", str(taken.getsockname()[1]))
    assert "--provider=NoSuchProvider: " in line
    assert "CPUExecutionProvider" in line  # what there is


def test_b24_graphs_cannot_be_captured_on_the_cpu(tiny: Path) -> None:
    line = refusal(tiny, "--cuda-graphs", "1,2,4")
    assert line.startswith("reflex serve: --cuda-graphs=1,2,4: CPUExecutionProvider has no graphs to capture")


def test_h11_a_port_in_use_is_one_line(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--host=127.0.0.1 --port={port}: cannot be bound: Address already in use" in refusal(
            tiny, "--port", str(port)
        )


def test_h11_the_defaults_are_loopback_and_8000() -> None:
    assert (ServeConfig().host, ServeConfig().port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(("key", "warned"), [([], True), (["--api-key", "k"], False)])
def test_h11_binding_elsewhere_without_a_key_warns(tiny: Path, key: list[str], warned: bool) -> None:
    with Server(tiny, "--host", "0.0.0.0", *key) as server:
        assert any("--host=0.0.0.0 is reachable from outside" in line for line in server.log) is warned


def test_b12_max_batch_is_ignored_and_warns_once(tiny: Path) -> None:
    with Server(tiny, "--max-batch", "8", held=True) as server, busy(server):
        lines = [line for line in server.log if "--max-batch=8" in line]
        assert len(lines) == 1
        assert "WARNING" in lines[0]
        assert "--max-batch-cost-ms 400" in lines[0]  # N x 50
        assert {answer.json["batch"]["size"] for answer in server.behind([{"state": STATE}] * 16)} == {16}  # ignored


def test_b12_a_max_batch_of_one_says_nothing(tiny: Path) -> None:
    with Server(tiny, "--max-batch", "1") as server:
        assert not any("ignored" in line for line in server.log)


def test_b1_the_defaults_need_no_flag(tiny: Path) -> None:
    with Server(tiny) as server:
        found = server.get("/config").json["server"]
        shown = "\n".join(server.log)
    assert (found["max_batch_cost_ms"], found["batch_timeout_ms"], found["max_queue"]) == (None, None, 1000)
    # H10: the table at start-up has every setting that is not a default
    given = {"--port", "--supervise"}
    assert {flag(field.name) for field in fields(ServeConfig) if f" {flag(field.name)} " in shown} == given
    assert f" {len(fields(ServeConfig)) - len(given)} settings have their defaults" in shown
    assert not any("WARNING" in line for line in server.log)


def test_h10_file_then_environment_then_flags(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "reflex.toml"
    file.write_text('[serve]\nmax-queue = 11\nrobot_id = "from the file"\nbatch-timeout-ms = 1\napi-key = "secret-1"\n')
    env = {"REFLEX_MAX_QUEUE": "22", "REFLEX_BATCH_TIMEOUT_MS": "2", "REFLEX_LATEST_ONLY": "yes"}
    with Server(tiny, "--config", str(file), "--batch-timeout-ms", "3", env=env) as server:
        found = server.get("/config", Authorization="Bearer secret-1").json["server"]
        log = "\n".join(server.log)
    assert (found["robot_id"], found["max_queue"], found["batch_timeout_ms"]) == ("from the file", 22, 3.0)
    assert found["latest_only"] is True
    assert found["api_key"] == "set"
    assert "secret-1" not in log


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[serve]\nmax-que = 5\n", "max-que: no such setting"),
        ("[serve]\nmax-queue = true\n", "max-queue=True: must be a whole number"),
        ("[serve]\nmax-queue = [1]\n", "must be a whole number"),
        ("[serve]\nrobot-id = [1]\n", "must be text"),
        ("[serve]\nmax-queue = 0\n", "--max-queue=0: must be in [1, 100000]"),
        ("serve = 5\n", "[serve] must be a table"),
        ("[serve\n", "not TOML"),
    ],
)
def test_h10_a_wrong_file_names_the_key(
    text: str, part: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reflex.toml"
    file.write_text(text)
    assert part in said(capsys, str(tiny), "--config", str(file))


def test_h10_a_wrong_environment_names_the_variable(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFLEX_MAX_QUEUE", "many")
    assert "REFLEX_MAX_QUEUE=many: must be a whole number" in said(capsys, str(tiny))


def test_h9_an_objective_is_a_percentile_and_a_limit() -> None:
    assert Objective.parse("p99=150ms") == Objective(99.0, 0.150)
    assert Objective.parse("p99.9=2s") == Objective(99.9, 2.0)
    for wrong in ("p0=5ms", "p100=5ms", "p99=0ms", "p99=5", "99=5ms", ""):
        with pytest.raises(ConfigError, match="must be pNN=MSms"):
            Objective.parse(wrong)


def test_a_graph_that_does_not_fit_its_export_leaves_with_2_and_one_line(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "broken", inputs={"state": "no_such_input", "noise": "x"})
    done = reflex("serve", export, "--port", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if "no_such_input" in line and "model.onnx" in line]


TYPO = """
import numpy as np
from reflex_runtime.robots import PolicySpec, WholeModel

class Mine(WholeModel):
    def chunk(self, rows, noise):
        return np.zeroes((len(rows), 4, 2))

def make(device):
    return Mine(PolicySpec(model_id="m", staged=False, chunk_size=4, action_dim=2, takes_state=True, state_dim=2))
"""


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ("np.zeroes((len(rows), 4, 2))", r"python:mine:make: it does not answer: AttributeError.*\(mine.py, line 7\)"),
        ("np.zeros((len(rows), 3, 2))", r"python:mine:make: the model answered float32\[1, 3, 2\], not \[1, 4, 2\] .*"),
        ("np.full((len(rows), 4, 2), np.nan)", "python:mine:make: NaN or infinity in all its answers to noise"),
    ],
)
def test_a_mistake_in_a_models_own_code_leaves_with_2_and_one_line_with_its_place(
    tmp_path: Path, made: str, line: str
) -> None:
    (tmp_path / "mine.py").write_text(TYPO.replace("np.zeroes((len(rows), 4, 2))", made))
    done = reflex("serve", "python:mine:make", "--port", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (found,) = [text for text in done.stderr.splitlines() if "not serving on" in text]
    assert re.search(f"warmup_failed: {line}", found)


def test_a_graph_with_a_mistake_leaves_with_2_and_one_line_that_names_its_export(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "broken")
    model = onnx.load(str(export / "model.onnx"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 9]), "ninth"))
    model.graph.node.insert(0, helper.make_node("Gather", ["pose", "ninth"], ["picked"], axis=1))
    model.graph.node[1].input[0] = "picked"
    onnx.save(model, str(export / "model.onnx"))
    done = reflex("serve", export, "--port", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"warmup_failed: {export}: it does not answer: InvalidArgument: " in done.stderr


def test_a_model_that_fails_at_warm_up_is_told_on_health_and_leaves_with_1(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "broken", fails=True)
    with Server(export, until="not serving on") as server:
        health = server.get("/health")
        assert health.status == 503
        assert health.json["state"] == "warmup_failed"
        assert health.json["error"].startswith(f"ProcessorError: {export}: it does not answer: Fail: ")
        assert "seven" in health.json["error"]
        assert health.json["model_loaded"] is False
        refused = server.act()
        assert (refused.status, refused.code, refused.json["state"]) == (503, "not_ready", "warmup_failed")
        assert server.get("/diagnostics/cost-model").code == "not_ready"
        assert server.get("/config").json["policy"] is None
        assert server.get("/metrics").status == 200
        assert server.stop() == 1
