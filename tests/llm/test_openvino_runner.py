"""The CPU runner against `transformers`: the same tokens, and logits within a bound, however the work is cut up.

BOUND is the largest difference between two logits of one row in float32, and also how close the best two may be before
their order counts as undecided. The models' logits spread over about ±5; differences seen are below 2e-5.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import psutil
import pytest

from llm.models import KINDS, Oracle, random_model
from llm.steps import Lane, greedy, prefill, shuffled, step
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.demo import SCRIBE
from reflex_runtime.llm.runners.checkpoint import Checkpoint
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner
from reflex_runtime.llm.runners.openvino_source import GraphCache, run_converter, user_cache
from thinned import thinned

openvino_graph: Any = importlib.import_module("reflex_runtime.llm.runners.openvino_graph")

BOUND = 2e-3
BF16_BOUND = 0.05  # share of the reference's spread (largest logit less smallest) that bfloat16 may be off by
INT8_BOUND = 0.08
BLOCKS = 64

Build = Callable[[str], tuple[Path, Oracle]]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A saved model of a kind and its oracle, made once."""
    made: dict[str, tuple[Path, Oracle]] = {}

    def one(kind: str) -> tuple[Path, Oracle]:
        if kind not in made:
            path = random_model(kind, tmp_path_factory.mktemp(kind))
            made[kind] = path, Oracle(path)
        return made[kind]

    return one


def runner(path: Path, **more: Any) -> OpenVinoRunner:
    return OpenVinoRunner(path, **{"num_blocks": BLOCKS, "threads": 1, **more})


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


def assert_greedy(oracle: Oracle, tokens: list[int], made: list[tuple[int, npt.NDArray[np.float32]]]) -> None:
    """The reference's tokens, up to a place where its best two logits are closer than BOUND."""
    for place, (expected, (token, _)) in enumerate(zip(oracle.greedy(tokens, len(made)), made, strict=True)):
        if token != expected:
            best = np.sort(oracle.logits(tokens + [t for t, _ in made[:place]])[-1])
            assert best[-1] - best[-2] < BOUND, f"token {place}: {token}, expected {expected}"
            return


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(build: Build, kind: str) -> None:
    path, oracle = build(kind)
    lane = Lane(prompt(40))
    (made,) = greedy(runner(path), [lane], 40, shuffled(BLOCKS))
    assert_greedy(oracle, prompt(40), made)


@pytest.mark.parametrize("kind", thinned(KINDS, ["qwen3"]))
def test_logits_do_not_depend_on_the_size_of_chunks(build: Build, kind: str) -> None:
    path, oracle = build(kind)
    model, tokens = runner(path), prompt(90)
    reference = oracle.logits(tokens)
    for chunk in (1, 3, 7, 16, 90):
        lane, free = Lane(tokens), shuffled(BLOCKS, chunk)
        while lane.computed < len(tokens):
            row = model.forward(step([lane], [min(chunk, 90 - lane.computed)], model.block_size, free))
            assert row.shape == (1, 256)
            np.testing.assert_allclose(row[0], reference[lane.computed - 1], atol=BOUND, rtol=0)


@pytest.mark.parametrize("kind", thinned(KINDS, ["qwen3", "mistral"]))
def test_logits_do_not_depend_on_who_shares_the_batch(build: Build, kind: str) -> None:
    path, oracle = build(kind)
    model, rng = runner(path), random.Random(kind)
    prompts = [prompt(length, length) for length in (1, 5, 31, 32, 33, 70)]
    for mix in range(3):
        lanes = [Lane(tokens) for tokens in prompts]
        made = greedy(model, lanes, 12, shuffled(BLOCKS, mix), lambda: rng.choice((1, 2, 9, 40)))
        for tokens, rows in zip(prompts, made, strict=True):
            assert_greedy(oracle, tokens, rows)
            known = oracle.logits(tokens + [token for token, _ in rows])
            for place, (_, row) in enumerate(rows):
                np.testing.assert_allclose(row, known[len(tokens) - 1 + place], atol=BOUND, rtol=0)


