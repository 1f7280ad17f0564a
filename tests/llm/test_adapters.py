"""LoRA adapters: what is written with one is what `transformers` writes with its matrices merged into the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from llm.models import MLP, Oracle, library, random_adapter, random_checkpoint, random_model
from llm.steps import Lane, step
from reflex_runtime.core.batch import BatchScheduled, RequestPreempted
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.llm.engine.load import check, describe
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners import adapters
from reflex_runtime.llm.runners.adapters import MOST_ADAPTERS, MOST_NUMBER, AdapterStack, LoraAdapter
from reflex_runtime.llm.runners.checkpoint import Checkpoint
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner
from reflex_runtime.llm.runners.torch_runner import TorchRunner
from thinned import thinned

COUNT = 10  # tokens to write
RUNNERS: dict[str, Any] = {"openvino": OpenVinoRunner, "torch": TorchRunner}


def module(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{'mlp' if name in MLP else 'self_attn'}.{name}"


def merged(base: Path, adapter: Path, directory: Path, scale: Callable[[str], float] = lambda name: 2.0) -> Path:
    """The model with the adapter's matrices added to its own. scale: by the module's name."""
    import torch
    from safetensors.torch import load_file

    model = library().AutoModelForCausalLM.from_pretrained(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{stem}A.weight" in tensors:
                weight += scale(name) * tensors[f"{stem}B.weight"] @ tensors[f"{stem}A.weight"]
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=thinned(["llama", "qwen2", "qwen3"], ["qwen3"]))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, three adapters that differ in all they can, and what the reference writes with each and with none."""
    root = tmp_path_factory.mktemp(request.param)
    base = random_model(request.param, root / "base", head_dim=16)
    alphas = {r"layers\.\d+\.self_attn\.o_proj": 9, "v_proj": 18, "proj": 1}
    found = {
        "all": random_adapter(root / "all", base, 1),
        "query": random_adapter(root / "query", base, 2, 4, ("q_proj", "down_proj"), lora_alpha=3, use_rslora=True),
        "wide": random_adapter(root / "wide", base, 3, 9, ("v_proj", "o_proj"), lora_alpha=5, alpha_pattern=alphas),
    }
    scales: dict[str, Callable[[str], float]] = {
        "all": lambda name: 2.0,
        "query": lambda name: 3.0 / math.sqrt(4),
        "wide": lambda name: 1.0 if "o_proj" in name else 2.0,
    }
    prompts = [[int(token) for token in np.random.default_rng(n).integers(3, 256, n)] for n in (3, 60, 61)]
    oracles = {"": Oracle(base)}
    for name, directory in found.items():
        oracles[name] = Oracle(merged(base, directory, root / f"merged-{name}", scales[name]))
    expected = {name: [oracle.greedy(prompt, COUNT) for prompt in prompts] for name, oracle in oracles.items()}
    assert len({tuple(rows[1]) for rows in expected.values()}) == 4  # each adapter changes what is written
    return base, found, prompts, expected


@pytest.mark.parametrize(("runner", "speculate"), [("openvino", "off"), ("torch", "off"), ("torch", "ngram")])
def test_l9_adapters_share_steps_and_each_writes_what_its_merged_model_does(
    written: Any, runner: str, speculate: str
) -> None:
    """Cut up, preempted, from the cache, and with guessed tokens."""
    base, adapters, prompts, expected = written
    made = RUNNERS[runner](base, num_blocks={"openvino": 7, "torch": 14}[runner], threads=1, adapters=adapters)
    events: list[Any] = []
    engine = LLMEngine(made, ByteTokenizer(), max_num_batched_tokens=50, speculate=speculate, sinks=[events.append])
    for again in (False, True):
        asked = {
            engine.add_request(prompt, SamplingParams.greedy(COUNT, ignore_eos=True), adapter=name): (name, i)
            for i, prompt in enumerate(prompts)
            for name in expected
        }
        while engine.unfinished:
            for output in engine.step():
                name, i = asked[output.request_id]
                assert list(output.token_ids) == expected[name][i], (name, i, again)
    batches = [event.batch for event in events if isinstance(event, BatchScheduled)]
    shared = [{ticket.request.payload.adapter for ticket in batch.grants} for batch in batches]
    assert max(map(len, shared)) > 2
    assert any(isinstance(event, RequestPreempted) for event in events)
    engine.close()


