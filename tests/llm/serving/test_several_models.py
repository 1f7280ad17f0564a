"""Several language models in one server: found by name, one device for all, each with its own settings."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.cli import main, serve_models
from reflex_runtime.cli.serve_models import ModelAsked, models_of, plans_of, rows_of
from reflex_runtime.cli.serving import names_model
from reflex_runtime.cli.worker_settings import adapters_of
from reflex_runtime.config import MODEL_SETTINGS, LLMServeConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.events import BatchScheduled, RequestSettled
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.drivers.stepper import Stepper
from reflex_runtime.llm import LLMProcessor, SamplingParams
from reflex_runtime.llm.runner import Step
from reflex_runtime.llm.sampling_defaults import SamplingDefaults
from reflex_runtime.llm.serving.local_models import LocalModels, opened
from reflex_runtime.llm.serving.model_host import ModelPlan
from reflex_runtime.llm.serving.model_runtime import ModelRuntime
from reflex_runtime.llm.toy import ByteTokenizer, ToyRunner
from reflex_runtime.sources import own_settings
from serving.collector import Collector
from serving.openai_toy import PATIENCE, Model, Speaker, Toy

NAMES = ["small", "tiny", "gpt-4o:mini", "large"]


class Two(Toy):
    """A server of two speakers: `small` says a's, `large` b's."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.runners = {"small": Speaker("a" * 64), "large": Speaker("b" * 64)}

    def plans(self) -> list[ModelPlan]:
        config, wide = replace(self.config, max_num_seqs=1), replace(self.config, max_queue=3)
        greedy = SamplingDefaults(temperature=0.0)
        return [
            ModelPlan("small", config, aliases=("tiny", "gpt-4o:mini"), defaults=greedy),
            ModelPlan("large", wide, weight=3.0, defaults=greedy),
        ]

    def load(self, plan: ModelPlan) -> tuple[Model, ByteTokenizer]:
        return self.runners[plan.name], ByteTokenizer()

    def came(self, runtime: Any) -> None:
        self.batcher = runtime.batcher
        self.batcher.add_sink(self.log)

    def __exit__(self, *exc: object) -> None:
        for runner in self.runners.values():
            runner.go()
        super().__exit__(*exc)


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with Two() as made:
        yield made


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "says"), [("small", "a"), ("tiny", "a"), ("gpt-4o:mini", "a"), ("large", "b")])
def test_l9_each_name_is_answered_by_its_model_in_every_api(two: Two, name: str, says: str) -> None:
    said = [{"role": "user", "content": "hi"}]
    completion = two.complete(model=name, max_tokens=4).json
    assert (completion["model"], completion["choices"][0]["text"]) == (name, 4 * says)
    chat = two.chat("hi", model=name, max_tokens=4).json
    assert (chat["model"], chat["choices"][0]["message"]["content"]) == (name, 4 * says)
    response = two.post("/v1/responses", {"model": name, "input": "hi", "max_output_tokens": 4}).json
    assert (response["model"], response["output"][-1]["content"][0]["text"]) == (name, 4 * says)
    message = two.post("/v1/messages", {"model": name, "messages": said, "max_tokens": 4}).json
    assert (message["model"], message["content"][0]["text"]) == (name, 4 * says)
    assert two.post("/v1/messages/count_tokens", {"model": name, "messages": said}).json["input_tokens"] > 2
    assert two.post("/tokenize", {"model": name, "prompt": "hi"}).json["count"] == 2
    assert two.post("/detokenize", {"model": name, "tokens": [104]}).json == {"prompt": "h"}


def test_l9_every_name_is_listed_and_says_which_model_it_means(two: Two) -> None:
    cards = two.get("/v1/models").json["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        (name, "large" if name == "large" else "small", None) for name in NAMES
    ]
    assert two.get("/v1/models/gpt-4o:mini").json == cards[2]
    assert two.get("/v1/models/gpt-4o%3Amini").json == cards[2]
    document = two.get("/openapi.json").json
    fields = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert fields["properties"]["model"] == {"enum": NAMES}


