"""Several models in runtime processes: each process has all of them, on one device."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llm.workers.test_workers import PATIENCE, Fleet, at_once
from reflex_runtime.cli import main
from reflex_runtime.cli.worker_settings import trace_of
from reflex_runtime.config import LLMServeConfig
from reflex_runtime.ipc.generate_config import GenerateBatcherConfig
from reflex_runtime.llm.serving.model_host import ModelPlan
from reflex_runtime.telemetry.journal_reader import read_journal
from serving.harness import Server


def own(config: LLMServeConfig, number: int, restarts: int) -> dict[str, Any]:
    return {"max_num_seqs": config.max_num_seqs}


class TwoInProcesses(Fleet):
    """`small` says c's and is also called `tiny`, `large` says b's; each in every process."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **{"options": own} | config)

    def plans(self) -> list[ModelPlan]:
        return [
            ModelPlan("small", replace(self.config, max_num_seqs=1), Path("c"), aliases=("tiny",), adapters=("poet",)),
            ModelPlan("large", replace(self.config, max_queue=3), Path("b"), weight=3.0),
        ]

    def says(self, model: str) -> Any:
        return self.complete(model=model, max_tokens=3).json["choices"][0]["text"]


@pytest.fixture(scope="module")
def two() -> Iterator[TwoInProcesses]:
    with TwoInProcesses(2) as made:
        yield made


def test_l9_each_name_is_answered_by_its_model_in_every_process(two: TwoInProcesses) -> None:
    names = ["small", "tiny", "large", "small:poet"] * 4
    before = [line["client"]["sent"].get("batch_generate", 0) for line in two.status_page()["lines"]]
    said = at_once([lambda name=name: two.says(name) for name in names])  # type: ignore[misc]
    assert said == ["ccc", "ccc", "bbb", "aaa"] * 4
    lines = two.status_page()["lines"]
    assert all(line["client"]["sent"]["batch_generate"] > sent for line, sent in zip(lines, before, strict=True))
    chat = two.chat("hi", model="large", max_tokens=2).json
    assert chat["choices"][0]["message"]["content"] == "bb"
    cards = two.get("/v1/models").json["data"]
    assert [card["id"] for card in cards] == ["small", "tiny", "small:poet", "tiny:poet", "large"]
    assert two.post("/tokenize", {"model": "large", "prompt": "hi"}).json["count"] == 2


def test_g9_an_unknown_model_is_refused_by_name(two: TwoInProcesses) -> None:
    answer = two.complete(model="other")
    assert answer.status == 404
    assert two.error(answer)["message"].startswith("the model 'other' does not exist; 'small',")


def test_l9_each_model_has_its_own_limits_and_settings_in_the_processes(two: TwoInProcesses) -> None:
    assert two.complete("hi", model="small", n=4, max_tokens=1).status == 200
    answer = two.complete("hi", model="large", n=4, max_tokens=1)
    assert two.error(answer)["message"] == "n: asks for 4 choices of all prompts, at most 3 may wait (--max-queue)"
    assert two.workers is not None
    asked = [two.workers.lines[1]._asked(plan, 0) for plan in two.plans()]
    assert [(one.model_id, one.weight, one.options["max_num_seqs"]) for one in asked] == [
        ("small", 1.0, 1), ("large", 3.0, two.config.max_num_seqs)
    ]  # fmt: skip
    lanes = two.workers.lines[1].lanes
    assert {name: lane.batcher.config.max_pending for name, lane in lanes.items()} == {"small": 1000, "large": 3}


def test_l9_models_of_a_process_share_one_device_by_weight(tmp_path: Path) -> None:
    def traced(_: LLMServeConfig, number: int, restarts: int) -> dict[str, Any]:
        return {"trace": trace_of(str(tmp_path / "steps.jsonl"), number, restarts)}

    with TwoInProcesses(options=traced) as two:
        at_once([lambda name=name: two.says(name) for name in ("small", "large")])  # type: ignore[misc]
    journal = read_journal(tmp_path / "steps.worker-0.jsonl")
    assert {name: group.weight for name, group in journal.groups.items()} == {"small": 1.0, "large": 3.0}
    assert {batch.group for batch in journal.batches} == {"small", "large"}


