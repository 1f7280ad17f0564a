"""`reflex serve MODEL_DIR`: its options, each of which does something, what it refuses, and one real run of it."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reflex_runtime.cli import main
from reflex_runtime.cli.serving import kind_of
from reflex_runtime.core.batch import BatchScheduled
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.generate_batcher import GenerateBatcherConfig
from reflex_runtime.llm.runners.runner import blocks_in
from reflex_runtime.llm.server import workers
from reflex_runtime.llm.server.model_host import ModelPlan, gpu_of, load_model
from reflex_runtime.llm.server.workers import WorkersConfig, one_bound
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.settings.declare import flag, table
from reflex_runtime.settings.read import load
from serving.harness import Server
from serving.openai_toy import Model, Toy
from thinned import thinned

RANGED = [f for f in fields(LLMServeConfig) if f.metadata["low"] is not None]


# -- steps -------------------------------------------------------------------------------------------------------------


def test_h10_max_num_batched_tokens_bounds_a_step() -> None:
    runner = Model()
    with Toy(runner, max_num_batched_tokens=16) as toy:
        before = len(runner.sizes)
        assert toy.complete("x" * 40, max_tokens=2).status == 200
        assert runner.sizes[before:] == [16, 16, 8, 1]


def test_h10_max_gap_ms_is_what_steps_are_planned_for() -> None:
    def planned(**config: Any) -> Any:
        with Toy(**config) as toy:
            assert toy.complete("x" * 40, max_tokens=8).status == 200
            return toy.on_loop(lambda: toy.batcher.device.scheduler.cost_model("default").snapshot())[0]["gap_ms"]

    assert planned(max_gap_ms=70) == 70.0
    assert planned() == pytest.approx(100.0)  # eight times the fixed part of the toy are less


def test_h10_max_num_seqs_bounds_who_is_generated_at_a_time() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=2) as toy:
        assert toy.complete(["a", "b", "c", "d"], max_tokens=3).status == 200
        assert max(len(event.batch) for event in toy.log.of(BatchScheduled)) == 2


def test_h10_long_prefill_token_threshold_bounds_a_prompts_part_of_a_step() -> None:
    runner = Model()
    with Toy(runner, long_prefill_token_threshold=10) as toy:
        before = len(runner.sizes)
        assert toy.complete("x" * 25, max_tokens=1).status == 200
        assert runner.sizes[before:] == [10, 10, 5]


def test_h10_speculate_computes_guesses_and_counts_them() -> None:
    def said(**config: Any) -> tuple[str, int, dict[str, Any]]:
        runner = Model()
        with Toy(runner, **config) as toy:
            before = len(runner.sizes)
            answer = toy.complete("abc abc ab", max_tokens=80, temperature=0, logit_bias={"97": 100})
            return answer.json["choices"][0]["text"], max(runner.sizes[before + 1 :]), toy.get("/health").json

    text, size, health = said(speculate="ngram")
    assert (text, size > 1) == ("a" * 80, True)
    counted = health["speculation"]
    assert 0 < counted["accepted_tokens"] <= counted["draft_tokens"] < 80
    text, size, health = said()
    assert (text, size, "speculation" in health) == ("a" * 80, 1, False)


def test_h10_no_prefix_caching_computes_prompts_again() -> None:
    with Toy(prefix_caching=False) as toy:
        for _ in range(2):
            usage = toy.complete("x" * 40, n=2, max_tokens=1).json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_h10_max_queued_tokens_bounds_the_prompts_that_wait() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=1, max_queued_tokens=50) as toy:
        runner.stop()
        with toy.open("a" * 40, name="runs", max_tokens=1):
            runner.wait_inside()
            with toy.open("b" * 40, name="waits", max_tokens=1):
                toy.ticket("waits")
                answer = toy.complete("c" * 11)
                assert (answer.status, toy.error(answer)["code"]) == (429, "queue_full")
                assert toy.error(answer)["message"] == "40 tokens wait already, at most 50 may"
                runner.go()
                toy.settled("waits")
        assert toy.complete("c" * 11).status == 200


def test_h10_trace_writes_every_step(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    with Toy(trace=str(file)) as toy:
        toy.complete("x" * 20, max_tokens=4)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["groups"]["default"]["unit"] == "tokens"
    units = [[member["units"] for member in line["members"]] for line in lines if line["kind"] == "batch"]
    assert units == [[20.0], [1.0], [1.0], [1.0]]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that looks like a model's, which checks nothing and loads as the toy."""
    from reflex_runtime.llm.engine import tokenizer
    from reflex_runtime.llm.runners import checkpoint

    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    sizes = {"torch_dtype": "float32", "cache_bytes": lambda tokens, width: 64 * tokens * width}
    opened = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=1000, **sizes))
    monkeypatch.setattr(checkpoint.Checkpoint, "open", lambda path: opened)
    monkeypatch.setattr(tokenizer.HFTokenizer, "load", lambda path, quiet=False: None)
    for name in (f.name for f in fields(LLMServeConfig)):
        monkeypatch.delenv(f"REFLEX_{name.upper()}", raising=False)
    return directory


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command would serve: (plan, open), one for each time it got as far."""
    from reflex_runtime.llm import app as server
    from reflex_runtime.web import serve as module

    found: list[tuple[Any, ...]] = []

    async def serve(make: Any, sockets: list[socket.socket], *told: Any) -> tuple[int, bool]:
        sockets[0].close()
        found.append(make(None))
        return 0, True

    monkeypatch.setattr(server, "serving", lambda plan, open, parent: (plan, open))
    monkeypatch.setattr(module, "serve", serve)
    monkeypatch.setattr(logging, "basicConfig", lambda **given: None)
    return found


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line a start that must fail prints."""
    try:
        status = main(["serve", "--no-supervise", *arguments])  # in this process
    except SystemExit as exit:
        status = int(exit.code or 0)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    return err.strip()


