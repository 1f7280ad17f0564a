"""L9, POST /v1/embeddings: what OpenAI's clients send and get, what is refused, and how texts share batches."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from late import late
from llm.embedding.directories import VOCABULARY
from reflex_runtime.core.errors import Cancelled, ProcessorError, QueueFull
from reflex_runtime.core.events import BatchScheduled, RequestQueued
from reflex_runtime.core.request import Request
from reflex_runtime.drivers.slices import SLICE
from reflex_runtime.llm.serving import local_models
from reflex_runtime.llm.serving.answers import embeddings as answers
from reflex_runtime.llm.serving.embedding_runtime import EmbeddingWait
from serving.embedding_toy import EmbeddingToy, toy_directory

openai = late("openai")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_directory(tmp_path_factory.mktemp("embedding") / "model", [2, 4])


@pytest.fixture(scope="module")
def toy(root: Path) -> Iterator[EmbeddingToy]:
    with EmbeddingToy(root) as made:
        yield made


@pytest.fixture(scope="module")
def client(toy: EmbeddingToy) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{toy.port}/v1", api_key="none", max_retries=0)


def ids(text: str) -> list[int]:
    """The tokens of a text of known words."""
    return [2, *(VOCABULARY.index(word) for word in text.split()), 3]


# -- what is answered --------------------------------------------------------------------------------------------------


def test_l9_the_openai_client_gets_vectors_in_order_and_usage(client: Any) -> None:
    texts = ["robot", "arm a", "robot arm x"]
    found = client.embeddings.create(model="toy", input=texts)  # asks for base64 by itself
    assert [each.index for each in found.data] == [0, 1, 2]
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (12, 12)
    assert (found.model, found.object, found.data[0].object) == ("toy", "list", "embedding")
    plain = client.embeddings.create(model="toy", input=texts, encoding_format="float")
    for one, other in zip(found.data, plain.data, strict=True):
        assert np.allclose(one.embedding, other.embedding, atol=1e-7)
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-6)
    alone = client.embeddings.create(model="toy", input="arm a", encoding_format="float").data[0].embedding
    assert np.allclose(alone, plain.data[1].embedding, atol=1e-6)
    assert len({tuple(each.embedding) for each in plain.data}) == 3


def test_l9_base64_holds_float32_bytes(toy: EmbeddingToy) -> None:
    (told,) = toy.embed("robot arm", encoding_format="base64").json["data"]
    row = np.frombuffer(base64.b64decode(told["embedding"]), "<f4")
    assert np.array_equal(row, toy.vectors("robot arm")[0])


def test_l9_token_ids_are_taken_as_they_are(toy: EmbeddingToy) -> None:
    text = "robot arm a"
    assert np.array_equal(toy.vectors(ids(text)), toy.vectors(text))
    both = toy.vectors([ids(text), ids("a")])
    assert np.allclose(both, np.concatenate([toy.vectors(text), toy.vectors("a")]), atol=1e-6)


def test_l9_dimensions_cut_a_matryoshka_vector_and_bring_it_to_length_one(toy: EmbeddingToy) -> None:
    (whole,), (cut,) = toy.vectors("robot arm"), toy.vectors("robot arm", dimensions=4)
    assert np.allclose(cut, whole[:4] / np.linalg.norm(whole[:4]), atol=1e-6)
    assert np.array_equal(toy.vectors("robot arm", dimensions=8)[0], whole)


def test_l9_truncate_prompt_tokens_cuts_and_keeps_the_end(toy: EmbeddingToy) -> None:
    long = "robot " * 100
    assert np.array_equal(toy.vectors(long, truncate_prompt_tokens=5), toy.vectors("robot robot robot"))
    assert np.array_equal(toy.vectors(long, truncate_prompt_tokens=-1), toy.vectors("robot " * 62))
    assert toy.embed(long, truncate_prompt_tokens=-1).json["usage"]["prompt_tokens"] == 64
    assert np.array_equal(toy.vectors(ids("arm a a"), truncate_prompt_tokens=2), toy.vectors([2, ids("arm")[1]]))


@pytest.mark.parametrize(("gap", "brief"), [(" ", " "), ("\n", " "), ("x", f" {'x' * 101} ")])
def test_l9_a_text_that_is_cut_keeps_its_first_tokens_wherever_they_stand(
    toy: EmbeddingToy, gap: str, brief: str
) -> None:
    """A long word is one token, and a run of spaces is none."""
    long, expected = f"robot {gap * 70_000} arm" + " a" * 9, toy.vectors(f"robot{brief}arm")
    assert np.array_equal(toy.vectors(long, truncate_prompt_tokens=5 if gap == "x" else 4), expected)


def test_l9_many_vectors_are_written_beside_the_loop(toy: EmbeddingToy) -> None:
    texts = [f"{'robot ' * (1 + i % 7)}arm" for i in range(2048)]
    answer = toy.embed([*texts, *texts][:2048], priority="background")
    found = answer.json["data"]
    assert [each["index"] for each in found] == list(range(2048))
    assert np.allclose(found[7]["embedding"], found[0]["embedding"], atol=1e-6)


@pytest.mark.parametrize(("form", "count", "beside"), [(True, 2, False), (True, 400, True), (False, 400, True)])
def test_l9_a_large_answer_is_written_beside_the_loop(
    form: bool, count: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, part = set(), answers._part

    def seen(*given: Any) -> bytes:
        threads.add(threading.get_ident())
        return part(*given)

    monkeypatch.setattr(answers, "_part", seen)
    rows = list(np.arange(count * 64, dtype=np.float32).reshape(count, 64))
    body = json.loads(asyncio.run(answers.written(rows, form, '"data":[]', 7)))
    assert (threading.get_ident() in threads) is not beside
    assert (body["model"], body["usage"]["total_tokens"], body["object"]) == ('"data":[]', 7, "list")
    assert [each["index"] for each in body["data"]] == list(range(count))
    last = body["data"][-1]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(last), "<f4") if form else last, rows[-1])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": ""}, "input", "input: is empty"),
        ({"input": ["a", ""]}, "input", "input: is empty"),
        ({"input": []}, "input", "input: holds 0 texts"),
        ({"input": [[]]}, "input", "input: is empty"),
        ({"input": ["a", [1]]}, "input", "input: must be"),
        ({"input": 3}, "input", "input: expected"),
        ({"input": ["a"] * 2049}, "input", "input: holds 2049 texts, must hold 1 to 2048"),
        ({"input": [[1]] * 40_000}, "input", "input: holds 40000 texts, must hold 1 to 2048"),
        ({"input": [1, 999]}, "input", "token ids must be in [0, "),
        ({"input": [1, -1]}, "input", "token ids must be in [0, "),
        ({"input": "a", "dimensions": 3}, "dimensions", "dimensions=3: must be one of 2, 4"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions=0: must be at least 1"),
        ({"input": "a", "dimensions": 2.5}, "dimensions", "whole number"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be at least 1, or -1"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "must be at most 64"),
        ({"input": "a", "deadline_ms": -1}, "deadline_ms", "deadline_ms=-1"),
        ({"input": "a", "user": "\n"}, "user", "user"),
        ({"input": "a", "stream": True}, "stream", "unknown field"),
        ({}, "input", "input: object missing required field"),
    ],
)
def test_l9_a_wrong_field_of_an_embedding_is_named(toy: EmbeddingToy, fields: Any, param: str, says: str) -> None:
    answer = toy.post("/v1/embeddings", {"model": "toy"} | fields)
    error = toy.error(answer)
    assert (answer.status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert says in error["message"]


def test_l9_a_text_that_is_too_long_is_refused_as_the_api_does(client: Any) -> None:
    for text in ("robot " * 63, "robot " * 200_000):  # counted, and refused before it is
        with pytest.raises(openai.BadRequestError) as told:
            client.embeddings.create(model="toy", input=["a", text])
        assert (told.value.code, told.value.param) == ("context_length_exceeded", "input")
        assert "prompt " not in told.value.message


def test_l9_dimensions_of_a_model_that_is_no_matryoshka_are_refused_by_name(tmp_path: Path) -> None:
    with EmbeddingToy(toy_directory(tmp_path / "model")) as toy:
        error = toy.error(toy.embed("a", dimensions=4))
        assert (error["param"], "is_matryoshka" in error["message"]) == ("dimensions", True)
        assert toy.embed("a", dimensions=8).status == 200


def test_l9_another_model_and_other_apis(toy: EmbeddingToy) -> None:
    answer = toy.embed("a", model="bert")
    assert (answer.status, toy.error(answer)["code"]) == (404, "model_not_found")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        answer = toy.post(path, {})
        assert answer.status == 404
        assert "make vectors of texts" in toy.error(answer)["message"]


def test_l9_what_is_told_of_an_embedding_model(toy: EmbeddingToy) -> None:
    (card,) = toy.get("/v1/models").json["data"]
    assert (card["id"], card["max_model_len"], card["dimensions"]) == ("toy", 64, 8)
    assert toy.get("/v1/models/toy").json == card
    assert toy.get("/v1/models/other").status == 404
    health = toy.get("/health").json
    assert (health["status"], health["runner"], health["waiting"]) == ("ok", "openvino f32 (onnx/model.onnx)", 0)
    assert toy.get("/dashboard").status == 200
    assert toy.get("/docs").status == 200
    assert "/v1/embeddings" in toy.get("/openapi.json").json["paths"]


# -- batches -----------------------------------------------------------------------------------------------------------


def test_l9_what_waits_shares_a_batch_in_calls_of_like_lengths(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [((tokens,), 0.004 + 0.001 * tokens) for tokens in (4, 16, 64)]  # a call costs as much as four tokens
    monkeypatch.setattr(local_models, "measure", lambda model, encoder: taken)
    with EmbeddingToy(root) as toy:
        toy.runner.stop()
        with toy.asking("a", "first") as first:
            toy.runner.wait_inside()
            texts = {"long": "robot " * 62, "short": "a", "brief": "a arm"}
            others = [toy.asking(text, name) for name, text in texts.items()]
            for name in texts:
                toy.ticket(name)
            before = len(toy.runner.sizes)
            toy.runner.go()
            for caller in [first, *others]:
                caller.read_until(b'"usage"')
                caller.sock.close()
        assert sorted(toy.runner.sizes[before:]) == [8, 64]  # the short ones together: with the long one they were 192
        assert sum(toy.log.of(BatchScheduled)[-1].batch.grants.values()) == 64 + 3 + 4
        assert toy.metrics()("reflex_embedding_padding_total") == 1
        assert toy.metrics()("reflex_embedding_calls_total") == 3
        assert toy.metrics()("reflex_prompt_tokens_total") == 74


def test_l9_a_full_queue_takes_all_texts_of_a_request_or_none(root: Path) -> None:
    with EmbeddingToy(root, max_queue=4) as toy:
        assert "--max-queue" in toy.error(toy.embed(["a"] * 5))["message"]
        toy.runner.stop()
        with toy.asking("a", "first") as first:
            toy.runner.wait_inside()
            with toy.asking(["a"] * 3, "three") as three:
                toy.ticket("three#2")
                answer = toy.embed(["a", "b"])
                assert (answer.status, toy.error(answer)["code"]) == (429, "queue_full")
                toy.until(lambda: toy.batcher.scheduler.queued("default") == 3)
                toy.runner.go()
                first.read_until(b'"usage"')
                assert three.read_until(b'"usage"').count(b'"index"') == 3


def test_l9_max_queued_tokens_bounds_the_texts_that_wait(root: Path) -> None:
    with EmbeddingToy(root, max_queued_tokens=20) as toy:
        error = toy.error(toy.embed(["robot " * 10, "robot " * 10]))
        assert "--max-queued-tokens" in error["message"]
        assert toy.embed("robot " * 40).status == 200  # one may have any length


def test_l9_a_caller_that_leaves_takes_its_texts_back(toy: EmbeddingToy) -> None:
    batches = len(toy.log.of(BatchScheduled))
    toy.runner.stop()
    with toy.asking("a", "first") as first:
        toy.runner.wait_inside()
        with toy.asking(["a", "b"], "leaves"):
            toy.ticket("leaves#1")
        for name in ("leaves#0", "leaves#1"):
            assert toy.settled(name).outcome.error.code == "cancelled"
        toy.runner.go()
        first.read_until(b'"usage"')
    assert len(toy.log.of(BatchScheduled)) == batches + 1


class Waiting:
    """A batcher that nothing runs: what is queued waits. most: requests that may."""

    def __init__(self, most: int = 10_000) -> None:
        self.queued: list[Any] = []
        self.most = most
        self.cancelled: list[Any] = []

    def submit(self, request: Any, settled: Any) -> Any:
        if len(self.queued) == self.most:
            raise QueueFull("full")
        self.queued.append(request)
        return request

    def cancel(self, ticket: Any) -> None:
        self.cancelled.append(ticket)


def test_l9_thousands_of_texts_are_queued_in_slices_with_other_work_in_between() -> None:
    async def run() -> list[int]:
        batcher, sizes = Waiting(), [0]
        queueing = asyncio.ensure_future(EmbeddingWait(cast(Any, batcher)).submit(texts_of(2048), 2048))
        while not queueing.done():
            await asyncio.sleep(0)  # a turn of the loop
            sizes.append(len(batcher.queued))
        return sizes

    sizes = asyncio.run(run())
    assert sizes[-1] == 2048
    assert max(later - before for before, later in pairwise(sizes)) <= SLICE


def test_l9_a_queue_that_is_full_in_the_middle_takes_all_texts_back() -> None:
    async def run() -> None:
        batcher = Waiting(most=300)
        with pytest.raises(QueueFull):
            await EmbeddingWait(cast(Any, batcher)).submit(texts_of(2048), 2048)
        assert batcher.cancelled == batcher.queued

    asyncio.run(run())


def test_l9_a_caller_that_leaves_while_its_texts_are_queued_frees_them_all() -> None:
    async def run() -> None:
        batcher = Waiting()
        wait = EmbeddingWait(cast(Any, batcher))
        queueing = asyncio.ensure_future(wait.submit(texts_of(2048), 2048))
        for _ in range(4):
            await asyncio.sleep(0)
        wait.take_back()
        with pytest.raises(Cancelled):
            await queueing
        assert 0 < len(batcher.queued) < 400
        assert batcher.cancelled == batcher.queued

    asyncio.run(run())


def texts_of(count: int) -> Iterator[Any]:
    return (Request([1], id=str(i)) for i in range(count))


def test_l9_deadlines_priorities_and_clients_are_the_schedulers(toy: EmbeddingToy) -> None:
    toy.runner.stop()
    with toy.asking("a", "first") as first:
        toy.runner.wait_inside()
        with toy.asking("b", "late", user="me", priority="urgent", deadline_ms=300) as late:
            assert b" 504 " in late.read_until(b"deadline_exceeded").splitlines()[0]
        toy.runner.go()
        first.read_until(b'"usage"')
    (request,) = [e.ticket.request for e in toy.log.of(RequestQueued) if e.ticket.id == "late"]
    assert (request.client, request.priority.name, request.wants) == ("me", "URGENT", 3.0)


def test_l9_a_deadline_of_an_embedding_counts_from_the_arrival(toy: EmbeddingToy) -> None:
    answer = toy.embed("a", deadline_ms=0.001)
    assert answer.status == 504
    assert "before all of it was queued" in toy.error(answer)["message"]


def test_l9_a_text_that_the_model_fails_on_costs_no_other(
    toy: EmbeddingToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = VOCABULARY.index("x")
    monkeypatch.setattr(toy.runner, "fails", lambda ids: ProcessorError("no x") if (ids == bad).any() else None)
    toy.runner.stop()
    with toy.asking("a", "first") as first:
        toy.runner.wait_inside()
        with (
            toy.asking(["a", "x"], "bad") as wrong,
            toy.asking("b", "good") as good,
        ):
            toy.ticket("bad#1")
            toy.ticket("good")
            toy.runner.go()
            assert b" 500 " in wrong.read_until(b"processor_failed").splitlines()[0]
            assert b'"usage"' in good.read_until(b'"usage"')
        first.read_until(b'"usage"')


def test_l9_a_vector_that_is_not_finite_is_an_error_of_its_own_text(
    toy: EmbeddingToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, bad = toy.runner.encoder.states, VOCABULARY.index("x")

    def broken(ids: Any, mask: Any) -> Any:
        states = plain(ids, mask).copy()
        states[(ids == bad).any(axis=1)] = np.nan
        return states

    monkeypatch.setattr(toy.runner.encoder, "states", broken)
    answer = toy.embed(["x", "a"])
    assert (answer.status, toy.error(answer)["code"]) == (500, "processor_failed")
    assert toy.embed("a").status == 200


def test_l9_the_journal_of_batches_is_read_as_others_are(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "batches.jsonl"
    with EmbeddingToy(root, trace=str(file)) as toy:
        toy.embed(["robot arm", "a"])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (batch,) = [line for line in lines if line["kind"] == "batch"]
    assert [member["units"] for member in batch["members"]] == [4.0, 3.0]
    assert batch["notes"]["calls"] >= 1