def test_g6_requests_of_one_model_do_not_take_the_places_of_another() -> None:
    with TwoInProcesses(step_ms=1, batcher=GenerateBatcherConfig(stream_limit=1)) as two:
        with two.open("runs", model="small", max_tokens=8000, stream=True) as runs:
            runs.read_until(b"data: ")
            with two.open("waits", model="small", stream=True):
                two.reach(lambda health: health["waiting"] == 1)
                assert two.says("large") == "bbb"
                told = two.health()
                assert {name: (m["running"], m["waiting"]) for name, m in told["models"].items()} == {
                    "small": (1, 1), "large": (0, 0)
                }  # fmt: skip
                assert (told["model"], told["running"], told["waiting"]) == ("small, large", 1, 1)


def test_g14_a_process_that_was_started_again_has_every_model() -> None:
    with TwoInProcesses() as two:
        two.kill()
        two.reach(lambda health: health["status"] == "ok" and health["workers"][0]["restarts"])
        assert [two.says(name) for name in ("small", "large")] == ["ccc", "bbb"]


def test_g9_a_long_prompt_is_tokenised_by_the_models_own_tokenizer() -> None:
    with TwoInProcesses(max_body_bytes=1 << 20) as two:
        assert two.workers is not None
        for name in ("small", "large"):
            assert two.error(two.complete("x" * 30_000, model=name))["code"] == "context_length_exceeded"
        assert two.on_loop(two.workers._tokenizing.client.stats)["sent"]["tokenize"] == 2


def test_g13_status_metrics_and_the_page_show_each_model(
    two: TwoInProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [two.says(name) for name in ("small", "large")] == ["ccc", "bbb"]
    told = two.status_page()
    for name in ("small", "large"):
        model = told["models"][name]
        assert (model["max_model_len"], model["runner"]) == (8192, "toy")
        assert 0.0 <= model["kv_cache_usage"] <= 1.0
    assert {lane["model_id"] for line in told["lines"] for lane in line["generate"]["partitions"]} == {"small", "large"}
    assert [line["streams"]["limit"] for line in told["lines"]] == [128, 128]  # 64 of each model
    families = {f.name: f for f in text_string_to_metric_families(two.get("/metrics").body.decode())}
    steps = {(s.labels["worker"], s.labels["model"]) for s in families["reflex_generation_tokens"].samples}
    assert steps == {(worker, model) for worker in ("worker-0", "worker-1") for model in ("small", "large")}
    assert main(["status", f"http://127.0.0.1:{two.port}"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^model +running +waiting +cache held +context +runner", shown, re.MULTILINE)
    assert re.search(r"^large +0 +0 +\d+% +8,192 +toy", shown, re.MULTILINE)
    with urllib.request.urlopen(f"http://127.0.0.1:{two.port}/dashboard/stream", timeout=PATIENCE) as lines:
        for line in lines:
            page = json.loads(line)
            if {group["name"] for group in page["groups"] if group["tokens"]} == {"small", "large"}:
                break
            at_once([lambda name=name: two.says(name) for name in ("small", "large")])  # type: ignore[misc]
    assert {"small", "large", "worker-0", "worker-1"} == set(page["server"]["queues"])


def test_g14_the_command_with_two_models_in_a_process() -> None:
    """`reflex serve one=scribe two=scribe --workers 1`, as a user would."""
    pytest.importorskip("openvino")
    words = ["one=scribe", "two=scribe", "--alias", "uno=one", "--workers", "1"]
    with Server(*words, "--kv-cache-gb", "0.1", "--threads", "1") as server:
        head = {"Content-Type": "application/json"}
        said = set()
        for name in ("one", "two", "uno"):
            fields = {"model": name, "prompt": "Once there was", "max_tokens": 4, "temperature": 0}
            answer = server.ask("POST", "/v1/completions", json.dumps(fields).encode(), head)
            assert answer.status == 200
            said.add(answer.json["choices"][0]["text"])
        assert len(said) == 1
        told = server.get("/health").json
        assert set(told["models"]) == {"one", "two"}
        (worker,) = told["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        server.wait_log("worker-0: its process was ended by SIGKILL")
        assert server.stop() == 0