@pytest.mark.parametrize("kind", thinned(KINDS, ["qwen3", "mistral"]))
def test_blocks_of_a_common_prefix_can_be_shared(build: Build, kind: str) -> None:
    path, oracle = build(kind)
    model, free = runner(path), shuffled(BLOCKS)
    size = model.block_size
    common = prompt(2 * size)
    first = Lane(common + prompt(9, 2))
    prefill(model, first, 50, free)
    lanes = [first, *(Lane(common + prompt(9, seed), 2 * size, first.blocks[:2]) for seed in (3, 4))]
    given = [list(lane.tokens) for lane in lanes]
    first.computed -= 1  # its last token again, beside the others
    for tokens, rows in zip(given, greedy(model, lanes, 10, free), strict=True):
        assert_greedy(oracle, tokens, rows)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": False, "head_dim": 24}),
        ("llama", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 40}),
        ("mistral", {"sliding_window": 1}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_variants_of_configurations(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    path = random_model(kind, tmp_path, **changes)
    model, tokens = runner(path), prompt(90)
    reference = Oracle(path).logits(tokens)
    lane, free = Lane(tokens), shuffled(BLOCKS)
    for grant in (50, 1, 20, 19):
        row = model.forward(step([lane], [grant], model.block_size, free))[0]
        np.testing.assert_allclose(row, reference[lane.computed - 1], atol=BOUND, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_in_float32_are_exact(tmp_path: Path, dtype: str) -> None:
    path = random_model("llama", tmp_path, dtype=dtype)
    tokens = prompt(60)
    row = prefill(runner(path), Lane(tokens), 16, shuffled(BLOCKS))
    np.testing.assert_allclose(row, Oracle(path).logits(tokens)[-1], atol=BOUND, rtol=0)


def has_bfloat16() -> bool:
    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@pytest.mark.parametrize(
    ("settings", "stored"), [({}, {"bf16"}), ({"weights": "int8"}, {"i8"}), ({"weights": "int4"}, {"i8", "i4"})]
)
def test_l8_matrices_have_as_few_bits_in_memory_as_in_the_file(
    tmp_path: Path, settings: dict[str, Any], stored: set[str]
) -> None:
    """The tied embedding, too: OpenVINO would make a copy in float32 of what it cannot read as it is. Without
    instructions for bfloat16 it may do so where tokens are looked up: that differs between processors."""
    path = random_model("llama", tmp_path, dtype="bfloat16", hidden_size=128, intermediate_size=192)
    compiled = runner(path, **settings)._request.get_compiled_model().get_runtime_model()
    kept = [node for node in compiled.get_ops() if node.get_rt_info()["layerType"].value == "Const"]
    sizes = [(node.get_output_partial_shape(0).to_shape(), node.get_output_element_type(0)) for node in kept]
    looked_up = {"f32"} if not settings and not has_bfloat16() else set()
    assert stored <= {kind.get_type_name() for shape, kind in sizes if np.prod(shape) >= 4096} <= stored | looked_up


@pytest.mark.parametrize(
    ("settings", "bound"),
    [({"dtype": "bfloat16"}, BF16_BOUND), ({"weights": "int8"}, INT8_BOUND)],
)
@pytest.mark.parametrize("kind", thinned(KINDS, ["qwen3", "mistral"]))
def test_lower_precision_is_off_by_a_bounded_share(
    build: Build, kind: str, settings: dict[str, Any], bound: float
) -> None:
    if settings.get("dtype") == "bfloat16" and not has_bfloat16():
        pytest.skip("this processor has no instructions for bfloat16")
    path, oracle = build(kind)
    model, tokens = runner(path, **settings), prompt(70)
    reference = oracle.logits(tokens)
    lane, free = Lane(tokens), shuffled(BLOCKS)
    while lane.computed < len(tokens):
        row = model.forward(step([lane], [7], model.block_size, free))[0]
        expected = reference[lane.computed - 1]
        assert np.abs(row - expected).max() <= bound * (expected.max() - expected.min())


def test_the_graph_is_an_ordinary_stateful_decoder_with_padding(build: Build) -> None:
    """What other tools run: a batch with padding on the left, then one token more each."""
    for kind in KINDS:
        path, oracle = build(kind)
        settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
        checkpoint = Checkpoint.open(path)
        compiled = ov.Core().compile_model(openvino_graph.build(checkpoint), "CPU", settings)
        request = compiled.create_infer_request()
        long, short = prompt(20), prompt(14, 2)
        mask = np.array([[1] * 20, [0] * 6 + [1] * 14])
        positions = np.array([range(20), [0] * 6 + list(range(14))])
        feeds = {"input_ids": np.array([long, [0] * 6 + short]), "attention_mask": mask, "position_ids": positions}
        logits = request.infer({**feeds, "beam_idx": np.array([0, 1], np.int32)})["logits"]
        np.testing.assert_allclose(logits[0], oracle.logits(long), atol=BOUND, rtol=0)
        np.testing.assert_allclose(logits[1, 6:], oracle.logits(short), atol=BOUND, rtol=0)
        more = {"input_ids": np.array([[7], [8]]), "position_ids": np.array([[20], [14]])}
        mask = np.concatenate([mask, np.ones((2, 1), np.int64)], 1)
        logits = request.infer({**more, "attention_mask": mask, "beam_idx": np.array([0, 1], np.int32)})["logits"]
        np.testing.assert_allclose(logits[0, 0], oracle.logits([*long, 7])[-1], atol=BOUND, rtol=0)
        np.testing.assert_allclose(logits[1, 0], oracle.logits([*short, 8])[-1], atol=BOUND, rtol=0)


# -- the cache beside the checkpoint -----------------------------------------------------------------------------------


@pytest.mark.long
def test_steps_of_ever_new_shapes_leave_no_memory() -> None:
    """OpenVINO by itself keeps 5,000 kernels compiled for shapes."""
    model, process = runner(SCRIBE, num_blocks=256), psutil.Process()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "32"  # of the library below it: 1,024 by itself
    seen = []
    for i in range(800):
        shape = i * 389 % 800  # large ones come early
        lanes = [Lane(prompt(1 + shape // 8)) for _ in range(1 + shape % 8)]
        model.forward(step(lanes, [len(lane.tokens) for lane in lanes], model.block_size, list(range(256))))
        seen.append(process.memory_info().rss / 2**20)
    assert seen[-1] - seen[400] < 48.0  # 18 MB, and 123 with all kernels kept


def row_of(path: Path, **more: Any) -> npt.NDArray[np.float32]:
    return prefill(runner(path, **{"weights": "int8", **more}), Lane(prompt(20)), 20, shuffled(BLOCKS))


def not_again(checkpoint: Any) -> Any:
    raise AssertionError("built a second time")


def graphs_in(path: Path) -> list[Path]:
    return [place for place in (path / ".reflex").iterdir() if place.name != ".lock"]


def test_a_checkpoint_in_its_own_precision_is_served_from_its_own_files(tmp_path: Path) -> None:
    row_of(random_model("qwen3", tmp_path), weights="auto")
    assert not (tmp_path / ".reflex").exists()


def test_a_converted_graph_is_kept_used_again_and_replaced_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = random_model("qwen3", tmp_path)
    row = row_of(path)
    (kept,) = graphs_in(path)
    with monkeypatch.context() as patch:
        patch.setattr("reflex_runtime.llm.runners.openvino_graph.build", not_again)
        np.testing.assert_array_equal(row_of(path), row)
    (kept / "openvino_model.xml").write_text("<net")
    np.testing.assert_array_equal(row_of(path), row)
    random_model("qwen3", tmp_path, seed=1)
    assert not np.array_equal(row_of(path), row)
    (newer,) = graphs_in(path)
    assert newer != kept


def test_where_nothing_can_be_kept_each_start_converts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = random_model("qwen2", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path / "config.json"))
    (path / ".reflex").write_text("a file where the directory should be")
    row = row_of(path)
    assert "cannot be kept" in caplog.text
    assert row.shape == (256,)


def test_a_conversion_that_fails_is_tried_once_and_not_blamed_on_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries = count(1)

    def build() -> Any:
        raise RuntimeError(f"no such operation, try {next(tries)}")

    with pytest.raises(RuntimeError, match="try 1"):
        GraphCache(random_model("qwen2", tmp_path)).graph(ov.Core(), "int8", "key", build)
    assert "cannot be kept" not in caplog.text


def test_a_graph_that_a_full_disk_does_not_keep_is_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(ov, "save_model", full)
    built = count(1)
    cache = GraphCache(random_model("qwen2", tmp_path))
    assert cache.graph(ov.Core(), "int8", "key", lambda: f"graph {next(built)}") == "graph 1"
    assert "cannot be kept" in caplog.text


def test_a_graph_of_a_directory_that_cannot_be_written_is_kept_in_the_users_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, users = random_model("qwen2", tmp_path / "model"), tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(users))
    caplog.set_level("INFO")
    row_of(path)
    (kept,) = graphs_in(path)
    assert not users.exists()
    kept.rename(tmp_path / "away")
    (path / ".reflex" / ".lock").unlink()
    (path / ".reflex").rmdir()
    (path / ".reflex").write_text("root may write to any directory, but to no file as if it were one")
    row = row_of(path)
    (folder,) = (users / "reflex").iterdir()
    assert folder.name.startswith("model-")
    assert f"{path}/.reflex: cannot be written; the converted model is kept in {folder}" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr("reflex_runtime.llm.runners.openvino_graph.build", not_again)
        np.testing.assert_array_equal(row_of(path), row)
    assert caplog.text.count("cannot be written") == 1


def test_a_graph_that_came_with_a_directory_that_cannot_be_written_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = random_model("qwen2", tmp_path)
    row = row_of(path)
    monkeypatch.setattr("reflex_runtime.llm.runners.openvino_source._writable", lambda folder: False)
    monkeypatch.setattr("reflex_runtime.llm.runners.openvino_graph.build", not_again)
    np.testing.assert_array_equal(row_of(path), row)


def test_the_graph_of_the_bundled_model_is_kept_in_the_users_cache_and_not_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = GraphCache(SCRIBE).kept("traced", "key", lambda draft: (draft / "a").touch(), lambda place: place)
    assert made is not None
    assert made.parent.parent == tmp_path / "reflex"
    assert not (SCRIBE / ".reflex" / made.name).exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_cache() == tmp_path / "home" / ".cache" / "reflex"


def test_a_graph_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = random_model("llama", tmp_path)

    def full_disk(model: Any, file: Path, **settings: Any) -> None:
        file.write_text("<net")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ov, "save_model", full_disk)
        row = row_of(path)
    assert graphs_in(path) == []
    moved: list[tuple[bool, list[str]]] = []
    rename = Path.rename

    def watched(draft: Path, place: Path) -> Path:
        moved.append((place.exists(), sorted(file.name for file in draft.iterdir())))
        return rename(draft, place)

    monkeypatch.setattr(Path, "rename", watched)
    np.testing.assert_array_equal(row_of(path), row)
    assert moved == [(False, ["openvino_model.bin", "openvino_model.xml"])]


def test_weights_that_changed_without_their_size_and_time_are_not_mistaken(tmp_path: Path) -> None:
    path = random_model("llama", tmp_path)
    row, (file,) = row_of(path), path.glob("*.safetensors")
    before = file.stat()
    random_model("llama", tmp_path, seed=1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert not np.array_equal(row_of(path), row)


def test_a_graph_that_was_rounded_otherwise_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = random_model("llama", tmp_path)
    row_of(path, weights="int8")
    (kept,) = graphs_in(path)
    monkeypatch.setattr("reflex_runtime.llm.runners.openvino_graph.VERSION", 0)
    row_of(path, weights="int8")
    (newer,) = graphs_in(path)
    assert newer != kept


def test_what_a_killed_conversion_left_is_removed_and_others_may_read_what_is_kept(tmp_path: Path) -> None:
    path = random_model("llama", tmp_path)
    left = path / ".reflex" / "draft-old"
    left.mkdir(parents=True, mode=0o700)
    (left / "openvino_model.bin").write_bytes(b"half")
    (path / ".reflex").chmod(0o755)
    row_of(path)
    (kept,) = graphs_in(path)
    assert kept.name.startswith("openvino-int8-")
    assert kept.stat().st_mode & 0o777 == 0o755


def test_where_nothing_can_be_locked_a_graph_is_kept_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: Any, operation: int) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr("reflex_runtime.llm.runners.openvino_source.fcntl.flock", no_locks)
    path = random_model("llama", tmp_path)
    row_of(path)
    assert len(graphs_in(path)) == 1


def test_a_conversion_that_is_killed_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print('a warning', flush=True); os.kill(os.getpid(), 9)"]
    with pytest.raises(ConfigError, match=r"ended by signal 9, most often for lack of memory.*--runner torch"):
        GraphCache(tmp_path).kept("traced", "key", lambda draft: run_converter(command), lambda place: place)
    assert graphs_in(tmp_path) == []


def test_several_may_convert_at_once(tmp_path: Path) -> None:
    path = random_model("llama", tmp_path)
    rows: list[npt.NDArray[np.float32]] = []
    threads = [threading.Thread(target=lambda: rows.append(row_of(path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows) == 4
    assert all(np.array_equal(row, rows[0]) for row in rows)
    assert len(graphs_in(path)) == 1


# -- limits and faults -------------------------------------------------------------------------------------------------


def test_sizes_come_from_the_checkpoint_the_graph_and_the_memory(build: Build) -> None:
    path, _ = build("llama")
    model = runner(path)
    assert (model.vocab_size, model.num_blocks, model.max_model_len, model.name) == (256, 64, 512, "openvino f32")
    block = 2 * 2 * 2 * 16 * 4 * model.block_size  # layers, keys and values, heads, head_dim, bytes
    sized = OpenVinoRunner(path, kv_cache_bytes=10 * block + 1, max_model_len=100, dtype="auto", threads=1)
    assert (sized.num_blocks, sized.max_model_len, sized.name) == (10, 100, "openvino f32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks=0: must be in [1, "),
        ({"max_model_len": 513}, "max_model_len=513: must be at most 512"),
        ({"num_blocks": 10**12}, "GiB are free, and a block takes "),
        ({"num_blocks": None, "kv_cache_bytes": 10}, "kv_cache_bytes=10: must be in ["),
    ],
)
def test_wrong_settings_are_refused(build: Build, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        runner(build("llama")[0], **settings)
    assert message in caught.value.message


def test_a_broken_checkpoint_is_refused_by_file(tmp_path: Path) -> None:
    path = random_model("llama", tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors: is truncated"):
        runner(path)


def test_a_window_that_paging_lost_is_refused(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = openvino_graph.causal_mask
    monkeypatch.setattr(openvino_graph, "causal_mask", lambda mask, tokens, window: plain(mask, tokens, None))
    with pytest.raises(ConfigError, match="2 paged layers of 2, 0 with windows; use another version, or the torch"):
        runner(build("mistral")[0], cache_dir=tmp_path)


def test_a_step_that_would_reach_outside_is_refused_and_harms_nothing(build: Build) -> None:
    path, oracle = build("llama")
    model, free = runner(path), shuffled(BLOCKS)
    lane = Lane(prompt(40))
    prefill(model, lane, 40, free)
    for wrong, message in [
        (Lane([1, 2], blocks=[BLOCKS]), f"block {BLOCKS}: not in the pool"),
        (Lane([1, 2], blocks=[-1]), "block -1: not in the pool"),
        (Lane([1, 256], blocks=[free[-1]]), "token id outside 0 to 255"),
        (Lane([1, -1], blocks=[free[-1]]), "token id outside 0 to 255"),
    ]:
        with pytest.raises(ProcessorError, match=message):
            model.forward(step([wrong], [2], model.block_size, []))
    short = step([Lane([1] * 40, blocks=[0, 1])], [40], model.block_size, [])
    short.block_begins[1] = 1
    with pytest.raises(ProcessorError, match="does not cover its tokens"):
        model.forward(short)
    lane.tokens.append(9)
    (made,) = greedy(model, [lane], 4, free)
    assert_greedy(oracle, [*prompt(40), 9], made)
    model.close()
    with pytest.raises(ProcessorError, match="closed"):
        model.forward(short)