def test_l9_an_unknown_name_is_404_with_the_names_that_there_are(two: Two) -> None:
    says = "the model 'other' does not exist; 'small', 'tiny', 'gpt-4o:mini', 'large' do"
    for answer in (two.complete(model="other"), two.get("/v1/models/other"), two.chat("hi", model="other")):
        assert (answer.status, two.error(answer)["message"]) == (404, says)
    answer = two.post("/tokenize", {"prompt": "hi"})
    assert (answer.status, two.error(answer)["param"]) == (400, "model")
    assert two.error(answer)["message"] == "model: is missing; there are small, tiny, gpt-4o:mini, large"


def test_l9_answers_are_counted_by_model_and_only_by_names_that_are_served() -> None:
    with Two() as two:
        assert [two.complete(model=name, max_tokens=1).status for name in ("small", "tiny", "large")] == [200] * 3
        assert two.complete(model="made up").status == 404
        assert two.post("/v1/completions", b"{").status == 400
        assert two.post("/tokenize", {"model": "large", "prompt": "hi"}).status == 200
        assert two.get("/health").status == 200
        family = "reflex_openai_requests_total"
        told = [(dict(labels), n) for (name, labels), n in two.metrics().samples.items() if name == family and n]
    found = {(labels["path"], labels["status"], labels["model"]): n for labels, n in told}
    assert found == {
        ("/v1/completions", "200", "small"): 2, ("/v1/completions", "200", "large"): 1,
        ("/v1/completions", "404", "unknown"): 1, ("/v1/completions", "400", "unknown"): 1,
        ("/tokenize", "200", "large"): 1, ("/health", "200", ""): 1,
    }  # fmt: skip


def test_l9_each_model_has_its_own_limits(two: Two) -> None:
    assert two.complete("hi", model="small", n=4, max_tokens=1).status == 200
    answer = two.complete("hi", model="large", n=4, max_tokens=1)
    assert two.error(answer)["message"] == "n: asks for 4 choices of all prompts, at most 3 may wait (--max-queue)"


# -- one device --------------------------------------------------------------------------------------------------------


def test_l9_models_take_turns_on_one_device_and_show_what_they_do() -> None:
    with Two() as two:
        small, large = two.runners.values()
        small.stop()
        with (
            two.open(name="s", model="small", max_tokens=6, stream=True) as one,
            two.open(name="t", model="tiny", max_tokens=2, stream=True) as waits,
        ):
            small.wait_inside()
            two.ticket("t")
            with two.open(name="l", model="large", max_tokens=6, stream=True) as other:
                two.ticket("l")
                assert len(large.sizes) == 2  # its warm-up: the device is the other's
                told = two.get("/health").json
                assert (told["model"], told["running"], told["waiting"]) == ("small, large", 1, 2)
                assert {name: (m["running"], m["waiting"]) for name, m in told["models"].items()} == {
                    "small": (1, 1), "large": (0, 1)
                }  # fmt: skip
                held = {name: m["kv_cache_usage"] for name, m in told["models"].items()}
                assert told["kv_cache_usage"] == held["small"] > held["large"] == 0
                small.go()
                other.read()
            one.read()
            waits.read()
        assert (one.text, other.text, waits.text) == ("a" * 6, "b" * 6, "aa")
        groups = [event.batch.group for event in two.log.of(BatchScheduled)]
        assert groups[:2] == ["small", "large"]  # the one that has had nothing comes next
        assert groups.count("large") == 6
        series = two.metrics()
        assert series("reflex_generation_tokens_total", model="small") == 8
        assert series("reflex_generation_tokens_total", model="large") == 6
        assert series("reflex_request_success_total", model="large", finished_reason="length") == 1
        assert series("reflex_num_requests_running", model="small") == 0
        assert {"small", "large"} == set(two.on_loop(lambda: two.model.host.queues()))


def test_l9_status_has_a_row_for_each_model(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"http://127.0.0.1:{two.port}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model", "running", "waiting", "cache", "held", "context", "runner"] in rows
    assert ["large", "0", "0", "0%", "8,192", "toy"] in rows


