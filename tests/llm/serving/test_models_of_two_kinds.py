"""A language model and an embedding model in one server: one port, one device, each found by name and by kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from llm.embedding.directories import VOCABULARY, write_graph, write_json
from reflex_runtime.cli import _module, main
from reflex_runtime.cli.serve_models import ModelAsked, models_of, plans_of, rows_of
from reflex_runtime.cli.serving import names_model
from reflex_runtime.config import EMBEDDING_SETTINGS, EmbeddingServeConfig, LLMServeConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.events import BatchScheduled
from reflex_runtime.sources import own_settings
from serving.both_toy import Both
from serving.openai_toy import Caller


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("embedding") / "model")


@pytest.fixture(scope="module")
def both(root: Path) -> Iterator[Both]:
    with Both(root, max_queue=7) as toy:
        yield toy


def test_l9_one_client_asks_both_kinds_of_one_server(both: Both) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{both.port}/v1", api_key="none", max_retries=0)
    told = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    assert told.usage is not None
    assert told.usage.completion_tokens == 3
    for name in ("embed", "text-embedding-3-small"):
        found = client.embeddings.create(model=name, input=["robot", "arm"])
        assert (found.model, len(found.data[1].embedding)) == (name, 8)
    answers = both.metrics()
    assert answers("reflex_openai_requests_total", path="/v1/chat/completions", status="200", model="toy") == 1
    assert answers("reflex_openai_requests_total", path="/v1/embeddings", status="200", model="embed") == 2
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert list(cards) == ["toy", "embed", "text-embedding-3-small"]
    assert (cards["embed"]["dimensions"], cards["text-embedding-3-small"]["root"]) == (8, "embed")


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/embeddings", {"model": "toy", "input": "a"}, "'toy' generates text and makes no vectors; .* 'embed', 't"),
        ("/v1/chat/completions", {"model": "embed", "messages": []}, "'embed' makes vectors .*these generate: 'toy'"),
        ("/v1/completions", {"model": "embed", "prompt": "a"}, "'embed' makes vectors of texts and generates none"),
        ("/v1/responses", {"model": "embed", "input": "a"}, "'embed' makes vectors of texts and generates none"),
    ],
)
def test_l9_a_model_of_the_other_kind_is_refused_with_the_names_of_those_that_can(
    both: Both, path: str, fields: Any, says: str
) -> None:
    if path.endswith("completions") and "messages" in fields:
        fields = fields | {"messages": [{"role": "user", "content": "a"}]}
    answer = both.post(path, fields)
    error = both.error(answer)
    assert (answer.status, error["param"]) == (400, "model")
    assert re.search(says, error["message"])


def test_l9_messages_to_an_embedding_model_are_refused_in_their_apis_form(both: Both) -> None:
    asked = {"model": "embed", "messages": [{"role": "user", "content": "a"}]}
    for path, fields in (("/v1/messages", asked | {"max_tokens": 3}), ("/v1/messages/count_tokens", asked)):
        answer = both.post(path, fields)
        assert answer.status == 400
        assert "'embed' makes vectors of texts" in answer.json["error"]["message"]


def test_l9_an_unknown_model_is_told_every_name(both: Both) -> None:
    for answer in (both.embed(model="x"), both.complete(model="x")):
        assert (answer.status, both.error(answer)["code"]) == (404, "model_not_found")
        assert "'toy', 'embed', 'text-embedding-3-small'" in both.error(answer)["message"]


def test_b6_both_kinds_share_one_device_and_one_batch_runs_at_a_time(root: Path) -> None:
    with Both(root) as toy:
        toy.runner.stop()
        with toy.open(name="generates", max_tokens=3) as caller:
            toy.runner.wait_inside()
            with Caller(toy.port, "/v1/embeddings", {"model": "embed", "input": ["a", "b"]}, "vectors") as other:
                toy.ticket("vectors#1")
                assert {event.batch.group for event in toy.log.of(BatchScheduled)} == {"toy"}
                toy.runner.go(1)
                assert other.read_until(b'"usage"')  # between two steps
                toy.runner.go()
            caller.read_until(b'"usage"')
        assert {event.batch.group for event in toy.log.of(BatchScheduled)} == {"toy", "embed"}


def test_l9_what_is_told_of_models_of_two_kinds(both: Both) -> None:
    both.embed(["a", "b"])
    both.complete(max_tokens=2)
    health = both.get("/health").json
    assert health["model"] == "toy, embed"
    assert (health["models"]["embed"]["dimensions"], health["models"]["toy"]["max_model_len"]) == (8, 8192)
    assert (health["running"], health["waiting"], "kv_cache_usage" in health) == (0, 0, True)
    told = both.metrics()
    assert told("reflex_prompt_tokens_total", model="embed") >= 6
    assert told("reflex_request_success_total", model="embed", finished_reason="stop") >= 2
    assert told("reflex_generation_tokens_total", model="toy") >= 2
    assert told("reflex_embedding_calls_total", model="embed") >= 1
    paths = both.get("/openapi.json").json["paths"]
    names = paths["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert names["model"] == {"enum": ["embed", "text-embedding-3-small"]}
    (fields, _) = paths["/tokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert fields["properties"]["model"] == {"enum": ["toy", "embed", "text-embedding-3-small"]}
    assert fields["required"] == ["prompt", "model"]
    assert both.get("/docs").status == 200


def test_l9_tokenize_asks_the_tokenizer_of_the_model_that_is_named(both: Both) -> None:
    assert both.post("/tokenize", {"model": "toy", "prompt": "ab"}).json["tokens"] == [97, 98]
    found = both.post("/tokenize", {"model": "embed", "prompt": "robot arm", "return_token_strs": True}).json
    tokens = [2, VOCABULARY.index("robot"), VOCABULARY.index("arm"), 3]
    assert (found["tokens"], found["count"], found["max_model_len"]) == (tokens, 4, 64)
    assert found["token_strs"][1:3] == ["robot", "arm"]
    assert both.post("/detokenize", {"model": "embed", "tokens": tokens[1:3]}).json == {"prompt": "robot arm"}
    error = both.error(both.post("/tokenize", {"prompt": "a"}))
    assert "model: is missing; there are toy, embed, text-embedding-3-small" in error["message"]
    error = both.error(both.post("/tokenize", {"model": "embed", "messages": [{"role": "user", "content": "a"}]}))
    assert (error["param"], "has no form of conversations" in error["message"]) == ("messages", True)
    error = both.error(both.post("/detokenize", {"model": "embed", "tokens": [999]}))
    assert "tokens: must be in [0, " in error["message"]


def test_l9_each_kind_has_its_own_queue(both: Both) -> None:
    assert both.embed(["a"] * 20).status == 200
    assert "at most 20 may wait" in both.error(both.embed(["a"] * 21))["message"]
    assert "at most 7 may wait" in both.error(both.complete(n=8))["message"]


def test_l9_several_embedding_models_answer_by_name(root: Path) -> None:
    with Both(root, generates=False) as toy:
        rows = [toy.embed("robot arm a", model=name).json["data"][0]["embedding"] for name in ("embed", "first")]
        assert rows[0] != rows[1]
        error = toy.error(toy.complete())
        assert "this server's models make vectors of texts, and generate none" in error["message"]
        assert "kv_cache_usage" not in toy.get("/health").json
        told = toy.metrics()
        for name in ("embed", "first"):  # each counts its own
            assert told("reflex_prompt_tokens_total", model=name) == 5
            assert told("reflex_embedding_calls_total", model=name) == 1


def test_h5_the_document_names_the_models_to_those_with_the_key_only(root: Path) -> None:
    with Both(root, api_key="secret") as toy:
        for path in ("/openapi.json", "/docs"):
            plain = toy.get(path).body.decode()
            known = toy.get(path, authorization="Bearer secret").body.decode()
            wrong = toy.get(path, authorization="Bearer wrong").body.decode()
            for name in ("toy", "embed", "text-embedding-3-small"):
                quoted = (f'"{name}"', f"&quot;{name}&quot;")
                assert any(text in known for text in quoted)
                assert not any(text in plain for text in quoted)
            assert wrong == plain
        document = toy.get("/openapi.json").json
        assert document["info"]["title"] == "Reflex"
        assert {"/v1/embeddings", "/v1/chat/completions"} <= document["paths"].keys()


# -- the command -------------------------------------------------------------------------------------------------------


def asked(tmp_path: Path, root: Path, *words: str, file: str = "", **config: Any) -> list[ModelAsked]:
    table = tmp_path / "reflex.toml"
    table.write_text(file)
    words = tuple(word.replace("DIR", str(root)) for word in words)
    return models_of(LLMServeConfig(**config), words, table if file else None)


def test_h10_an_embedding_model_beside_others_has_settings_of_its_own(tmp_path: Path, root: Path) -> None:
    file = """
        [models.embed]
        weight = 2
        pooling = "cls"
        max-batch-cost-ms = 20
        alias = ["ada"]
    """
    words = ("chat=scribe", "embed=DIR")
    chat, embed = asked(tmp_path, root, *words, file=file, threads=2, max_queue=9, kv_cache_gb=0.5, max_model_len=99)
    assert isinstance(chat.config, LLMServeConfig)
    assert chat.config.kv_cache_gb == 0.5
    assert embed.config == EmbeddingServeConfig(threads=2, pooling="cls", max_batch_cost_ms=20.0, alias=("ada",))
    plans, (plan,) = plans_of([chat, embed])
    assert [of.name for of in plans] == ["chat"]
    assert (plan.name, plan.weight, plan.aliases, plan.model.pooling) == ("embed", 2.0, ("ada",), ("cls",))
    rows = dict(rows_of([chat, embed]))
    assert rows["model embed"] == f"{root}, weight 2, makes vectors, alias ada, pooling cls, max_batch_cost_ms 20.0"


def test_h10_alias_is_a_further_name_of_an_embedding_model(root: Path) -> None:
    (found,) = models_of(EmbeddingServeConfig(alias=("ada", "babbage=model")), [str(root)])
    assert (found.name, found.aliases) == ("model", ("ada", "babbage"))


@pytest.mark.parametrize(
    ("file", "config", "says"),
    [
        ("[models.embed]\nmax_num_seqs = 3", {}, r"\[models.embed\] max_num_seqs: is a setting of models that gen"),
        ("[models.chat]\npooling = 'cls'", {}, r"\[models.chat\] pooling: is a setting of embedding models"),
        ("[models.embed]\npooling = 'max'", {}, r"pooling=.*max.*: must be one of"),
        ("[models.embed]\nport = 3", {}, r"port: is a setting of the whole server"),
        ("", {"lora": ("embed:x=/y",)}, "embed is an embedding model, and takes no adapters"),
        ("[models.embed]\nmax_model_len = 513", {}, "model embed: --max-model-len=513: must be at most 512"),
        ("[models.chat]\nalias = ['embed']", {}, "--alias=embed: names embed already"),
    ],
)
def test_h11_what_goes_wrong_with_models_of_two_kinds_is_one_line(
    tmp_path: Path, root: Path, file: str, config: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plans_of(asked(tmp_path, root, "chat=scribe", "embed=DIR", file=file, **config))


def test_h11_runtime_processes_run_no_embedding_models(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ConfigError, match=r"--workers=2: runtime processes run "):
        asked(tmp_path, root, "chat=scribe", "embed=DIR", workers=2)


def test_h10_a_table_of_an_embedding_model_may_have_its_settings_and_no_others() -> None:
    for name in EMBEDDING_SETTINGS:
        value = getattr(EmbeddingServeConfig(), name)
        given = list(value) if isinstance(value, tuple) else value
        plain = EmbeddingServeConfig()
        _, config, places = own_settings(None, "models", "x", {name: given}, plain, EMBEDDING_SETTINGS)
        assert (getattr(config, name), list(places)) == (value, [name])


def test_h10_what_is_named_decides_which_options_there_are(tmp_path: Path, root: Path) -> None:
    assert _module("serve", [f"a={root}", f"b={root}"]) == "serve_embeddings"
    assert _module("serve", ["chat=scribe", f"b={root}"]) == "serve_llm"
    file = tmp_path / "reflex.toml"
    file.write_text(f"[models.a]\nsource = {json.dumps(str(root))}\n")
    assert _module("serve", ["--config", str(file)]) == "serve_embeddings"
    assert _module("serve", ["--config", str(file), "scribe"]) == "serve_llm"
    write_json(tmp_path / "reflex_config.json", {})
    assert _module("serve", ["--config", str(file), str(tmp_path)]) == "serve"


@pytest.mark.parametrize("words", [["chat=./nope", "embed=./x"], ["--port", "0", "chat=./nope", "embed=./x"]])
def test_h11_a_named_directory_that_is_missing_is_told_of_as_a_model(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--no-supervise", *words]) == 2
    assert "reflex serve: model chat: nope/config.json: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--policy", "arm=./nope"], ["./nope"], ["python:a.b:c"], ["--policy=arm=./nope"]])
def test_h11_values_of_options_and_sources_of_policies_name_no_model(words: list[str]) -> None:
    assert not names_model(words)
