"""L8, directories of embedding models: what they say is read, and what is not served is refused by the file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm.embedding.directories import write_graph, write_json
from reflex_runtime.cli.serving import names_embedding, names_model
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.embedding.directory import EmbeddingModel, is_embedding


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("embedding") / "model")


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    """A copy whose descriptions a test may change."""
    for file in whole.rglob("*.json"):
        copy = tmp_path / file.relative_to(whole)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return tmp_path


def changed(file: Path, **values: Any) -> None:
    write_json(file, json.loads(file.read_text()) | values)


def test_l8_what_a_directory_says(root: Path) -> None:
    model = EmbeddingModel.open(root)
    assert (model.pooling, model.normalise, model.dimensions, model.width) == (("mean",), True, 8, 8)
    assert (model.max_model_len, model.positions, model.lower, model.pad_id) == (64, 512, True, 0)
    assert model.matryoshka is None
    changed(root / "tokenizer_config.json", model_max_length=40)
    changed(root / "config.json", matryoshka_dimensions=[4, 2])
    write_json(root / "config_sentence_transformers.json", {"default_prompt_name": "q", "prompts": {"q": "query: "}})
    changed(root / "1_Pooling" / "config.json", pooling_mode_cls_token=True)
    model = EmbeddingModel.open(root)
    assert (model.max_model_len, model.matryoshka, model.prompt) == (40, (2, 4), "query: ")
    assert (model.pooling, model.dimensions) == (("cls", "mean"), 16)
    assert EmbeddingModel.open(root, "last").pooling == ("last",)


def test_l8_places_of_roberta_begin_behind_that_of_padding(root: Path) -> None:
    changed(root / "config.json", model_type="xlm-roberta", pad_token_id=1, max_position_embeddings=60)
    assert EmbeddingModel.open(root).max_model_len == 58


def test_l8_a_long_text_is_bounded_by_the_memory_of_its_attention(root: Path) -> None:
    (root / "sentence_bert_config.json").unlink()
    changed(root / "config.json", max_position_embeddings=40_000, num_attention_heads=16)
    model = EmbeddingModel.open(root)
    assert (model.positions, model.max_model_len, model.pairs) == (40_000, 4096, 1 << 24)


def test_l8_newer_files_name_the_pooling_as_a_word(root: Path) -> None:
    write_json(root / "1_Pooling" / "config.json", {"pooling_mode": "lasttoken"})
    assert EmbeddingModel.open(root).pooling == ("last",)


def test_l8_a_bare_encoder_has_the_mean_at_length_one(root: Path) -> None:
    (root / "modules.json").unlink()
    assert is_embedding(root)
    model = EmbeddingModel.open(root)
    assert (model.pooling, model.normalise) == (("mean",), True)
    assert EmbeddingModel.open(root, "cls").pooling == ("cls",)


@pytest.mark.parametrize(
    ("config", "embeds"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, True),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, False),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, False),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, False),
        ({"model_type": "bert", "architectures": 5}, True),
        ({"model_type": ["bert"], "architectures": [5]}, False),
    ],
)
def test_l8_which_server_a_directory_gets(tmp_path: Path, config: Any, embeds: bool) -> None:
    write_json(tmp_path / "config.json", config)
    assert is_embedding(tmp_path) == embeds
    assert names_embedding([str(tmp_path)]) == embeds
    assert names_model([str(tmp_path)])
    write_json(tmp_path / "reflex_config.json", {})
    assert not names_embedding([str(tmp_path)])


def test_l8_a_decoder_with_modules_is_an_embedding_model(root: Path) -> None:
    changed(root / "config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    assert is_embedding(root)


@pytest.mark.parametrize(
    ("file", "values", "says"),
    [
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling ''"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "pooling 'attention'"),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, "pooling \"['mean']\""),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length"),
        ("config.json", {"hidden_size": None}, "hidden_size"),
        ("config.json", {"model_type": 3}, "model_type"),
        ("config.json", {"matryoshka_dimensions": []}, "matryoshka_dimensions"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "default_prompt_name"),
        ("config_sentence_transformers.json", {"default_prompt_name": ["q"]}, "default_prompt_name"),
    ],
)
def test_l8_what_is_wrong_names_its_file(root: Path, file: str, values: Any, says: str) -> None:
    if not (root / file).exists():
        write_json(root / file, {})
    changed(root / file, **values)
    with pytest.raises(ConfigError) as told:
        EmbeddingModel.open(root)
    assert str(root / file) in told.value.message
    assert says in told.value.message


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ([("CLIPModel", "")], "must be a Transformer"),
        ([("Transformer", "")], "no module Pooling"),
        ([("Transformer", ""), ("Pooling", "1_Pooling"), ("WordWeights", "2")], "WordWeights, which is not served"),
        ([("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", ""), ("Dense", "2_Dense")], "no other order"),
        ([("Transformer", ""), ("Dense", "2_Dense"), ("Pooling", "1_Pooling")], "no other order is served"),
        ([("Transformer", ""), ("Pooling", "1_Pooling"), ("Pooling", "1_Pooling")], "no other order is served"),
        ([("Transformer", "../other"), ("Pooling", "1_Pooling")], "below this directory"),
        ("no list", "below this directory"),
    ],
)
def test_l8_modules_that_are_not_served_are_named(root: Path, modules: Any, says: str) -> None:
    listed = [{"type": f"st.{kind}", "path": path} for kind, path in modules] if modules != "no list" else {}
    write_json(root / "modules.json", listed)
    with pytest.raises(ConfigError, match=says):
        EmbeddingModel.open(root)


def test_l8_a_layer_on_tokens_is_refused(root: Path) -> None:
    listed = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
    write_json(root / "modules.json", [{"type": f"st.{kind}", "path": path} for kind, path in listed])
    write_json(root / "2_Dense/config.json", {"module_input_name": "token_embeddings"})
    with pytest.raises(ConfigError, match="module_input_name='token_embeddings': a layer on tokens is not served"):
        EmbeddingModel.open(root)


def test_l8_a_reranker_is_told_apart(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "bert", "architectures": ["BertForSequenceClassification"]})
    assert is_embedding(tmp_path)
    with pytest.raises(ConfigError, match="a classifier or reranker"):
        EmbeddingModel.open(tmp_path)
