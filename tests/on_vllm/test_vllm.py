"""Our scheduling inside vLLM. `make test-vllm` runs this where vLLM is installed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.on_vllm.engine import PLACES, TOKENS
from tests.on_vllm.model import write_model

from reflex_runtime import vllm as ours
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal import BatchLine, read_journal
from reflex_runtime.vllm.middleware import Middleware, rewritten

PATIENCE = 300.0  # seconds until a test gives up
OURS, TRACED = "reflex_runtime.vllm.Scheduler", "reflex_runtime.vllm.Traced"
ROOT = Path(__file__).parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

Ran = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vllm")
    write_model(root / "model")
    write_model(root / "repeats", spread=0.02)
    return root


@pytest.fixture(scope="module")
def ran(folder: Path) -> Ran:
    """What came of the workloads with a scheduler; one engine at a time, each once."""

    @cache
    def run(scheduler: str, options: str = "{}") -> dict[str, Any]:
        trace = folder / (f"{scheduler}.jsonl" if options == "{}" else "options.jsonl")
        model = folder / ("repeats" if "ngram" in options else "model")
        command = [sys.executable, "-m", "tests.on_vllm.engine", str(model), scheduler, str(trace), options]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | OFFLINE, cwd=ROOT
        )
        told = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert told, done.stdout[-3000:] + done.stderr[-3000:]
        found: dict[str, Any] = json.loads(told[0].removeprefix("FOUND "))
        return found

    return run


def steps_of(folder: Path, scheduler: str) -> list[BatchLine]:
    return list(read_journal(folder / f"{scheduler}.jsonl").batches)


def test_greedy_tokens_are_those_of_the_stock_scheduler(ran: Ran) -> None:
    """Prompts are longer than a step and share beginnings: chunked prefill and the prefix cache."""
    stock = ran("stock")["tokens"]
    assert len({tuple(tokens) for tokens in stock.values()}) == len(stock) == 64
    assert ran(OURS)["tokens"] == stock
    assert ran(TRACED)["tokens"] == stock


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 32, "block_size": 32},  # fewer than eight requests need in the end
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ],
    ids=["preemption", "speculation"],
)
def test_greedy_tokens_are_those_of_the_stock_scheduler_with(ran: Ran, folder: Path, options: dict[str, Any]) -> None:
    told = json.dumps(options)
    (folder / "options.jsonl").unlink(missing_ok=True)
    assert ran(OURS, told)["tokens"] == ran("stock", told)["tokens"]
    steps = list(read_journal(folder / "options.jsonl").batches)
    if "num_gpu_blocks_override" in options:
        assert sum(len(step.left) for step in steps) > 3  # they were preempted
    else:
        assert any(member.guessed and (member.outputs or 0) > 1 for step in steps for member in step.members)


def test_a_light_client_does_not_wait_for_a_heavy_one(ran: Ran) -> None:
    assert 5 * ran(OURS)["first"] <= ran("stock")["first"]


def test_watching_alone_changes_nothing(ran: Ran) -> None:
    assert ran(TRACED)["first"] == ran("stock")["first"]
    assert ran(TRACED)["late"] == ran("stock")["late"]


def test_what_is_too_late_is_aborted_unscheduled(ran: Ran, folder: Path) -> None:
    assert ran(OURS)["late"] == ["abort", "deadline_exceeded", 0, 4]
    assert ran("stock")["late"] == ["length", None, 4, 4]
    members = [member.client for step in steps_of(folder, OURS) for member in step.members]
    assert "in-time" in members
    assert "late" not in members


def test_a_promised_gap_leaves_a_prompt_what_fits(ran: Ran) -> None:
    """Every sequence that runs gets its token in every step; the first step with a prompt has half, as it is slower."""
    steps = ran(OURS, "promised")["promised"]
    assert all(step[:4] == [1, 1, 1, 1] for step in steps)
    prompts = [step[4] for step in steps]
    assert sum(prompts) == 200
    assert 2 * prompts[0] <= max(prompts) <= 17  # of 5 ms each, beside 14 ms
    assert min(prompts[1:-1]) >= 8


def test_what_cannot_be_in_time_is_refused_before_it_runs(ran: Ran) -> None:
    assert ran(OURS, "promised")["hopeless"] == ["deadline_unreachable", "length"]


def test_a_greedy_client_is_refused_while_too_much_waits(ran: Ran) -> None:
    ends = ran(OURS, "promised")["full"]
    greedy = [end for name, end in ends.items() if name.startswith("greedy")]
    assert ["abort", "queue_full"] in greedy
    assert ["length", None] in greedy
    assert [ends["modest-0"], ends["modest-1"]] == [["length", None]] * 2


def test_the_example_runs(folder: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "vllm_fair.py"), str(folder / "model")]
    more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | OFFLINE | more, cwd=folder
    )
    assert "light: last first token" in done.stdout, done.stderr[-3000:]
    assert (folder / "steps.jsonl").exists()


def test_callers_that_leave_disturb_nobody(ran: Ran) -> None:
    assert ran(OURS)["answered"] >= PLACES + 2


def test_the_journal_has_every_token_of_every_step(ran: Ran, folder: Path) -> None:
    """Budget and places are kept, prompts are chunked beside decodes, and every request is computed once."""
    for scheduler in (OURS, TRACED):
        ran(scheduler)
        journal = read_journal(folder / f"{scheduler}.jsonl")
        assert journal.footer is not None
        assert journal.footer.dropped == 0
        computed: dict[str, float] = {}
        asked: dict[str, float] = {}
        for step in journal.batches:
            assert sum(member.units for member in step.members) == step.cost <= TOKENS
            assert step.size <= PLACES
            for member in step.members:
                assert member.outcome in ("more", "done", "cancelled")
                cached = member.cached or 0.0 if member.state == "waiting" else 0.0
                computed[member.id] = computed.get(member.id, 0.0) + member.units + cached
                asked[member.id] = member.asked
        assert any(len({m.units > 1 for m in step.members}) == 2 for step in journal.batches)
        greedy = [name for name in computed if name.startswith("greedy")]
        assert len(greedy) == 64
        assert all(computed[name] == asked[name] + 11 for name in greedy)  # the last of 12 tokens is not computed
        assert any(member.cached for step in journal.batches for member in step.members)


def test_the_journal_is_read_by_reflex_trace(ran: Ran, folder: Path) -> None:
    ran(OURS)
    command = [sys.executable, "-m", "reflex_runtime", "trace", str(folder / f"{OURS}.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "left-1" in done.stdout
    assert "tokens" in done.stdout


def test_the_journal_has_a_line_of_every_request(ran: Ran, folder: Path) -> None:
    ran(OURS)
    requests = read_journal(folder / f"{OURS}.jsonl").requests
    late = [line for line in requests if line.outcome == "expired"]
    assert [line.request.robot_id for line in late] == ["late"]
    assert late[0].batch is None
    assert sum(line.outcome == "ok" for line in requests) > 64
    assert all(line.latency.total_ms >= line.latency.queue_ms >= 0.0 for line in requests)


def test_another_version_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "installed", lambda: "0.320.1")
    with pytest.raises(ConfigError, match=r"^reflex_runtime.vllm needs vLLM 0\.32; installed is 0\.320\.1$"):
        ours.check_version()
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "MODEL"])
    ours.plugin()
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "MODEL", f"--scheduler-cls={OURS}"])
    with pytest.raises(SystemExit, match="installed is"):
        ours.plugin()


@pytest.mark.parametrize(
    ("body", "headers", "wanted"),
    [
        ({"prompt": "a"}, {}, {"prompt": "a"}),
        ({"user": "u"}, {}, {"user": "u", "vllm_xargs": {"client": "u"}}),
        ({"user": "u"}, {"client": "h"}, {"user": "u", "vllm_xargs": {"client": "h"}}),
        ({"vllm_xargs": {"client": "own"}}, {"client": "h"}, {"vllm_xargs": {"client": "own"}}),
        ({}, {"deadline-ms": "250", "priority": "-1"}, {"priority": "-1", "vllm_xargs": {"deadline_ms": "250"}}),
        (["user"], {"client": "h"}, ["user"]),
    ],
)
def test_headers_become_arguments(body: Any, headers: dict[str, str], wanted: Any) -> None:
    raw = {f"x-reflex-{name}": value for name, value in headers.items()}
    assert json.loads(rewritten(json.dumps(body).encode(), raw)) == wanted
    assert rewritten(b'{"user"', raw) == b'{"user"'
    assert rewritten(b"[" * 200_000, raw) == b"[" * 200_000


def answered(kind: str, *parts: bytes, header: bytes = b"x-reflex-client") -> list[Any]:
    """What a caller gets of an application that answers 200 with these parts: status, headers and body."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
        for i, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": i + 1 < len(parts)})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (header, b"1")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(Middleware(app)(scope, receive, send))
    return [sent[0]["status"], dict(sent[0]["headers"]), b"".join(message["body"] for message in sent[1:])]


