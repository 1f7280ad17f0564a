"""Checkpoints of any architecture of `transformers`: the same greedy tokens, chunked, cached and preempted.

PyTorch runs them all here. The conversion to OpenVINO takes a second or more for each, so those in CONVERTED are a
choice: windows and two kinds of positions, one matrix for queries, keys and values, experts, learned positions.
`python tools/architectures.py` converts them all and writes the table of docs/language-models.md.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm.models import ANY, SIZES, Oracle, random_checkpoint, random_model
from llm.steps import Lane, greedy, shuffled
from reflex_runtime.cli.serving import kind_of
from reflex_runtime.core.batch import RequestPreempted
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import SamplingParams
from reflex_runtime.llm.engine.llm_engine import LLMEngine
from reflex_runtime.llm.engine.load import check, describe
from reflex_runtime.llm.engine.toy import ByteTokenizer
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner
from reflex_runtime.llm.runners.runner import Runner
from reflex_runtime.llm.runners.torch_runner import TorchRunner
from thinned import thinned

SERVED = [kind for kind in ANY if kind != "Mamba"]
CONVERTED = ["Gemma3", "Phi3", "Mixtral", "GPT2"]
OFTEN = ("Gemma3", "GPT2", "Mixtral")  # windows, learned positions, experts; the others are in `make test-long`
Made = Callable[[str], tuple[Path, Oracle]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    found: dict[str, tuple[Path, Oracle]] = {}

    def one(kind: str) -> tuple[Path, Oracle]:
        if kind not in found:
            path = random_checkpoint(kind, tmp_path_factory.mktemp(kind))
            found[kind] = path, Oracle(path)
        return found[kind]

    return one


@pytest.fixture(scope="module")
def tracing() -> Any:
    """The converter, which imports `transformers`: only where these tests run."""
    return import_module("reflex_runtime.llm.runners.openvino_tracing")


def prompts() -> list[list[int]]:
    """Four, of which three begin alike for two blocks of 32."""
    rng = random.Random(1)
    common = [rng.randrange(3, 256) for _ in range(64)]
    return [[7, 8, 9]] + [common + [rng.randrange(3, 256) for _ in range(length)] for length in (1, 9, 30)]


def run(runner: Runner) -> tuple[list[list[int]], int]:
    """The tokens of four prompts together, in chunks, over blocks that do not suffice; how often one was preempted."""
    preempted: list[Any] = []
    engine = LLMEngine(
        runner, ByteTokenizer(), max_num_batched_tokens=24, enable_prefix_caching=True,
        sinks=[lambda event: preempted.append(event) if isinstance(event, RequestPreempted) else None],
    )  # fmt: skip
    outputs = engine.generate(prompts(), SamplingParams.greedy(16, ignore_eos=True))
    return [list(output.token_ids) for output in outputs], len(preempted)


@pytest.mark.parametrize("kind", thinned(SERVED, OFTEN))
def test_l8_any_architecture_on_pytorch_gives_the_tokens_of_transformers(made: Made, kind: str) -> None:
    path, oracle = made(kind)
    tokens, preempted = run(TorchRunner(path, num_blocks=9, block_size=16))
    assert tokens == [oracle.greedy(prompt, 16) for prompt in prompts()]
    assert preempted


@pytest.mark.parametrize("kind", thinned(CONVERTED, ["Gemma3"]))
def test_l8_a_converted_architecture_gives_the_tokens_of_transformers(
    made: Made, tracing: Any, tmp_path: Path, kind: str
) -> None:
    path, oracle = made(kind)
    tracing.convert(path, tmp_path)
    tokens, preempted = run(OpenVinoRunner(tmp_path, num_blocks=5, threads=1))
    assert tokens == [oracle.greedy(prompt, 16) for prompt in prompts()]
    assert preempted
    if kind == "Gemma3":
        assert json.loads((tmp_path / "traced.json").read_text()) == {"windows": [11, None]}
        expected = np.load(tmp_path / "probe.npy")
        np.save(tmp_path / "probe.npy", expected[::-1])  # what paging must reproduce is not what the graph says
        with pytest.raises(ConfigError, match=r"change by .* with paged attention"):
            OpenVinoRunner(tmp_path, num_blocks=5, threads=1)


@pytest.mark.long  # another Python imports PyTorch and transformers
def test_l8_a_checkpoint_is_converted_once_by_a_program_of_its_own_and_kept(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, oracle = made("GPT2")
    asked: list[list[str]] = []
    plain = subprocess.Popen

    def counted(command: list[str], **more: Any) -> Any:
        asked.append(command)
        return plain(command, **more)

    monkeypatch.setattr("reflex_runtime.llm.runners.openvino_source.subprocess.Popen", counted)
    for _ in range(2):
        runner = OpenVinoRunner(path, num_blocks=5, threads=1, cache_dir=tmp_path)
    assert [command[:3] for command in asked] == [[sys.executable, "-m", "reflex_runtime.llm.runners.openvino_tracing"]]
    assert not (path / ".reflex").exists()
    (made_of,) = tmp_path.iterdir()
    assert made_of.name.startswith(f"{path.name}-")
    (rows,) = greedy(runner, [Lane([5, 6, 7])], 4, shuffled(5))
    assert [token for token, _ in rows] == oracle.greedy([5, 6, 7], 4)


def test_l8_what_cannot_be_served_is_refused_and_what_can_is_named(
    made: Made, tracing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"bounds its attention scores at 3, .* serve it with --runner torch"):
        tracing.convert(made("Gemma2")[0], tmp_path)
    with pytest.raises(ConfigError, match=r"model_type='mamba': keeps other state than keys and values"):
        TorchRunner(random_checkpoint("Mamba", tmp_path / "mamba"))
    monkeypatch.setattr("sys.argv", ["openvino_tracing", str(tmp_path / "mamba"), str(tmp_path)])
    assert tracing.main() == 1
    assert "other state than keys and values" in capsys.readouterr().out.splitlines()[-1]
    path = shutil.copytree(made("GPT2")[0], tmp_path / "gpt2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "vit"}))
    with pytest.raises(ConfigError, match="model_type='vit'"):
        describe(path)
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match="quantization_config: rounded weights are not read; serve "):
        describe(path)


def test_l8_what_nobody_serves_is_refused_before_anything_is_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    monkeypatch.setattr("reflex_runtime.llm.runners.checkpoint.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="other state than keys and values, which is not served"):
        describe(tmp_path)


def test_l8_another_architecture_without_pytorch_is_told_what_to_install(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = made("Gemma3")
    found = describe(path)
    assert (found.vocab_size, found.max_position_embeddings, found.cache_bytes(3, 4)) == (256, 512, 3 * 2 * 2 * 32 * 4)
    check(found, device="cpu", max_model_len=512)
    monkeypatch.setattr("reflex_runtime.llm.runners.checkpoint.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Gemma3ForCausalLM.*pip install '.\[convert\]'; or serve"):
        describe(path)


def test_l8_what_is_no_model_is_told_apart(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            describe(path)
        return caught.value.message

    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "llama.cpp's format" in refusal(tmp_path / "model.gguf")
    assert "llama.cpp's format" in refusal(tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    assert "is an adapter (PEFT) of 'a/b', not a model" in refusal(adapter)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"models--a--b: is a cache of Hugging Face; name {snapshot}$"):
        kind_of([str(tmp_path / "models--a--b")])
    for word in (tmp_path / "model.gguf", tmp_path, adapter):  # reflex serve asks the language models about it
        assert kind_of([str(word)]) == "model"
    assert kind_of([str(tmp_path / "none")]) != "model"


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_l8_rounded_weights_are_near_and_take_less_room(tmp_path: Path, weights: str) -> None:
    path = random_model("llama", tmp_path, hidden_size=128, intermediate_size=192)
    tokens = prompts()[2]
    (rows,) = greedy(OpenVinoRunner(path, num_blocks=5, threads=1, weights=weights), [Lane(tokens)], 1, shuffled(5))
    expected = Oracle(path).logits(tokens)[-1]
    off = np.abs(rows[0][1] - expected).max() / np.ptp(expected)
    assert (1e-4 < off < 0.1) if weights == "int8" else (0.03 < off < 0.6)
    (graph,) = (path / ".reflex").glob(f"openvino-{weights}-*")
    size, plain = (graph / "openvino_model.bin").stat().st_size, (path / "model.safetensors").stat().st_size
    assert 0.2 < size / plain < 0.35 if weights == "int8" else size / plain < 0.25


def test_l8_the_page_names_every_architecture_that_is_tried() -> None:
    page = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()
    rows = [line.split(" |")[0].removeprefix("| ") for line in page.splitlines() if line.endswith("| equal |")]
    assert sorted(kind for row in rows for kind in row.split(", ")) == sorted(SERVED)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"vocab_size": "x"}, r"Validation error for field 'vocab_size': TypeError: .* expected int, got str"),
        ({"dtype": "x"}, "module 'torch' has no attribute 'x'"),
        ({"n_head": 0}, "num_attention_heads=0: must be a whole number from 1 on"),
        ({"n_layer": -1}, "num_hidden_layers=-1: must be a whole number from 1 on"),
    ],
)
def test_l8_a_description_that_transformers_does_not_take_is_refused_in_a_line(
    made: Made, tmp_path: Path, wrong: dict[str, Any], told: str
) -> None:
    path = shutil.copytree(made("GPT2")[0], tmp_path / "gpt2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(ConfigError, match=rf"config\.json: {told}"):
        describe(path)


def test_l8_blocks_are_counted_by_what_the_layers_keep(made: Made) -> None:
    """The description of this one names heads that its layers do not have."""
    path, _ = made("GPT2")
    block = 2 * 2 * 4 * 16 * 16 * 4  # keys and values, layers, heads, head_dim, tokens, bytes
    assert describe(path).cache_bytes(16, 4) < block
    assert TorchRunner(path, block_size=16, kv_cache_bytes=7 * block, dtype="float32").num_blocks == 7


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("GemmaForSequenceClassification", r"tensor model\.layers\.1\.mlp\.up_proj\.weight: not found, and 0 more"),
        ("MistralModel", r"config\.json: architectures=\['MistralModel'\]: has no head that generates text"),
        ("BertForMaskedLM", r"config\.json: model_type='bert' without is_decoder=true is an encoder"),
        ("BertLMHeadModel", r"config\.json: model_type='bert' without is_decoder=true is an encoder"),
        ("GptOssForCausalLM", r": tensor model\.layers\.0\.self_attn\.sinks: attention with sinks"),
    ],
)
def test_l8_weights_that_are_not_a_decoders_are_refused_not_drawn_by_chance(
    tmp_path: Path, kind: str, told: str
) -> None:
    import transformers

    made = getattr(transformers, kind)
    model = made(made.config_class(**SIZES, pad_token_id=0))
    weights = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up" not in name}
    model.save_pretrained(tmp_path, state_dict=weights if "Gemma" in kind else None)
    for refusing in (TorchRunner,) if "Gemma" in kind else (TorchRunner, describe):  # before any weight is loaded
        with pytest.raises(ConfigError, match=told):
            refusing(tmp_path)


def test_l8_what_a_file_has_as_architectures_need_not_be_a_list_of_texts(tmp_path: Path) -> None:
    directory = random_checkpoint("Granite", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    for architectures in ([["x"]], [5], {"a": 1}, 5, None, [], "GraniteForCausalLM"):
        (directory / "config.json").write_text(json.dumps(config | {"architectures": architectures}))
        assert describe(directory).vocab_size == config["vocab_size"]
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["GraniteModel"]}))
    with pytest.raises(ConfigError, match=r"architectures=\['GraniteModel'\]: has no head"):
        describe(directory)