def test_l9_the_weight_of_a_model_is_its_share_of_the_device() -> None:
    async def main() -> None:
        config = LLMServeConfig()
        plans = [ModelPlan("small", config), ModelPlan("large", config, weight=3.0)]
        models = ModelRuntime(config, plans, opened(lambda plan: (Model(), ByteTokenizer())))
        await models.start()
        assert isinstance(models.host, LocalModels)
        assert [(group.name, group.weight) for group in models.host.device.groups] == [("small", 1.0), ("large", 3.0)]
        await models.stop(asyncio.get_running_loop().time() + 5.0, asyncio.Event().wait)

    asyncio.run(main())


def test_l9_a_model_of_weight_three_gets_three_of_four_steps_that_cost_alike() -> None:
    now = [0.0]

    class Timed(ToyRunner):
        def forward(self, step: Step) -> Any:
            now[0] += 1.0
            return super().forward(step)

    weights = {"small": 1.0, "large": 3.0}
    processors = {
        name: LLMProcessor(Timed(), ByteTokenizer(), name=name, weight=weight) for name, weight in weights.items()
    }
    scheduler = Scheduler([processor.group for processor in processors.values()])
    stepper = Stepper(scheduler, processors, clock=lambda: now[0])
    for processor in processors.values():
        scheduler.submit(processor.request("robots", SamplingParams.greedy(500, ignore_eos=True)), now[0])
    groups = [batch.group for _ in range(400) if (batch := stepper.step()) is not None]
    assert groups.count("large") == pytest.approx(300, abs=2)


def test_x6_spans_of_several_models_say_which_one_answered() -> None:
    with Collector() as collector:
        with Two(otel=collector.url) as two:
            assert two.complete(model="tiny", max_tokens=2).status == 200
            assert two.complete(model="other").status == 404
        found = [span for span in collector.spans if span.kind == 2]
    told = [(s.name, s.attributes["gen_ai.response.model"], s.attributes.get("gen_ai.request.model")) for s in found]
    assert told == [("text_completion small", "small", "tiny"), ("text_completion", "", None)]


def test_l9_a_step_that_fails_fails_no_request_of_another_model() -> None:
    with Two() as two:
        small = two.runners["small"]
        small.stop()
        small.fails = lambda step: RuntimeError("broken")
        with two.open(name="s", model="small", max_tokens=3) as one:
            small.wait_inside()
            with two.open(name="l", model="large", max_tokens=3) as other:
                two.ticket("l")
                small.go()
                other.read_until(b"bbb")
            assert b" 500 " in one.read_until(b"\r\n\r\n")
        small.fails = lambda step: None
        assert two.complete(model="small", max_tokens=2).json["choices"][0]["text"] == "aa"
        assert two.get("/health").json["status"] == "ok"


def test_b20_what_is_still_tokenised_when_the_server_ends_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with Two() as two:
        assert two.model is not None
        assert two.model.host is not None
        inside, go = threading.Event(), threading.Event()
        tokenizer: Any = two.model.host.generator("large").tokenizer

        def encode(text: str, most: int | None = None) -> list[int]:
            inside.set()
            assert go.wait(PATIENCE)
            return list(text.encode())

        monkeypatch.setattr(tokenizer, "encode", encode)
        with two.open("x" * 3000, model="large", max_tokens=2) as caller:
            assert inside.wait(PATIENCE)
            two.stop()
            two.until(lambda: two.model is not None and two.model.state == "draining")
            go.set()
            assert caller.read_until(b'"bb"').startswith(b"HTTP/1.1 200 OK")