def choice(reason: str, stop: str | None) -> bytes:
    return json.dumps({"choices": [{"text": "", "finish_reason": reason, "stop_reason": stop}]}).encode()


@pytest.mark.parametrize(("code", "status"), [("queue_full", 503), ("deadline_exceeded", 504), ("invalid_config", 400)])
def test_a_refusal_is_an_error_to_callers(code: str, status: int) -> None:
    told = choice("abort", code)
    found, headers, body = answered("application/json", told[:20], told[20:])
    assert found == json.loads(body)["error"]["code"] == status
    assert json.loads(body)["error"]["type"] == code
    assert headers[b"content-length"] == b"%d" % len(body)
    assert (b"retry-after" in headers) == (status == 503)
    assert (b"x-reflex-max-gap-ms" in body) == (status == 400)  # what the caller may have sent


def test_a_header_of_ours_that_is_not_read_is_refused_by_name() -> None:
    status, _, body = answered("application/json", b"{}", header=b"x-reflex-deadline-msec")
    assert status == 400
    assert b"x-reflex-deadline-msec: no such header; did you mean x-reflex-deadline-ms?" in body
    assert answered("application/json", b"{}", header=b"x-reflected")[0] == 200


def test_other_answers_are_sent_on() -> None:
    for told in (choice("stop", None), choice("abort", None), b"[]", b'"abort"'):
        assert answered("application/json", told)[::2] == [200, told]
    events = [b'data: {"choices":[{"finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n"]
    assert answered("text/event-stream", *events)[2] == b"".join(events)


def test_a_stream_that_ends_without_a_token_says_so() -> None:
    body = answered("text/event-stream", b"data: [DONE]\n\n")[2]
    error, done, _ = body.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 503
    assert done == b"data: [DONE]"