def test_h10_the_served_name_is_the_directorys_unless_said(model_dir: Path, served: list[Any]) -> None:
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0"]) == 0
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0", "--served-model-name", "other"]) == 0
    assert [plan.name for plan, _ in served] == ["my-model", "other"]


def test_h10_drain_timeout_s_is_how_long_the_end_may_take(
    model_dir: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server does with it: test_b20_when_the_time_is_over_streams_end_with_an_error."""
    from reflex_runtime.web import serve as module

    told: list[float] = []
    inner = module.serve

    def serve(made: Any, sockets: Any, config: Any, *more: Any) -> Any:
        told.append(config.drain_timeout_s)
        return inner(made, sockets, config, *more)

    monkeypatch.setattr(module, "serve", serve)
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0", "--drain-timeout-s", "7"]) == 0
    assert told == [7.0]


def test_h10_what_is_said_of_the_model_goes_to_its_loader(
    model_dir: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from reflex_runtime.llm.engine import load as module

    asked: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(module, "load", lambda path, **options: asked.append((path, options)))
    options = "--device cpu --runner torch --dtype float32 --threads 3 --max-model-len 99 --block-size 8"
    rounded = ["--quantization", "int4", "--cache-dir", "kept"]
    for more in ([], [*options.split(), "--kv-cache-gb", "1.5"], rounded):
        assert main(["serve", "--no-supervise", str(model_dir), "--port", "0", *more]) == 0
        load_model(ModelPlan("m", served[-1][0].config, model_dir))
    auto = {"device": "auto", "runner": "auto", "dtype": "auto", "quantization": "none", "cache_dir": ""}
    auto |= {"adapters": {}}
    none = dict.fromkeys(("block_size", "kv_cache_bytes", "max_model_len", "threads"))
    assert asked[0] == (model_dir, auto | none)
    numbers = {"block_size": 8, "kv_cache_bytes": 1_500_000_000, "max_model_len": 99, "threads": 3}
    assert asked[1] == (model_dir, auto | {"device": "cpu", "runner": "torch", "dtype": "float32"} | numbers)
    assert asked[2] == (model_dir, auto | {"quantization": "int4", "cache_dir": "kept"} | none)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--runner openvino --device cuda", "--device=cuda: PyTorch is not installed or sees no GPU"),
        ("--runner torch --quantization int8", "--quantization=int8: only the openvino runner rounds weights"),
        ("--block-size 8", "--block-size=8: the kernels of the openvino runner fix the size of a block"),
        ("--kv-cache-gb 0.000008191", "--kv-cache-gb=8.191e-06: must be in [8.192e-06, 20] GB: from one block"),
        ("--runner torch --kv-cache-gb 0.000004095", "--kv-cache-gb=4.095e-06: must be in [4.096e-06, 20] GB"),
        ("--runner torch --block-size 32 --kv-cache-gb 0.000008", "--kv-cache-gb=8e-06: must be in [8.192e-06, 20] GB"),
        ("--dtype bfloat16 --kv-cache-gb 0.000004", "--kv-cache-gb=4e-06: must be in [4.096e-06, 20] GB"),
        ("--kv-cache-gb 21", "--kv-cache-gb=21: must be in [8.192e-06, 20] GB"),
        ("--runner torch --kv-cache-gb 21", "--kv-cache-gb=21: must be in [4.096e-06, 20] GB"),
        ("--workers 4 --kv-cache-gb 6", "--kv-cache-gb=6: must be in [8.192e-06, 5] GB: from one block of this model "
         "to the free memory for each of 4 processes"),
        ("--max-model-len 1001", "--max-model-len=1001: must be at most 1000, the model's context"),
    ],
)
def test_h10_options_of_the_model_are_checked_before_the_port_opens_and_named_as_flags(
    options: str, says: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reflex_runtime.web.supervisor.bind", None)
    monkeypatch.setattr("reflex_runtime.llm.engine.load._sees_cuda", lambda: False)
    monkeypatch.setattr("reflex_runtime.llm.engine.load.free_bytes", lambda *device: 20_000_000_000)
    monkeypatch.setattr("reflex_runtime.llm.runners.openvino_runner._has_bfloat16", lambda core: True)
    assert says in said(capsys, str(model_dir), *options.split())


def test_h10_a_runner_whose_library_is_missing_and_one_beside_a_gpu_are_refused_too(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reflex_runtime.web.supervisor.bind", None)
    monkeypatch.setattr("reflex_runtime.llm.engine.load._sees_cuda", lambda: True)
    monkeypatch.setattr("reflex_runtime.llm.engine.load.find_spec", lambda name: None)
    line = said(capsys, str(model_dir), "--runner", "openvino", "--device", "cuda")
    assert "--runner=openvino: runs on the cpu, not on cuda" in line
    line = said(capsys, str(model_dir), "--device", "cpu")
    assert "--runner=auto: it needs openvino: in a clone, pip install '.[llm]'" in line
    assert "--runner=torch: it needs torch: in a clone, pip install '.[torch]'" in said(
        capsys, str(model_dir), "--runner", "torch"
    )


def test_h10_what_only_loading_shows_is_named_as_a_flag_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path, **options: Any) -> None:
        blocks_in(options["kv_cache_bytes"], 9, 3_000_000_000)

    monkeypatch.setattr("reflex_runtime.llm.engine.load.load", load)
    with pytest.raises(ConfigError, match=r"^--kv-cache-gb=1e-09: must be in \[9e-09, 3\] GB: from one block"):
        load_model(ModelPlan("m", LLMServeConfig(kv_cache_gb=1e-9)))


def test_h10_bfloat16_on_a_processor_without_it_is_refused_before_the_port_opens(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reflex_runtime.web.supervisor.bind", None)
    monkeypatch.setattr("reflex_runtime.llm.runners.openvino_runner._has_bfloat16", lambda core: False)
    line = said(capsys, str(model_dir), "--device", "cpu", "--dtype", "bfloat16")
    assert "--dtype=bfloat16: this processor has no instructions for it; use float32 or auto" in line


def test_h10_beside_a_gpu_what_its_runner_cannot_do_is_refused_before_the_port_opens(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reflex_runtime.web.supervisor.bind", None)
    monkeypatch.setattr("reflex_runtime.llm.engine.load._sees_cuda", lambda: True)
    monkeypatch.setattr("reflex_runtime.llm.engine.load.free_bytes", lambda *device: 20_000_000_000)
    line = said(capsys, str(model_dir), "--quantization", "int8")
    assert "--quantization=int8: only the openvino runner rounds weights" in line
    line = said(capsys, str(model_dir), "--block-size", "8", "--kv-cache-gb", "21")
    assert "--kv-cache-gb=21: must be in [2.048e-06, 20] GB" in line


@pytest.fixture
def in_workers(monkeypatch: pytest.MonkeyPatch) -> list[WorkersConfig]:
    """How the command would start runtime processes."""
    found: list[WorkersConfig] = []
    made = lambda **settings: found.append(WorkersConfig(**settings)) or found[-1]  # noqa: E731
    monkeypatch.setattr(workers, "WorkersConfig", made)
    return found


def test_h10_workers_run_the_model_with_the_same_settings(
    model_dir: Path, served: list[Any], in_workers: list[WorkersConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0"]) == 0
    assert in_workers == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    more = ["--max-num-seqs", "9", "--trace", str(model_dir / "steps.jsonl"), "--api-key", "secret"]
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0", "--workers", "2", *more]) == 0
    (config,) = in_workers
    plan = served[-1][0]
    assert plan.config.workers == 2
    assert plan.directory == model_dir
    told = config.options(plan.config, 1, 0)
    assert config.options(plan.config, 1, 2)["trace"] == str(model_dir / "steps.worker-1.2.jsonl")
    assert sorted(file.name for file in model_dir.glob("steps*")) == ["steps.worker-0.jsonl", "steps.worker-1.jsonl"]
    assert (told["max_num_seqs"], told["trace"]) == (9, str(model_dir / "steps.worker-1.jsonl"))
    assert told["threads"] == 4  # its part of the cores: threads of two models on one core wait for each other
    assert not {"api_key", "port", "host", "workers"} & told.keys()
    assert LLMServeConfig(**told).max_num_seqs == 9
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0", "--workers", "1", "--threads", "3"]) == 0
    assert in_workers[1].options(served[-1][0].config, 0, 0)["threads"] == 3
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0", "--workers", "1"]) == 0
    assert in_workers[2].options(served[-1][0].config, 0, 0)["threads"] == 0


@pytest.mark.parametrize(
    ("visible", "device", "given"),
    [
        ("0,1", "auto", ["0", "1", "0"]),
        ("GPU-a, GPU-b,GPU-c", "cuda", ["GPU-a", "GPU-b", "GPU-c"]),
        ("3", "cuda", [None] * 3),
        ("", "auto", [None] * 3),
        ("0,1", "cpu", [None] * 3),
    ],
)
def test_h10_each_worker_has_a_gpu_of_those_that_are_named(
    visible: str, device: str, given: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = LLMServeConfig(device=device, workers=3)
    assert [gpu_of(config, number).get("CUDA_VISIBLE_DEVICES") for number in range(3)] == given


def test_g11_the_section_of_the_file_is_honoured(
    model_dir: Path, served: list[Any], in_workers: list[WorkersConfig], tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "r.toml"
    given = {
        "enabled": False, "max_batch_size": 5, "min_hold_ms": 0.25, "max_hold_ms": 7.5,
        "background_extra_ms": 1.5, "pause_on_backpressure_ms": 11.0, "max_pending": 77,
        "max_pending_tokens": 999,
        "stream_limit": 33, "call_timeout_ms": 1500.0,
    }  # fmt: skip
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
    file.write_text("\n".join(["[serve]", "port = 0", "workers = 1", "[generate_batcher]", *lines]))
    assert main(["serve", "--no-supervise", str(model_dir), "--config", str(file)]) == 0
    batcher = in_workers[0].batcher
    assert {f.name: getattr(batcher, f.name) for f in fields(batcher)} == {**given, "ungroupable_options": ()}
    assert main(["serve", "--no-supervise", str(model_dir), "--workers", "1", "--port", "0"]) == 0
    assert in_workers[1].batcher == GenerateBatcherConfig()
    bounds = ["--max-queue", "5", "--max-queued-tokens", "50"]
    assert main(["serve", "--no-supervise", str(model_dir), "--workers", "1", "--port", "0", *bounds]) == 0
    bounded = GenerateBatcherConfig(max_pending=5, max_pending_tokens=50)
    assert one_bound(served[2][0].config, in_workers[2].batcher)[1] == bounded
    shown = served[0][0].config
    assert (shown.max_queue, shown.max_queued_tokens) == (77, 999)  # what n choices are measured against
    capsys.readouterr()
    for wrong, said_of_it in (
        ("max_hold_ms = -1", "generate_batcher.max_hold_ms=-1.0: must be in [0, 1000]"),
        ("max_hold = 1", "[generate_batcher] max_hold: no such setting"),
        ("min_hold_ms = 20", "generate_batcher.min_hold_ms=20.0: must be at most max_hold_ms"),
    ):
        file.write_text(f"[generate_batcher]\n{wrong}\n")
        for count in ("0", "1"):  # what is wrong is told, also where nobody needs it
            assert said_of_it in said(capsys, str(model_dir), "--workers", count, "--config", str(file))


def test_g11_a_section_that_nobody_needs_is_told(
    model_dir: Path, served: list[Any], in_workers: list[WorkersConfig], tmp_path: Path, caplog: Any
) -> None:
    file = tmp_path / "r.toml"
    file.write_text("[serve]\nport = 0\n[generate_batcher]\nmax_hold_ms = 2.0\n")
    for more, told in (([], True), (["--workers", "1"], False)):
        assert main(["serve", "--no-supervise", str(model_dir), "--config", str(file), *more]) == 0
        assert ("[generate_batcher] has no effect without --workers" in caplog.text) is told
        caplog.clear()


def test_h10_file_then_environment_then_flags_and_the_table_tells(
    model_dir: Path, served: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[serve]\nmax_queue = 7\nmax-num-seqs = 8\nprefix_caching = false\nport = 0\napi_key = "k"\n')
    monkeypatch.setenv("REFLEX_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("REFLEX_BLOCK_SIZE", "32")
    options = ["--config", str(file), "--block-size", "64", "--runner", "torch"]
    assert main(["serve", "--no-supervise", str(model_dir), *options]) == 0
    config = served[0][0].config
    assert (config.max_queue, config.max_num_seqs, config.block_size, config.prefix_caching) == (7, 9, 64, False)
    shown = capsys.readouterr().err
    assert "reflex serve my-model" in shown
    for (name, value), (_, default) in zip(table(config), table(LLMServeConfig()), strict=True):
        assert bool(re.search(rf"{name} +{re.escape(value)} *\n", shown)) is (value != default), name
    assert re.search(r"--api-key +set\n", shown)
    assert ("--api-key", "set") in table(config)
    assert ("--prefix-caching", "on") in table(LLMServeConfig())


def test_h11_a_model_reachable_from_outside_without_a_key_warns(
    model_dir: Path, served: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0"]) == 0
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0", "--host", "0.0.0.0", "--api-key", "k"]) == 0
    assert "reachable from outside" not in caplog.text
    assert main(["serve", "--no-supervise", str(model_dir), "--port", "0", "--host", "0.0.0.0"]) == 0
    assert "--host=0.0.0.0 is reachable from outside" in caplog.text


def test_h11_a_port_in_use_is_one_line_for_a_model_too(model_dir: Path, served: list[Any], capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port={port}: cannot be bound" in said(capsys, str(model_dir), "--port", str(port))


@pytest.mark.parametrize("field", RANGED, ids=lambda f: f.name)
def test_b2_a_models_value_out_of_range_names_flag_value_and_range(field: Any, model_dir: Path, capsys: Any) -> None:
    low, high = field.metadata["low"], field.metadata["high"]
    for value in (low - 1, high + 1):
        line = said(capsys, str(model_dir), f"{flag(field.name)}={value}")
        assert f"{flag(field.name)}={value:.10g}: must be in [{low:g}, {high:.10g}]" in line
    assert f"{flag(field.name)}=much: must be a" in said(capsys, str(model_dir), flag(field.name), "much")


def test_b2_a_models_choices_options_and_files(model_dir: Path, tmp_path: Path, capsys: Any) -> None:
    assert "--dtype=float16: must be one of auto" in said(capsys, str(model_dir), "--dtype", "float16")
    assert "--max-batch-cost-ms" in said(capsys, str(model_dir), "--max-batch-cost-ms", "50")
    assert "cannot be written" in said(capsys, str(model_dir), "--trace", str(tmp_path / "no" / "t.jsonl"))
    file = tmp_path / "r.toml"
    file.write_text("[serve]\nmax_batch_cost_ms = 1\n")
    assert "max_batch_cost_ms: no such setting" in said(capsys, str(model_dir), "--config", str(file))
    file.write_text("[serve]\nrtc = true\n")
    assert "rtc: no such setting; it is a setting of policies" in said(capsys, str(model_dir), "--config", str(file))
    assert "--served-model-name is empty" in said(capsys, str(model_dir), "--served-model-name", "")
    assert "give one of them, not both" in said(capsys, str(model_dir), "--uds", "a.sock", "--port", "5")


def test_what_is_served_decides_which_options_there_are(model_dir: Path, tmp_path: Path, capsys: Any) -> None:
    def helps(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["serve", *arguments, "--help"])
        assert caught.value.code == 0
        return str(capsys.readouterr().out)

    assert "--max-num-batched-tokens" in helps(str(model_dir))
    assert "--max-num-batched-tokens" in helps("--port", "7", str(model_dir))
    plain = helps()
    assert "--max-batch-cost-ms" in plain
    assert "reflex serve MODEL_DIR --help" in plain
    assert "--max-num-batched-tokens" not in plain
    both = tmp_path / "export"
    both.mkdir()
    for name in ("config.json", "reflex_config.json"):
        (both / name).write_text("{}")
    assert "--max-batch-cost-ms" in helps(str(both))
    assert "--max-batch-cost-ms" in helps(str(both), "--record", str(model_dir))
    assert kind_of(["x" * 5000, "\0"]) != "model"


def test_a_models_directory_is_checked_first_and_the_error_is_one_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in said(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["Strange"]}')
    assert "config.json" in said(capsys, str(tmp_path))


def test_the_settings_of_a_model_are_valid_by_default() -> None:
    assert load(LLMServeConfig, "serve", None, {}, {}) == LLMServeConfig()
    with pytest.raises(ConfigError, match="--max-queue=0"):
        LLMServeConfig(max_queue=0)


# -- for real ----------------------------------------------------------------------------------------------------------


def byte_tokenizer(directory: Path) -> None:
    """Save a tokenizer of 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@pytest.mark.parametrize("workers", thinned([0, 1], [0]))
def test_l9_the_command_serves_checkpoints_and_an_adapter_to_the_openai_client(workers: int, tmp_path: Path) -> None:
    import openai

    from llm.models import random_adapter, random_model

    directory = random_model("llama", tmp_path / "tiny-llama")
    adapter = random_adapter(tmp_path / "poet", directory)
    more = ("--lora", f"poet={adapter}")
    byte_tokenizer(directory)
    (directory / "generation_config.json").write_text('{"top_k": 1, "temperature": 0.9, "eos_token_id": 2}')
    options = ("--dtype", "float32", "--runner", "openvino", "--kv-cache-gb", "0.05", "--workers", str(workers))
    with Server(directory, *more, *options, until="as tiny-llama, tiny-llama:poet") as server:
        assert server.get("/health").json["state"] == "ready"
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any") as client:
            ask = {"model": "tiny-llama", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
            whole = client.completions.create(prompt="Robots that", **ask)
            assert whole.usage.completion_tokens == 8
            unsaid = client.completions.create(prompt="Robots that", **ask | {"temperature": openai.NOT_GIVEN})
            assert unsaid.choices[0].text == whole.choices[0].text  # top_k 1 of the file: the likeliest, too
            assert client.models.list().data[0].model_extra["sampling_defaults"]["top_k"] == 1
            parts = list(client.completions.create(prompt="Robots that", stream=True, **ask))
            assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
            chat = client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **ask)
            assert chat.choices[0].finish_reason == "length"
            poet = client.completions.create(prompt="Robots that", **ask | {"model": "tiny-llama:poet"})
            assert poet.choices[0].text != whole.choices[0].text
        whose = {"worker": "worker-0"} if workers else {}
        assert server.metrics()("reflex_generation_tokens_total", **whose) == 40
        assert server.stop() == 0
    assert any("settings have their defaults" in line for line in server.log)
    assert any("loading" in line for line in server.log)


@pytest.mark.long
def test_l9_the_command_serves_an_export_to_openvino(tmp_path: Path) -> None:
    import openai

    from llm.gpt2 import exported
    from reflex_runtime.llm import LLMEngine, SamplingParams

    directory = tmp_path / "tiny-gpt2"
    exported(directory)
    byte_tokenizer(directory)
    prompts = ["Robots that", "Cameras that look at robots"]
    engine = LLMEngine(directory)
    alone = [engine.generate([prompt], SamplingParams.greedy(8, ignore_eos=True))[0].text for prompt in prompts]
    engine.close()
    with Server(directory, "--kv-cache-gb", "0.05") as server:
        assert server.get("/health").json["runner"] == "openvino f32"
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any") as client:
            answer = client.completions.create(
                model="tiny-gpt2", prompt=prompts, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
            )
        assert [choice.text for choice in answer.choices] == alone
        assert server.stop() == 0


def test_an_export_that_cannot_be_served_is_refused_before_the_port_opens(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text('{"n_positions": 64}')
    (tmp_path / "openvino_model.xml").write_text("<net>")
    assert "openvino_model.xml: cannot be read" in said(capsys, str(tmp_path))
