"""The bundled language model is an ordinary checkpoint: small, the same to `transformers` and to us, and readable."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.cli.serving import kind_of
from reflex_runtime.demo import SCRIBE, model_directory
from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.llm.engine.tokenizer import Conversation, HFTokenizer
from reflex_runtime.llm.runners.torch_runner import TorchRunner

LIMIT = 3_500_000  # bytes of the whole directory
STORY = [{"role": "user", "content": "Tell me a story about a robot called Ada who lost a red key."}]
CHATS = [
    STORY,
    [{"role": "system", "content": "You are Scribe."}, {"role": "user", "content": "  What is a batch?"}],
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "What comes after June?"},
    ],
]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    engine = LLMEngine(TorchRunner(SCRIBE, num_blocks=128, threads=1), HFTokenizer.load(SCRIBE))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def library() -> Any:
    """`transformers`; what it says about itself while importing is no warning of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    return transformers


def test_it_is_small_and_says_where_it_comes_from() -> None:
    assert sum(file.stat().st_size for file in SCRIBE.iterdir()) < LIMIT
    assert "Apache-2.0" in (SCRIBE / "README.md").read_text()


@pytest.mark.long
def test_transformers_reads_it_and_writes_the_same(engine: LLMEngine, library: Any) -> None:
    import torch

    reference = library.AutoModelForCausalLM.from_pretrained(SCRIBE, dtype=torch.float32).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(SCRIBE)
    assert tokenizer.vocab_size == reference.config.vocab_size == engine.processor.tokenizer.vocab_size
    prompts = [engine.processor.tokenizer.chat(Conversation(chat)) for chat in CHATS]
    prompts.append(tokenizer("A scheduler")["input_ids"])
    for chat, ids in zip(CHATS, prompts, strict=False):
        assert tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == ids
    outputs = engine.generate(prompts, SamplingParams.greedy(32, ignore_eos=True))
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            given = torch.tensor([ids])
            said = reference.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=32,
                min_new_tokens=32,
                do_sample=False,
                eos_token_id=None,
            )
        assert list(output.token_ids) == said[0, len(ids) :].tolist()
        assert output.text == tokenizer.decode(list(output.token_ids), skip_special_tokens=True)


def test_it_answers_and_ends(engine: LLMEngine) -> None:
    tokenizer = engine.processor.tokenizer
    prompts = [tokenizer.chat(Conversation(chat)) for chat in CHATS]
    story, word, month = engine.generate(prompts, SamplingParams.greedy(300))
    assert [output.finish_reason for output in (story, word, month)] == ["stop"] * 3
    assert story.text.count("Ada") >= 3
    assert word.text == "Batch: tickets that run together, and the units granted to each."
    assert month.text == "After June comes July."


def test_what_is_drawn_at_random_can_be_read_too(engine: LLMEngine) -> None:
    prompts = [engine.processor.tokenizer.chat(Conversation(STORY))] * 8
    params = [SamplingParams(max_tokens=300, temperature=0.7, seed=seed) for seed in range(8)]
    told = engine.generate(prompts, params)
    assert {output.finish_reason for output in told} == {"stop"}
    assert len({output.text for output in told}) == 8
    assert all(output.text.endswith((".", "?", '"')) and " the " in output.text for output in told)


def test_scribe_names_the_bundled_model_unless_a_directory_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_directory("scribe") == SCRIBE
    assert model_directory("other") == Path("other")
    assert kind_of(["scribe", "--port", "0"]) == "model"
    (tmp_path / "scribe").mkdir()
    assert model_directory("scribe") == Path("scribe")
    assert kind_of(["scribe"]) != "model"
