"""A decoder exported to OpenVINO is served as it is, batched as a checkpoint is, or refused in one line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops

from llm.gpt2 import POSITIONS, exported
from llm.models import Oracle, random_model
from llm.steps import Lane, greedy, shuffled
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.engine.load import check, choose, describe
from reflex_runtime.llm.runners.checkpoint import Checkpoint
from reflex_runtime.llm.runners.openvino_graph import build
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner, unpaged
from reflex_runtime.llm.runners.openvino_source import OpenVinoExport, is_export

BOUND = 2e-3  # as in test_openvino_runner
BLOCKS = 64


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    directory = tmp_path_factory.mktemp("exports") / "gpt2"
    return directory, exported(directory)


def runner(path: Path, **more: Any) -> OpenVinoRunner:
    return OpenVinoRunner(path, **{"num_blocks": BLOCKS, "threads": 1, **more})


def refused(path: Path, **more: Any) -> str:
    """What is said of an export that cannot be loaded: one line."""
    with pytest.raises(ConfigError) as caught:
        runner(path, **more)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_another_architecture_gives_the_tokens_of_transformers_in_mixed_batches(gpt2: tuple[Path, Oracle]) -> None:
    path, oracle = gpt2
    model, rng = runner(path), random.Random(1)
    assert (model.vocab_size, model.max_model_len, model.block_size) == (256, POSITIONS, 32)
    prompts = [[rng.randrange(3, 256) for _ in range(length)] for length in (1, 5, 31, 33, 70)]
    lanes = [Lane(tokens) for tokens in prompts]
    made = greedy(model, lanes, 12, shuffled(BLOCKS), lambda: rng.choice((1, 2, 9, 40)))
    for tokens, rows in zip(prompts, made, strict=True):
        assert [token for token, _ in rows] == oracle.greedy(tokens, 12)
        known = oracle.logits(tokens + [token for token, _ in rows])
        for place, (_, row) in enumerate(rows):
            np.testing.assert_allclose(row, known[len(tokens) - 1 + place], atol=BOUND, rtol=0)


def test_what_paged_attention_would_lose_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    exported(tmp_path / "slopes", slopes=True)
    assert "change by" in refused(tmp_path / "slopes")


def test_what_an_export_gives_before_paging_is_computed_once_and_kept(
    gpt2: tuple[Path, Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles the graph once more: a third of a start. What is kept is still what paging is compared with."""
    path = shutil.copytree(gpt2[0], tmp_path / "export", ignore=shutil.ignore_patterns(".reflex"))
    computed: list[Any] = []

    def counted(*given: Any) -> Any:
        computed.append(given)
        return unpaged(*given)

    monkeypatch.setattr("reflex_runtime.llm.runners.openvino_runner.unpaged", counted)
    for expected in (1, 1):
        runner(path)
        assert len(computed) == expected
    (kept,) = (path / ".reflex").rglob("probe.npy")
    np.save(kept, np.load(kept)[::-1])
    assert "change by" in refused(path)
    kept.write_bytes(b"half")
    runner(path)
    assert len(computed) == 2
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    runner(path)
    assert len(computed) == 3  # of another model
    assert len(list((path / ".reflex").rglob("probe.npy"))) == 1


def test_logits_may_be_bounded_behind_the_last_product(gpt2: tuple[Path, Oracle], tmp_path: Path) -> None:
    """As in Gemma: a division, a tanh and a multiplication follow, and rows are picked before the matrix."""

    def bounded(model: Any) -> None:
        result = model.output("logits").get_node()
        capped = ops.multiply(ops.tanh(ops.divide(result.input_value(0), np.float32(8))), np.float32(8))
        result.input_value(0).get_tensor().set_names(set())
        result.input(0).replace_source_output(capped.output(0))
        capped.output(0).set_names({"logits"})

    path, oracle = gpt2
    lane = Lane([5, 6, 7, 8])
    (rows,) = greedy(runner(_changed(path, tmp_path / "capped", bounded)), [lane], 5, shuffled(BLOCKS))
    known = 8 * np.tanh(oracle.logits(lane.tokens)[3:8] / 8)
    np.testing.assert_allclose([row for _, row in rows], known, atol=BOUND, rtol=0)


def _changed(path: Path, target: Path, change: Callable[[Any], None]) -> Path:
    """A copy of an export whose graph is another."""
    model = ov.Core().read_model(path / "openvino_model.xml")
    change(model)
    model.validate_nodes_and_infer_types()
    target.mkdir()
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    shutil.copy(path / "config.json", target)
    return target