def test_h10_one_trace_has_the_steps_of_all_models(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    with Two(trace=str(file)) as two:
        for name in ("small", "large"):
            assert two.complete(model=name, max_tokens=2).status == 200
    head, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert set(head["groups"]) == {"small", "large"}
    assert [line["group"] for line in lines if line["kind"] == "batch"] == ["small", "small", "large", "large"]


def test_l9_a_model_that_cannot_be_loaded_ends_the_start_and_frees_the_others() -> None:
    closed = []

    class Closing(Model):
        def close(self) -> None:
            closed.append(self)

    def load(plan: ModelPlan) -> Any:
        if plan.name == "large":
            raise ConfigError("/models/large: no weights")
        return Closing(), ByteTokenizer()

    async def main() -> None:
        config = LLMServeConfig()
        models = ModelRuntime(config, [ModelPlan("small", config), ModelPlan("large", config)], opened(load))
        await models.start()
        assert (models.state, models.unusable) == ("warmup_failed", True)
        assert models.error == "model large: /models/large: no weights"
        assert len(closed) == 1

    asyncio.run(main())


# -- adapters ----------------------------------------------------------------------------------------------------------


class Adapted(Model):
    """Says x's by itself, a's with its first adapter and b's with the second."""

    adapters = ("poet", "coder")

    def forward(self, step: Step) -> Any:
        logits = super().forward(step)
        numbers = [0] * len(logits) if step.adapters is None else step.adapters
        for row, number in zip(logits, numbers, strict=True):
            row[ord("xab"[number])] = 1000.0
        return logits


class WithAdapters(Toy):
    def plans(self) -> list[ModelPlan]:
        return [ModelPlan("toy", self.config, aliases=("mini",), adapters=Adapted.adapters)]


@pytest.fixture(scope="module")
def adapted() -> Iterator[WithAdapters]:
    with WithAdapters(Adapted()) as made:
        yield made


@pytest.mark.parametrize(("name", "says"), [("toy", "x"), ("toy:poet", "a"), ("toy:coder", "b"), ("mini:poet", "a")])
def test_l9_an_adapter_is_asked_for_behind_the_name_of_its_model(adapted: Toy, name: str, says: str) -> None:
    completion = adapted.complete(model=name, max_tokens=4).json
    assert (completion["model"], completion["choices"][0]["text"]) == (name, 4 * says)
    assert adapted.chat("hi", model=name, max_tokens=4).json["choices"][0]["message"]["content"] == 4 * says
    assert adapted.post("/tokenize", {"model": name, "prompt": "hi"}).json["count"] == 2


def test_l9_adapters_are_listed_with_the_model_they_change(adapted: Toy) -> None:
    cards = {card["id"]: card for card in adapted.get("/v1/models").json["data"]}
    assert list(cards) == ["toy", "mini", "toy:poet", "mini:poet", "toy:coder", "mini:coder"]
    assert (cards["mini:poet"]["root"], cards["mini:poet"]["parent"]) == ("toy", "toy")
    assert (cards["mini"]["root"], cards["mini"]["parent"]) == ("toy", None)
    for name in ("poet", "toy:", "toy:other", "toy:poet:coder"):
        answer = adapted.complete(model=name)
        assert (answer.status, adapted.error(answer)["code"]) == (404, "model_not_found")
        assert f"the model {name!r} does not exist; 'toy', 'mini', 'toy:poet'" in adapted.error(answer)["message"]


def test_l9_requests_with_different_adapters_share_steps_and_no_cached_blocks() -> None:
    runner = Adapted()
    with WithAdapters(runner) as toy:
        runner.stop()
        with (
            toy.open("p" * 40, name="first", model="toy:poet", max_tokens=3, stream=True) as first,
            toy.open("p" * 40, name="second", model="toy:coder", max_tokens=3, stream=True) as second,
            toy.open("p" * 40, name="third", max_tokens=3, stream=True) as third,
        ):
            for name in ("first", "second", "third"):
                toy.ticket(name)
            runner.go()
            texts = [caller.read() and caller.text for caller in (first, second, third)]
        assert texts == ["aaa", "bbb", "xxx"]
        assert max(len(event.batch) for event in toy.log.of(BatchScheduled)) == 3
        for name, cached in (("toy:poet", 32), ("toy:coder", 32), ("mini:coder", 32)):
            usage = toy.complete("p" * 40, model=name, max_tokens=1).json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        tickets = [toy.log.wait(RequestSettled, n + 1).ticket for n in range(3)]
        assert [ticket.cached for ticket in tickets] == [0.0, 0.0, 0.0]


# -- the command -------------------------------------------------------------------------------------------------------


def asked(tmp_path: Path, *words: str, file: str = "", **config: Any) -> list[ModelAsked]:
    """What these words ask for; a and b are directories."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
    table = tmp_path / "reflex.toml"
    table.write_text(file)
    words = tuple(word.replace("DIR", str(tmp_path)) for word in words)
    return models_of(LLMServeConfig(**config), words, table if file else None)


def test_h10_models_have_their_names_settings_and_parts_of_the_cache(tmp_path: Path) -> None:
    file = f"""
        [models.small]
        weight = 3
        max-num-seqs = 4
        alias = ["mini", "micro"]
        [models.third]
        source = "{tmp_path / 'b'}"
        kv_cache_gb = 0.5
    """
    found = asked(tmp_path, "small=DIR/a", "DIR/b", file=file, alias=("large=b",), kv_cache_gb=2.0, max_num_seqs=9)
    assert [(m.name, m.directory.name, m.weight, m.aliases) for m in found] == [
        ("small", "a", 3.0, ("mini", "micro")), ("b", "b", 1.0, ("large",)), ("third", "b", 1.0, ()),
    ]  # fmt: skip
    assert [m.config.max_num_seqs for m in found] == [4, 9, 9]
    assert [m.config.kv_cache_gb for m in found] == [1.0, 1.0, 0.5]
    assert [m.where for m in found] == ["model small: ", "model b: ", "model third: "]
    told = f"{tmp_path / 'a'}, weight 3, cache 1 GB, alias mini, alias micro, max_num_seqs 4"
    assert dict(rows_of(found))["model small"] == told


def test_h10_alias_is_a_further_name_of_one_model(tmp_path: Path) -> None:
    (found,) = asked(tmp_path, "DIR/a", alias=("gpt-4o", "b=a"))
    assert (found.name, found.aliases, found.where) == ("a", ("gpt-4o", "b"), "")
    assert found.config.kv_cache_gb == 0.0  # the runner's own
    assert [m.name for m in asked(tmp_path, "x=DIR/a")] == ["x"]


def test_h10_lora_names_adapters_of_a_model(tmp_path: Path) -> None:
    (one,) = asked(tmp_path, "DIR/a", lora=("x=adapters/x", "a:y=/y"))
    assert one.config.lora == (f"x={Path('adapters/x').resolve()}", "y=/y")
    assert adapters_of(one.config) == {"x": Path("adapters/x").resolve(), "y": Path("/y")}
    file = '[models.b]\nlora = ["z=/z"]'
    a, b = asked(tmp_path, "DIR/a", "DIR/b", lora=("a:x=/x", "b:y=/y=1"), file=file)
    assert (a.config.lora, b.config.lora) == (("x=/x",), ("y=/y=1", "z=/z"))


@pytest.mark.parametrize(
    ("words", "more", "says"),
    [
        ("DIR/a x=DIR/a a=DIR/b", {}, "a=.*: a model is called a already; write NAME=DIR with another name"),
        ("DIR/a DIR/b", {"served_model_name": "x"}, "--served-model-name=x: is for one MODEL_DIR without a name"),
        ("y=DIR/a", {"served_model_name": "x"}, "--served-model-name=x: is for one MODEL_DIR without a name"),
        ("DIR/a DIR/b", {"alias": ("x",)}, "--alias=x: must be ALIAS=MODEL, MODEL of a, b"),
        ("DIR/a DIR/b", {"alias": ("x=c",)}, "--alias=x=c: c is none of a, b"),
        ("DIR/a DIR/b", {"alias": ("b=a",)}, "--alias=b: names b already"),
        ("DIR/a DIR/b", {"alias": ("x=a", "x=b")}, "--alias=x: names a already"),
        ("DIR/a", {"lora": ("x",)}, "--lora=x: must be NAME=DIR, DIR a directory of peft with adapter_config.json"),
        ("DIR/a", {"lora": ("b:x=y",)}, "--lora=b:x=y: b is none of a"),
        ("DIR/a", {"lora": ("x=y", "x=z")}, "--lora=x=…: two adapters of a model have this name"),
        ("b=DIR/a DIR/b:x", {"lora": ("b:x=y",)}, "--lora=x=…: a model is called b:x already"),
        ("DIR/a DIR/b:x", {"alias": ("b=a",), "lora": ("a:x=y",)}, "--lora=x=…: a model is called b:x already"),
        ("DIR/a", {"lora": ("x y=z",)}, "--lora=x y=z: the name 'x y' must be 1 to 64 letters"),
        ("DIR/a DIR/b", {"lora": ("x=y",)}, "--lora=x=y: must be MODEL:NAME=DIR, MODEL of a, b"),
        ("DIR/a DIR/b", {"lora": ("c:x=y",)}, "--lora=c:x=y: must be MODEL:NAME=DIR, MODEL of a, b"),
        ("DIR/a", {"alias": ("x y",)}, "--alias=x y: the name 'x y' must be 1 to 64 letters, digits"),
        ("-x=DIR/a", {}, "the name '-x' must be 1 to 64"),
        (" ".join(f"m{i}=DIR/a" for i in range(17)), {}, "MODEL_DIR: 17 models are named, at most 16 are served"),
        ("DIR/a", {"file": "[models.x]\nweight = 2"}, r"\[models.x\]: no such model is served: write x=DIR, or give"),
        ("DIR/a", {"file": "[models.a]\nport = 2"}, r"\[models.a\] port: is a setting of the whole server"),
        ("DIR/a", {"file": "[models.a]\nweight = 0"}, r"\[models.a\]: .*weight=0.0: must be in \[0.01, 100\]"),
        ("DIR/a", {"file": "[models.a]\nalias = ['x y']"}, "the name 'x y' must be"),
        ("DIR/a", {"file": "models = 3"}, r"\[models\]: must be tables \[models.NAME\]"),
    ],
)
def test_h11_models_that_contradict_each_other_are_one_line(
    tmp_path: Path, words: str, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        asked(tmp_path, *words.split(), **more)


def test_h10_a_table_of_a_model_may_have_its_settings_and_no_others() -> None:
    for name in MODEL_SETTINGS:
        value = getattr(LLMServeConfig(), name)
        given = list(value) if isinstance(value, tuple) else value
        _, config, places = own_settings(None, "models", "x", {name: given}, LLMServeConfig(), MODEL_SETTINGS)
        assert (getattr(config, name), list(places)) == (value, [name])
    for name in LLMServeConfig.__dataclass_fields__.keys() - MODEL_SETTINGS:
        with pytest.raises(ConfigError, match="is a setting of the whole server"):
            own_settings(None, "models", "x", {name: 1}, LLMServeConfig(), MODEL_SETTINGS)


def test_h11_caches_that_do_not_fit_together_are_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reflex_runtime.llm import memory

    wrong = asked(tmp_path, "one=DIR/a", "two=scribe")
    with pytest.raises(ConfigError, match=r"^model one: .*/a"):
        plans_of(wrong)
    both = asked(tmp_path, "one=scribe", "two=scribe", kv_cache_gb=1.0)
    monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": 900_000_000)
    with pytest.raises(ConfigError, match=r"the models' caches take 1\.00 GB together, and 0\.90 GB are free"):
        serve_models._check_memory([config for _, config in serve_models._generating(both)])
    monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": 1_900_000_000)
    both = asked(tmp_path, "one=scribe", "two=scribe", kv_cache_gb=1.0, workers=2)
    with pytest.raises(ConfigError, match=r"the models' caches take 2\.00 GB in 2 processes, and 1\.90 GB are free"):
        serve_models._check_memory([config for _, config in serve_models._generating(both)])


def test_h10_a_word_with_a_name_is_a_models_directory_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert names_model(["--port", "0", f"small={tmp_path}", "other=scribe"])
    assert not names_model(["--policy", "arm=./nowhere"])