def test_l9_adapters_go_with_rounded_weights(written: Any) -> None:
    base, adapters, prompts, _ = written
    runner = OpenVinoRunner(base, num_blocks=8, threads=1, weights="int8", adapters=adapters)
    (tokens, *_), oracle = prompts, Oracle(base.parent / "merged-all")
    for number, near in ((1, True), (0, False)):
        flat = step([Lane(tokens)], [len(tokens)], runner.block_size, list(range(8)))
        logits = runner.forward(replace(flat, adapters=np.array([number], np.int32)))[0]
        reference = oracle.logits(tokens)[-1]
        assert (np.abs(logits - reference).max() < 0.08 * np.ptp(reference)) == near
    runner.close()


def test_l9_a_cached_beginning_is_that_of_its_adapter_alone(llama: Path, tmp_path: Path) -> None:
    adapters = {"a": random_adapter(tmp_path / "a", llama, 1), "b": random_adapter(tmp_path / "b", llama, 2)}
    made = TorchRunner(llama, num_blocks=40, threads=1, adapters=adapters)
    engine = LLMEngine(made, ByteTokenizer())
    found = []
    for name in ("", "a", "b", "a", "b", ""):
        engine.add_request(list(range(3, 60)), SamplingParams.greedy(1), adapter=name)
        found += [output.cached_tokens for output in engine.step()]
    assert found == [0, 0, 0, 48, 48, 48]
    engine.close()


def test_l9_without_adapters_nothing_is_added_to_the_graph(llama: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "a", llama)
    plain = OpenVinoRunner(llama, num_blocks=4)
    adapted = OpenVinoRunner(llama, num_blocks=4, adapters={"a": adapter})
    for runner, names in ((plain, ()), (adapted, ("a",))):
        assert runner.adapters == names
        assert ("adapter_ids" in runner._places) == bool(names)
        runner.close()