def test_what_is_no_decoder_with_keys_and_values_is_refused(gpt2: tuple[Path, Oracle], tmp_path: Path) -> None:
    path, _ = gpt2
    ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    table = np.zeros((256, 256), np.float32)

    def saved(name: str, inputs: list[Any], sinks: list[Any], result: Any) -> Path:
        (tmp_path / name).mkdir()
        result.output(0).set_names({"logits"})
        model = ov.Model([ops.result(result)], sinks, inputs, name)
        ov.save_model(model, tmp_path / name / "openvino_model.xml")
        shutil.copy(path / "config.json", tmp_path / name)
        return tmp_path / name

    assert "has no state" in refused(saved("stateless", [ids], [], ops.gather(table, ids, 0)))
    pixels = ops.parameter([-1, 256], ov.Type.f32, name="pixel_values")
    pixels.output(0).set_names({"pixel_values"})
    assert "computes input_ids, pixel_values to logits" in refused(
        saved("sees", [ids, pixels], [], ops.add(ops.gather(table, ids, 0), pixels))
    )
    recurrent = ops.read_value(np.zeros((1, 256), np.float32), "recurrent")
    mixed = ops.add(ops.gather(table, ids, 0), recurrent)
    sinks = [ops.assign(ops.reduce_mean(mixed, [0], False), "recurrent")]
    assert "keeps other state" in refused(saved("recurrent", [ids], sinks, mixed))
    shutil.copytree(path, tmp_path / "broken")
    (tmp_path / "broken" / "openvino_model.xml").write_text("<net>")
    assert "openvino_model.xml: cannot be read" in refused(tmp_path / "broken")
    shutil.copytree(path, tmp_path / "short")
    (tmp_path / "short" / "openvino_model.bin").write_bytes(b"")
    assert "openvino_model" in refused(tmp_path / "short")


def test_numbers_that_the_graph_does_not_tell_are_in_the_description(gpt2: tuple[Path, Oracle], tmp_path: Path) -> None:
    path = shutil.copytree(gpt2[0], tmp_path / "export")

    def described(**config: Any) -> OpenVinoExport:
        (path / "config.json").write_text(json.dumps(config))
        return OpenVinoExport.open(path)

    with pytest.raises(ConfigError, match=r"config.json: has no number under max_position_embeddings or n_positions"):
        described()
    assert described(max_seq_len=77).max_position_embeddings == 77
    assert described(text_config={"n_positions": 78}).max_position_embeddings == 78
    grows = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert described(n_positions=512, rope_scaling=grows).max_position_embeddings == 64  # beyond it, neighbours change
    assert described(n_positions=512, rope_scaling={"type": "linear"}).max_position_embeddings == 512
    assert described(n_positions=9, sliding_window=4).windows == (4, None)
    assert described(n_positions=9, sliding_window=4, layer_types=["sliding_attention"] * 2).windows == (4, 4)
    assert described(n_positions=9, sliding_window=4, use_sliding_window=False).windows == (None, None)
    found = described(n_positions=9, dtype="bfloat16")
    assert (found.torch_dtype, found.vocab_size, found.cache_bytes(3, 2)) == ("bfloat16", 256, 3 * 2 * 2 * 2 * 64)


def test_a_window_that_the_graph_lost_limits_the_length(gpt2: tuple[Path, Oracle], tmp_path: Path) -> None:
    path = shutil.copytree(gpt2[0], tmp_path / "export")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 100}))
    assert "0 with windows" in (told := refused(path))
    assert "max_model_len of 100" in told
    assert runner(path, max_model_len=100).max_model_len == 100  # no token sees less without the window


def test_a_checkpoint_beside_an_export_is_what_is_served(tmp_path: Path) -> None:
    path = random_model("llama", tmp_path / "llama")
    checkpoint = Checkpoint.open(path)
    ov.save_model(build(checkpoint), path / "openvino_model.xml", compress_to_fp16=False)
    assert not is_export(path)
    (path / "model.safetensors").unlink()
    assert is_export(path)
    found = describe(path)
    assert isinstance(found, OpenVinoExport)
    config = checkpoint.config
    assert found.cache_bytes(7, 2) == config.cache_bytes(7, 2)
    assert (found.vocab_size, found.max_position_embeddings) == (config.vocab_size, config.max_position_embeddings)


@pytest.mark.parametrize(("field", "value"), [("device", "cuda"), ("runner", "torch")])
def test_options_that_need_a_checkpoint_are_refused_by_name(
    gpt2: tuple[Path, Oracle], field: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"{field}='{value}'.*an export to OpenVINO"):
        check(describe(gpt2[0]), **{field: value})
    monkeypatch.setattr("reflex_runtime.llm.engine.load._sees_cuda", lambda: True)
    assert choose("auto", "auto", export=True) == ("cpu", "openvino")
