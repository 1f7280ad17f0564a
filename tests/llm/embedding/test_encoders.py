"""L8, embedding models: their vectors are those of sentence-transformers' formula, on both runners, whatever shares a
call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm.embedding.directories import VOCABULARY, formula, write_graph, write_random
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.checkpoint import read_table
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.load import LoadedEncoder, load
from reflex_runtime.llm.embedding.processor import embedded

TEXTS = ["robot", "a robot arm moves", "Robots " * 20, "  x y z ", "the quick brown fox jumps over a lazy dog"]
KINDS = {
    "Bert": {"pooling": ["mean"]},
    "XLMRoberta": {"pooling": ["cls"]},
    "Qwen3": {"pooling": ["last"], "ends_with": "$A [SEP]"},
    "Gemma3Text": {"pooling": ["mean"]},  # as in EmbeddingGemma, tokens see both ways, in some layers through a window
    "ModernBert": {"pooling": ["max", "mean_sqrt_len", "weightedmean"], "normalise": False},
}


def loaded(root: Path, runner: str) -> LoadedEncoder:
    return load(EmbeddingModel.open(root), "cpu", runner, "auto", 1, "")


def vectors(of: LoadedEncoder, texts: list[str]) -> Any:
    ids = [of.tokenizer.encode(text.strip().lower()) for text in texts]
    return embedded(of.model, of.encoder, ids).copy()


@pytest.mark.parametrize("kind", KINDS)
def test_l8_vectors_are_those_of_sentence_transformers_on_both_runners(tmp_path: Path, kind: str) -> None:
    from reflex_runtime.llm.embedding.tracing import convert  # it imports `transformers`: only where this test runs

    path = write_random(tmp_path, kind, **KINDS[kind])
    told = KINDS[kind]
    expected = formula(path, TEXTS, told["pooling"], told.get("normalise", True))
    (path / "openvino").mkdir()
    convert(path, path / "openvino")
    for runner in ("openvino", "torch"):
        found = loaded(path, runner)
        together = vectors(found, TEXTS)
        alone = np.concatenate([vectors(found, [text]) for text in TEXTS])
        lengths = np.linalg.norm(expected, axis=1) * np.linalg.norm(together, axis=1)
        assert ((expected * together).sum(1) / lengths).min() >= 0.9999
        assert np.abs(expected - together).max() < 2e-5, runner
        assert np.abs(alone - together).max() < 2e-5, runner
        assert found.encoder.name.startswith(runner)


def test_l8_layers_behind_the_pooling_are_computed(tmp_path: Path) -> None:
    path = write_random(tmp_path, "Bert", pooling=["mean"], dense=12)
    pooled = formula(path, TEXTS, ["mean"], normalise=False)
    places = read_table(path / "2_Dense" / "model.safetensors")
    layer = {name: place.array(name) for name, place in places.items()}
    expected = np.tanh(pooled @ layer["linear.weight"].T + layer["linear.bias"])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = loaded(path, "torch")
    assert found.model.dimensions == 12
    assert np.abs(vectors(found, TEXTS) - expected).max() < 2e-5


def test_l8_a_model_is_traced_once_by_a_program_of_its_own_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_random(tmp_path / "model", "Bert")
    asked: list[list[str]] = []
    plain = subprocess.Popen

    def counted(command: list[str], **more: Any) -> Any:
        asked.append(command)
        return plain(command, **more)

    monkeypatch.setattr("reflex_runtime.llm.openvino_cache.subprocess.Popen", counted)
    for _ in range(2):
        found = load(EmbeddingModel.open(path), "cpu", "openvino", "auto", 1, str(tmp_path / "kept"))
    assert [command[:3] for command in asked] == [[sys.executable, "-m", "reflex_runtime.llm.embedding.tracing"]]
    assert np.abs(vectors(found, TEXTS) - formula(path, TEXTS, ["mean"])).max() < 2e-5
    assert not (path / ".reflex").exists()
    (probe,) = (tmp_path / "kept").rglob("probe.npy")
    np.save(probe, np.load(probe)[:, ::-1])  # as if the graph gave other states
    with pytest.raises(ConfigError, match=r"differ by .* from those of transformers.*--runner torch"):
        load(EmbeddingModel.open(path), "cpu", "openvino", "auto", 1, str(tmp_path / "kept"))


def test_l8_a_graph_that_is_in_the_directory_is_used_without_its_weights(tmp_path: Path) -> None:
    found = loaded(write_graph(tmp_path), "openvino")
    assert found.encoder.name == "openvino f32 (onnx/model.onnx)"
    (row,) = vectors(found, ["robot"])
    assert np.linalg.norm(row) == pytest.approx(1.0, abs=1e-6)
    assert not (tmp_path / ".reflex").exists()


def test_l8_a_graph_of_another_width_is_refused(tmp_path: Path) -> None:
    path = write_graph(tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 8', '"hidden_size": 16'))
    with pytest.raises(ConfigError, match=r"model.onnx: gives \[2, 12, 8\] .* of width 16"):
        loaded(path, "openvino")
    assert len(VOCABULARY) > 20