def test_l9_the_table_says_whose_rows_of_the_stacked_matrices_are_whose(llama: Path, tmp_path: Path) -> None:
    config = Checkpoint.open(llama).config
    paths = {"one": random_adapter(tmp_path / "one", llama, 1, 2, ("q_proj",))}
    paths["two"] = random_adapter(tmp_path / "two", llama, 2, 3)
    stack = AdapterStack.read(paths, config)
    assert stack.names == ("one", "two")
    assert stack.table.tolist() == [[0] * 5, [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]
    a, b = stack.layers[module(1, "up_proj")]
    assert (a.shape, b.shape) == ((5, 64), (96, 5))
    assert not a[:2].any()
    assert not b[:, :2].any()
    one = LoraAdapter.read("one", paths["one"], config).layers[module(0, "q_proj")]
    assert np.array_equal(stack.layers[module(0, "q_proj")][0][:2], one[0])


def test_l9_an_adapter_that_is_not_there_is_told(tmp_path: Path) -> None:
    engine = LLMEngine()
    with pytest.raises(ConfigError, match="adapter='x': no such adapter is loaded; there is none"):
        engine.add_request("robots", adapter="x")
    with pytest.raises(ConfigError, match="adapters: only for a Hugging Face directory"):
        LLMEngine(ToyRunner(), adapters={"x": tmp_path})


def tensors_of(directory: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(directory / "adapter_model.safetensors")


def renamed(directory: Path, name: str, to: str | None, change: Callable[[Any], Any] = lambda array: array) -> None:
    tensors = tensors_of(directory)
    array = tensors.pop(name)
    if to is not None:
        tensors[to] = change(array)
    save_file(tensors, directory / "adapter_model.safetensors")


Q_A, Q_B = (f"base_model.model.{module(0, 'q_proj')}.lora_{side}.weight" for side in "AB")
MERGE = "merge it: PeftModel.from_pretrained"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "LOHA"}, 'peft_type: found "LOHA", expected "LORA"'),
        ({"use_dora": True}, f"use_dora: found true, expected nothing: it is not served; {MERGE}"),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save: found \["lm_head"\], expected nothing: .*; ' + MERGE),
        ({"bias": "lora_only"}, 'bias: found "lora_only", expected "none": biases are not served; ' + MERGE),
        ({"lora_bias": True}, "lora_bias: found true, expected nothing"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: found true, expected nothing"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: found .*: it changes the model, too"),
        ({"lora_alpha": "8"}, 'lora_alpha: found "8", expected a number above 0'),
        ({"lora_alpha": 0}, "lora_alpha: found 0, expected a number above 0"),
        ({"lora_alpha": 1e39}, r"lora_alpha: found 1e\+39, expected a number above 0, at most 1e\+06"),  # inf · 0
        ({"lora_alpha": 10**400}, "lora_alpha: found 10000.*, expected a number above 0"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern: found .*, expected .* a number above 0"),
        ({"alpha_pattern": {"q_proj(": 1}}, r"alpha_pattern: found .*, expected .*; q_proj\( is none"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "alpha_pattern: found .*, expected patterns of .* 3 repeats, none of a gro"),
        ({"alpha_pattern": {"a*" * 4: 1}}, "alpha_pattern: found .*, expected patterns of .* 3 repeats, none of a gro"),
        ({"alpha_pattern": {"a" * 257: 1}}, "alpha_pattern: found .*, expected patterns of at most 256 characters"),
        ({"r": 10**9}, "r: found 1000000000, expected a whole number from 1 to 256"),
        ({"r": 0}, "r: found 0, expected a whole number from 1 to 256"),
        ({"r": 5}, r"r: found 5, expected 4, the rank of model\.layers\..* in adapter_model\.safetensors"),
        ({"rank_pattern": {"q_proj": 8}}, r"r: found 8, expected 4, the rank of model\.layers\.0\.self_attn\.q_pro"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern: found .*, expected .* a whole number from 1 to 256"),
        ({"alpha_pattern": [1]}, r"alpha_pattern: found \[1\], expected an object"),
    ],
)
def test_l9_an_adapter_that_does_more_is_refused_by_the_name_of_what_it_does(
    llama: Path, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    model = Checkpoint.open(llama).config
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/a/adapter_config.json: {says}"):
        LoraAdapter.read("a", random_adapter(tmp_path / "a", llama, **config), model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda at: renamed(at, Q_A, "x.lora_A.weight"), "tensor x.lora_A.weight: is not served: adapters may change"),
        (lambda at: renamed(at, Q_A, Q_A.replace("q_proj", "lm_head")), "tensor .*lm_head.*: is not served"),
        (lambda at: renamed(at, Q_A, Q_A.replace("layers.0", "layers.7")), "of the model's 2 layers"),
        (lambda at: renamed(at, Q_A, Q_A.replace("lora_A", "lora_magnitude_vector")), "is not served"),
        (lambda at: renamed(at, Q_A, None), "q_proj: has only lora_B, expected lora_A and lora_B"),
        (lambda at: renamed(at, Q_A, Q_A, lambda x: x[:, :-1].copy()), r"lora_A \[4, 63\] .* do not fit .* \[64, 64\]"),
        (lambda at: renamed(at, Q_A, Q_A, lambda x: x[:-1]), r"lora_A \[3, 64\] and lora_B \[64, 4\] do not fit"),
        (lambda at: renamed(at, Q_A, Q_A, lambda x: x[0]), r"lora_A \[64\] and lora_B \[64, 4\] do not fit"),
        (lambda at: renamed(at, Q_B, Q_B, lambda x: x * np.float32("nan")), "q_proj: holds numbers that are not fin"),
        (lambda at: renamed(at, Q_A, Q_A, lambda x: x * np.float32("inf")), "q_proj: holds numbers that are not fin"),
        (lambda at: renamed(at, Q_A, Q_A, lambda x: x * 0 + 2e6), r"lora_A holds 2e\+06: must be in \[-1e\+06, "),
        (lambda at: renamed(at, Q_B, Q_B, lambda x: x * 0 - 6e5), r"lora_B times the scale 2 holds 1\.2e\+06: must be"),
        (lambda at: renamed(at, Q_A, Q_A, lambda x: x.astype(np.int32)), "lora_A.weight: dtype I32: must be one of"),
        (lambda at: save_file({}, at / "adapter_model.safetensors"), "holds no tensors"),
        (lambda at: (at / "adapter_model.safetensors").unlink(), "not found; save the adapter with safe_serialization"),
    ],
)
def test_l9_tensors_that_do_not_fit_the_model_are_refused(
    llama: Path, tmp_path: Path, change: Callable[[Path], Any], says: str
) -> None:
    model, adapter = Checkpoint.open(llama).config, random_adapter(tmp_path / "a", llama)
    change(adapter)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/a/adapter_model.safetensors: .*{says}"):
        LoraAdapter.read("a", adapter, model)


@pytest.mark.parametrize("kind", ["openvino", "torch"])
def test_l9_an_adapter_as_large_as_may_be_changes_nothing_for_others_of_its_step(
    llama: Path, tmp_path: Path, kind: str
) -> None:
    """Its own tokens may be nonsense; those of others are what they are without it, in its blocks later, too."""
    adapter = random_adapter(tmp_path / "huge", llama)
    tensors = {name: np.full_like(array, MOST_NUMBER / 2) for name, array in tensors_of(adapter).items()}
    save_file(tensors, adapter / "adapter_model.safetensors")  # the scale of B is 2
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 4'))
    prompts = [list(range(3, 40)), list(range(9, 50))]

    def written(adapters: dict[str, Path]) -> list[list[int]]:
        runner = RUNNERS[kind](llama, num_blocks=8, threads=1, adapters=adapters)
        engine = LLMEngine(runner, ByteTokenizer(), enable_prefix_caching=False)
        found: list[list[int]] = []
        for _ in range(2):
            params = SamplingParams.greedy(COUNT, ignore_eos=True)
            asked = [engine.add_request(prompt, params) for prompt in prompts]
            for name in adapters:
                engine.add_request(list(range(3, 30)), params, adapter=name)
            done: dict[str, list[int]] = {}
            while engine.unfinished:
                done |= {output.request_id: list(output.token_ids) for output in engine.step()}
            found += [done[id] for id in asked]
        engine.close()
        return found

    assert written({"huge": adapter}) == written({})


def test_l9_ranks_and_their_number_are_bounded(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Checkpoint.open(llama).config
    with pytest.raises(ConfigError, match="r: found 257, expected a whole number from 1 to 256"):
        LoraAdapter.read("a", random_adapter(tmp_path / "a", llama, rank=257), model)
    one = LoraAdapter.read("b", random_adapter(tmp_path / "b", llama, rank=1), model)
    assert len(AdapterStack([one] * MOST_ADAPTERS).names) == MOST_ADAPTERS
    with pytest.raises(ConfigError, match="lora: 33 adapters; a model may have at most 32"):
        AdapterStack([one] * (MOST_ADAPTERS + 1))
    monkeypatch.setattr(adapters, "free_bytes", lambda: 50_000)
    assert len(AdapterStack([one] * 6).names) == 6  # 7,424 bytes for each rank
    with pytest.raises(ConfigError, match=r"lora: 7 adapters take 0\.0 GB, but only 0\.0 GB are free; load fewer"):
        AdapterStack([one] * 7)
    with pytest.raises(ConfigError, match=r"lora: 1 adapters take .* load fewer"):  # of 7 processes each
        check(model, adapters={"b": tmp_path / "b"}, copies=7, kv_cache_bytes=1 << 20)


def test_l9_adapters_of_other_architectures_are_refused_with_what_would_work(llama: Path, tmp_path: Path) -> None:
    other, adapter = random_checkpoint("Granite", tmp_path / "other"), random_adapter(tmp_path / "a", llama)
    says = f"lora: only checkpoints of the Llama, Mistral, .*; {MERGE}"
    with pytest.raises(ConfigError, match=says):
        check(describe(other), adapters={"a": adapter})
    with pytest.raises(ConfigError, match=says):
        TorchRunner(other, adapters={"a": adapter})
