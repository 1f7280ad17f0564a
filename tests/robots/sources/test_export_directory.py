"""What an export directory says, and every way in which it can be wrong."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import DecomposedPolicy, Export, load_policy
from reflex_runtime.robots.policy.spec import DeviceOptions
from robots.tiny import (
    ACTIONS,
    CHUNK,
    EMBODIMENT,
    HEIGHT,
    STEPS,
    TOKENS,
    WIDTH,
    config,
    write_expert,
    write_export,
    write_monolithic,
    write_prefix,
)

Change = Callable[[dict[str, Any]], Any]


def put(*path: str, value: Any) -> Change:
    """Set a value deep in the configuration."""

    def change(settings: dict[str, Any]) -> None:
        for key in path[:-1]:
            settings = settings[key]
        settings[path[-1]] = value

    return change


def drop(*path: str) -> Change:
    def change(settings: dict[str, Any]) -> None:
        for key in path[:-1]:
            settings = settings[key]
        del settings[path[-1]]

    return change


def test_export_monolithic_is_read_as_it_stands(tmp_path: Path) -> None:
    export = Export.load(write_export(tmp_path))
    assert (export.model_id, export.model_type, export.inference_mode) == ("tiny", "flow_matching", "monolithic")
    assert (export.state_dim, export.action_dim, export.chunk_size, export.opset) == (2, ACTIONS, CHUNK, 17)
    assert export.num_denoising_steps == STEPS
    assert export.images == {"front": (HEIGHT, WIDTH)}
    assert export.graphs["model"].file == tmp_path / "model.onnx"
    assert {r: s.name for r, s in export.graphs["model"].inputs.items()} == config()["inputs"]
    assert export.graphs["model"].outputs["actions"].name == "chunk"
    assert export.tokenizer is not None
    assert export.tokenizer.row("Open the WINDOW", TOKENS)[0].tolist() == [1, 3, 0]
    assert export.takes_state
    assert export.takes_text


def test_export_decomposed_is_read_as_it_stands(tmp_path: Path) -> None:
    export = Export.load(write_export(tmp_path, "decomposed"))
    prefix, expert = export.graphs["prefix"], export.graphs["expert"]
    assert [s.name for s in prefix.inputs.values()] == ["rgb", "ids"]
    assert [s.name for s in prefix.outputs.values()] == ["keys", "values"]
    assert [s.name for s in expert.inputs.values()] == ["x", "t", "pose", "keys", "values"]
    assert not export.prefix_takes_state


def test_export_embodiment_is_read_as_it_stands(tmp_path: Path) -> None:
    embodiment = Export.load(write_export(tmp_path)).embodiment
    assert (embodiment.name, embodiment.action_space) == ("bench-arm", "absolute")
    assert embodiment.action_ranges is not None
    assert embodiment.action_ranges.tolist() == [[-1.0, 1.0], [-0.5, 0.5]]
    assert embodiment.action_names == ("shoulder", "gripper")
    assert (embodiment.gripper_index, embodiment.control_rate_hz) == (1, 50.0)
    assert embodiment.cameras == {"front": (480, 640)}


def test_export_without_an_embodiment_is_of_an_unknown_robot(tmp_path: Path) -> None:
    embodiment = Export.load(write_export(tmp_path, embodiment=None)).embodiment
    assert (embodiment.name, embodiment.action_ranges) == ("unknown", None)


def test_export_embodiment_json_is_found_without_being_named(tmp_path: Path) -> None:
    assert Export.load(write_export(tmp_path, change=drop("embodiment"))).embodiment.name == "bench-arm"


def test_export_norm_may_stand_in_the_embodiment_but_not_in_both(tmp_path: Path) -> None:
    norm = {"mean": [0.0, 1.0], "std": [1.0, 2.0]}
    write_export(tmp_path, change=drop("state_norm"), embodiment=EMBODIMENT | {"state_norm": norm})
    export = Export.load(tmp_path)
    assert export.state_norm is not None
    assert export.state_norm.normalise(np.array([1.0, 3.0], np.float32)).tolist() == [1.0, 1.0]
    write_export(tmp_path, embodiment=EMBODIMENT | {"state_norm": norm})
    with pytest.raises(ConfigError, match=r"state_norm: found .* expected it in one file only"):
        Export.load(tmp_path)


def test_export_image_size_alone_means_one_image(tmp_path: Path) -> None:
    def change(settings: dict[str, Any]) -> None:
        del settings["images"]
        settings["inputs"]["image"] = settings["inputs"].pop("front")

    assert Export.load(write_export(tmp_path, change=change)).images == {"image": (HEIGHT, WIDTH)}


def test_export_metadata_is_free(tmp_path: Path) -> None:
    export = Export.load(write_export(tmp_path, change=put("metadata", value={"trained": "yesterday", "loss": [1]})))
    assert export.config["metadata"]["loss"] == [1]


# -- hashes ------------------------------------------------------------------------------------------------------------


def test_export_model_hash_is_the_stated_definition(tmp_path: Path) -> None:
    write_export(tmp_path)
    (tmp_path / "model.onnx.data").write_bytes(b"weights")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.safetensors").write_bytes(b"")
    (tmp_path / "b.bin").write_bytes(b"\0\1")
    expected = hashlib.sha256()
    for name in ("b.bin", "model.onnx", "model.onnx.data", "more/a.safetensors"):
        content = (tmp_path / name).read_bytes()
        expected.update(name.encode() + b"\0" + len(content).to_bytes(8, "big") + content)
    export = Export.load(tmp_path)
    assert export.model_hash == expected.hexdigest()[:16]
    assert export.model_bytes == 7 + 0 + 2 + (tmp_path / "model.onnx").stat().st_size


def test_export_config_hash_is_that_of_the_file(tmp_path: Path) -> None:
    content = (write_export(tmp_path) / "reflex_config.json").read_bytes()
    assert Export.load(tmp_path).config_hash == hashlib.sha256(content).hexdigest()[:16]


def test_export_model_hash_sees_names_and_contents_and_nothing_else(tmp_path: Path) -> None:
    write_export(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"1")
    first = Export.load(tmp_path).model_hash
    (tmp_path / "README.md").write_text("notes")
    assert Export.load(tmp_path).model_hash == first
    (tmp_path / "a.bin").rename(tmp_path / "b.bin")
    renamed = Export.load(tmp_path).model_hash
    (tmp_path / "b.bin").write_bytes(b"2")
    assert len({first, renamed, Export.load(tmp_path).model_hash}) == 3


# -- what can be wrong -------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, str, Change, str]] = [  # kind of export, key named, change, what the message says is expected
    ("monolithic", "model_id", drop("model_id"), "a text"),
    ("monolithic", "model_id", put("model_id", value=7), "a text"),
    ("monolithic", "model_type", put("model_type", value=" "), "a text"),
    ("monolithic", "export_kind", put("export_kind", value="onnx"), "'monolithic' or 'decomposed'"),
    ("monolithic", "export_kind", drop("export_kind"), "'monolithic' or 'decomposed'"),
    ("monolithic", "state_dim", put("state_dim", value=2.0), "an integer in [0, 1000000]"),
    ("monolithic", "state_dim", put("state_dim", value=-1), "an integer in [0, 1000000]"),
    ("monolithic", "action_dim", put("action_dim", value=0), "an integer in [1, 1000000]"),
    ("monolithic", "action_dim", put("action_dim", value=True), "an integer in [1, 1000000]"),
    ("monolithic", "chunk_size", drop("chunk_size"), "an integer in [1, 1000000]"),
    ("monolithic", "num_denoising_steps", put("num_denoising_steps", value="5"), "an integer in [1, 1000]"),
    ("monolithic", "opset", put("opset", value="17"), "an integer in [1, 1000]"),
    ("monolithic", "image_size", put("image_size", value=[4]), "[height, width]"),
    ("monolithic", "image_size", put("image_size", value=[8, 8]), "the size of one of `images`"),
    ("monolithic", "images", put("images", value=["front"]), "an object {name: [height, width]}"),
    ("monolithic", "images.front", put("images", "front", value=[4, 0]), "[height, width]"),
    ("monolithic", "images.state", put("images", value={"state": [4, 6]}), "a name other than tokens"),
    ("monolithic", "inputs", drop("inputs"), "an object"),
    ("monolithic", "inputs.front", drop("inputs", "front"), "a text"),
    ("monolithic", "inputs.state", put("inputs", "state", value=3), "a text"),
    ("monolithic", "inputs.tokens", put("inputs", "front", value="ids"), "a tensor that no other role has"),
    ("monolithic", "outputs", drop("outputs"), "an object"),
    ("monolithic", "outputs.actions", put("outputs", value={}), "a text"),
    ("monolithic", "state_dim", put("state_dim", value=0), "at least 1"),
    ("monolithic", "tokenizer", drop("tokenizer"), "an object {word: id >= 0}"),
    ("monolithic", "tokenizer", put("tokenizer", value={"open": -1}), "an object {word: id >= 0}"),
    ("monolithic", "tokenizer", put("tokenizer", value={"Open": 1}), "words in lower case without white space"),
    ("monolithic", "tokenizer", put("tokenizer", value={"open it": 1}), "words in lower case without white space"),
    ("monolithic", "tokenizer", put("tokenizer", value="tokenizer.json"), "a file that exists"),
    ("monolithic", "tokenizer", drop("inputs", "tokens"), "none, because `inputs` has no role tokens"),
    ("monolithic", "max_tokens", drop("max_tokens"), "an integer in [1, 100000]"),
    ("monolithic", "state_norm", put("state_norm", value=[0, 1]), "an object"),
    ("monolithic", "state_norm.mean", put("state_norm", "mean", value=[0.0]), "a list of 2 finite numbers"),
    ("monolithic", "state_norm.std", put("state_norm", "std", value=[1.0, 0.0]), "numbers > 0"),
    ("monolithic", "action_norm.std", put("action_norm", "std", value=[1.0, 1e-60]), "numbers > 0"),
    ("monolithic", "action_norm.mean", put("action_norm", "mean", value=[1e300, 0]), "a list of 2 finite numbers"),
    ("monolithic", "decomposed", put("decomposed", value={}), "none in a monolithic export"),
    ("monolithic", "embodiment", put("embodiment", value="robot.json"), "a file that exists"),
    ("decomposed", "decomposed", drop("decomposed"), "an object"),
    ("decomposed", "decomposed.vlm_prefix_onnx", drop("decomposed", "vlm_prefix_onnx"), "a file name"),
    (
        "decomposed",
        "decomposed.expert_denoise_onnx",
        put("decomposed", "expert_denoise_onnx", value="expert.onnx"),
        "a file that exists",
    ),
    (
        "decomposed",
        "decomposed.past_kv_tensor_names",
        put("decomposed", "past_kv_tensor_names", value=[]),
        "a list of one or more different texts",
    ),
    (
        "decomposed",
        "decomposed.past_kv_tensor_names",
        put("decomposed", "past_kv_tensor_names", value=["keys", "keys"]),
        "a list of one or more different texts",
    ),
    ("decomposed", "decomposed.expert_takes_state", drop("decomposed", "expert_takes_state"), "true or false"),
    ("decomposed", "inputs.state", drop("inputs", "state"), "because `expert_takes_state` is true"),
    ("decomposed", "inputs.noise", drop("inputs", "noise"), "a text"),
    ("decomposed", "inputs.time", drop("inputs", "time"), "a text"),
    ("decomposed", "inputs.past_kv", put("inputs", "past_kv", value="keys"), "a list of 2 different texts"),
    ("decomposed", "outputs.past_kv", put("outputs", "past_kv", value=["keys"]), "a list of 2 different texts"),
    (
        "decomposed",
        "inputs.past_kv",
        put("inputs", "past_kv", value=["x", "values"]),
        "a tensor that no other role has",
    ),
]


@pytest.mark.parametrize(("kind", "key", "change", "expected"), WRONG, ids=[f"{w[1]}-{i}" for i, w in enumerate(WRONG)])
def test_export_error_names_file_key_found_and_expected(
    tmp_path: Path, kind: str, key: str, change: Change, expected: str
) -> None:
    write_export(tmp_path, kind, change)
    with pytest.raises(ConfigError) as caught:
        Export.load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'reflex_config.json'}: {key}: found ")
    assert f"expected {expected}" in message or expected in message.split("expected ", 1)[1]


ROLES = "there may be front, tokens, state, noise, token_mask, image_masks"
NORMS = "there may be mean, std, min, max, q01, q99, q10, q90, epsilon"
UNKNOWN: list[tuple[str, Change, str]] = [
    ("inputs.wrist", put("inputs", "wrist", value="x"), ROLES),
    ("inputs.time", put("inputs", "time", value="t"), ROLES),
    ("inputs.image", put("inputs", "image", value="x"), ROLES),
    ("inputs.nois", put("inputs", "nois", value="x"), "did you mean noise?"),
    ("outputs.past_kv", put("outputs", "past_kv", value="k"), "there may be actions"),
    ("action_norm.scale", put("action_norm", "scale", value=[1, 1]), NORMS),
    ("chunksize", put("chunksize", value=4), "did you mean chunk_size?"),
]


@pytest.mark.parametrize(("key", "change", "meant"), UNKNOWN, ids=[case[0] for case in UNKNOWN])
def test_an_unknown_key_of_an_export_names_what_may_be_there(
    tmp_path: Path, key: str, change: Change, meant: str
) -> None:
    write_export(tmp_path, "monolithic", change)
    with pytest.raises(ConfigError) as caught:
        Export.load(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'reflex_config.json'}: {key}: no such key; {meant}"


WRONG_EMBODIMENT: list[tuple[str, Any, str]] = [
    ("name", None, "a text"),
    ("action_space", "joint", "'absolute' or 'relative'"),
    ("action_ranges", [[-1, 1]], "a list of 2 pairs"),
    ("action_ranges", [[-1, 1], [1, 1]], "low < high"),
    ("action_names", ["a", "a"], "different texts"),
    ("action_units", ["rad"], "a list of 2 texts"),
    ("state_names", "abc", "a list of 2 texts"),
    ("gripper_index", 2, "an integer in [0, 1]"),
    ("cameras", {"front": 64}, "[height, width]"),
    ("control_rate_hz", 0, "a number > 0"),
    ("control_rate_hz", 10**400, "a number > 0"),
    ("control_rate_hz", "\ud800", "a number > 0"),
    ("state_norm", {"mean": [0, 0]}, "a list of 2 finite numbers"),
    ("action_range", [], "no such key; did you mean action_ranges?"),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG_EMBODIMENT)
def test_export_error_in_the_embodiment_names_its_file(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    write_export(tmp_path, embodiment=EMBODIMENT | {key: value})
    with pytest.raises(ConfigError) as caught:
        Export.load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'embodiment.json'}: {key}")
    assert expected in message.partition("expected ")[2] or expected in message.partition(f"{key}: ")[2]


ESCAPES = ["../model.onnx", "/etc/hostname", "a/../../b", "..", "C:\\model.onnx", "a\\..\\b"]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("key", ["vlm_prefix_onnx", "expert_denoise_onnx", "embodiment", "tokenizer"])
def test_export_paths_stay_within_the_directory(tmp_path: Path, key: str, name: str) -> None:
    path = ("decomposed", key) if key.endswith("_onnx") else (key,)
    (tmp_path / "model.onnx").write_bytes(b"")
    write_export(tmp_path / "export", "decomposed", put(*path, value=name))
    with pytest.raises(ConfigError, match="stays within the export directory"):
        Export.load(tmp_path / "export")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[]", "found [], expected an object"),
        ('{"model_id": "a", "model_id": "b"}', "model_id: found twice"),
        ('{"state_dim": NaN}', "found NaN, expected finite numbers only"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_export_configuration_that_is_no_object_of_plain_values(tmp_path: Path, text: str, said: str) -> None:
    (write_export(tmp_path) / "reflex_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"reflex_config\.json") as caught:
        Export.load(tmp_path)
    assert said in str(caught.value)


def test_export_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: not found, expected an export directory"):
        Export.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"reflex_config\.json: not found"):
        Export.load(tmp_path)
    write_export(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Export.load(tmp_path / "reflex_config.json")
    assert str(caught.value) == f"{tmp_path / 'reflex_config.json'}: is a file; name its directory, {tmp_path}"
    (tmp_path / "model.onnx").unlink()
    with pytest.raises(ConfigError, match=r"model\.onnx: not found, expected the model of a monolithic export"):
        Export.load(tmp_path)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", "run git lfs pull"),
        (b"", "onnxruntime cannot load it"),
        (b"no model", "onnxruntime cannot load it"),
    ],
)
def test_export_a_model_file_that_was_not_copied_whole_is_named(tmp_path: Path, data: bytes, told: str) -> None:
    (write_export(tmp_path) / "model.onnx").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"model\.onnx: .*{told}"):
        load_policy(tmp_path)


# -- the configuration against the graphs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("inputs", "front", value="picture"), r"model\.onnx: input 'picture': not in the graph, which has 'rgb'"),
        (put("outputs", "actions", value="out"), r"model\.onnx: output 'out': not in the graph, which has 'chunk'"),
        (put("chunk_size", value=5), r"input 'x': found \[4, 2\] after the batch axis, expected \[5, 2\]"),
        (put("max_tokens", value=9), r"input 'ids': found \[3\] after the batch axis, expected \[9\]"),
        (drop("inputs", "noise"), r"input 'x': unknown"),
    ],
)
def test_export_graph_differs_from_the_configuration(tmp_path: Path, change: Change, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_policy(write_export(tmp_path, change=change))


def test_export_graph_with_another_type_of_input(tmp_path: Path) -> None:
    def swap(settings: dict[str, Any]) -> None:  # words where the picture goes
        settings["inputs"] |= {"tokens": "rgb", "front": "ids"}

    with pytest.raises(ConfigError, match="input 'ids': found int64, expected uint8"):
        load_policy(write_export(tmp_path, change=swap))


def test_export_graphs_that_do_not_fit_each_other(tmp_path: Path) -> None:
    crossed = put("inputs", "past_kv", value=["values", "keys"])
    with pytest.raises(ConfigError, match=r"input 'values': .* but vlm_prefix\.onnx makes .*past_kv_tensor_names"):
        load_policy(write_export(tmp_path, "decomposed", crossed))


def test_export_of_the_other_kind_is_refused_by_a_policy_class(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a monolithic model, DecomposedPolicy is for the other kind"):
        DecomposedPolicy(Export.load(write_export(tmp_path)).open(DeviceOptions()))  # type: ignore[arg-type]


# -- tokenizer.json ----------------------------------------------------------------------------------------------------

WORD_LEVEL: dict[str, Any] = {
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "padding": {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": None}
    | {"pad_id": 7, "pad_type_id": 0, "pad_token": "[PAD]"},
    "model": {"type": "WordLevel", "vocab": {"open": 3, "door": 4, "!": 5, "[UNK]": 9}, "unk_token": "[UNK]"},
}


def tokenizer_in(root: Path, content: dict[str, Any]) -> Path:
    write_export(root, change=put("tokenizer", value="tokenizer.json"))
    (root / "tokenizer.json").write_text(json.dumps(content))
    return root


def test_export_special_tokens_may_be_in_capitals(tmp_path: Path) -> None:
    words = {"": 0, "PAD": 0, "[SEP]": 2, "Open": 1, "open": 1}
    export = Export.load(write_export(tmp_path, change=put("tokenizer", value=words)))
    assert export.tokenizer is not None
    assert export.tokenizer.row("OPEN it", 3)[0].tolist() == [1, 0, 0]


def test_export_word_level_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = Export.load(tokenizer_in(tmp_path, WORD_LEVEL)).tokenizer
    assert tokenizer is not None
    assert tokenizer.row("Open door!", 5)[0].tolist() == [3, 4, 5, 7, 7]
    assert tokenizer.row("shut", 1)[0].tolist() == [9]
    assert tokenizer.row("open door open door", 2)[0].tolist() == [3, 4]


def test_the_words_that_a_tokenizer_does_not_know(tmp_path: Path) -> None:
    tokenizer = Export.load(tokenizer_in(tmp_path, WORD_LEVEL)).tokenizer
    assert tokenizer is not None
    assert tokenizer.unknown("shut Door, shut WINDOW!") == ["shut", "WINDOW"]
    assert tokenizer.unknown("Open door ! ?") == tokenizer.unknown("") == []


def test_export_word_level_tokenizer_json_without_normalizer(tmp_path: Path) -> None:
    split = WORD_LEVEL | {"normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "padding": None}
    tokenizer = Export.load(tokenizer_in(tmp_path, split)).tokenizer
    assert tokenizer is not None
    assert tokenizer.row("Open door! door", 4)[0].tolist() == [9, 9, 4, 0]


def test_export_without_the_package_it_says_what_to_install_or_how_to_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"tokenizer\.json, without words .*, needs tokenizers: .*'\.\[llm\]'"):
        Export.load(tokenizer_in(tmp_path, WORD_LEVEL))


def test_export_other_tokenizers_are_read_by_the_package(tmp_path: Path) -> None:
    pieces = {"type": "BPE", "vocab": {"o": 0, "p": 1, "op": 2, "n": 3, "<s>": 4}, "merges": [["o", "p"]]}
    start = {"id": "<s>", "type_id": 0}
    content = {
        "model": pieces,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": start}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}},
        },
        "padding": {"strategy": {"Fixed": 4}, "direction": "Left", "pad_to_multiple_of": None}
        | {"pad_id": 9, "pad_type_id": 0, "pad_token": "<pad>"},
    }
    tokenizer = Export.load(tokenizer_in(tmp_path, content)).tokenizer
    assert tokenizer is not None
    assert tokenizer.row("opn", 5)[0].tolist() == [4, 2, 3, 9, 9]
    assert tokenizer.row("opnopn", 3)[0].tolist() == [4, 2, 3]
    with pytest.raises(ConfigError, match="the tokenizers package cannot read it"):
        Export.load(tokenizer_in(tmp_path, {"model": {"type": "BPE"}}))


@pytest.mark.parametrize("text", ["{", "[]", '{"padding": {"pad_id": -1}}'])
def test_export_tokenizer_json_that_is_none(tmp_path: Path, text: str) -> None:
    (tokenizer_in(tmp_path, {}) / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizers package cannot read it"):
        Export.load(tmp_path)


# -- batch axis --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["monolithic", "decomposed"])
def test_export_symbolic_leading_axis_is_the_batch_axis(tmp_path: Path, kind: str) -> None:
    assert load_policy(write_export(tmp_path / "any", kind)).describe()["fanout"] == "batched"
    assert load_policy(write_export(tmp_path / "one", kind, batch=1)).describe()["fanout"] == "sequential"
    with pytest.raises(ConfigError, match="leading axis: found a fixed size of 4, expected a symbolic size, or 1"):
        load_policy(write_export(tmp_path / "four", kind, batch=4))


def test_export_graphs_of_a_directory_are_all_checked(tmp_path: Path) -> None:
    root = write_export(tmp_path, "decomposed")
    write_expert(root / "expert_denoise.onnx", batch=4)
    with pytest.raises(ConfigError, match="expert_denoise"):
        load_policy(root)
    write_prefix(root / "expert_denoise.onnx")
    with pytest.raises(ConfigError, match=r"expert_denoise\.onnx: input 'x': not in the graph"):
        load_policy(root)
    write_monolithic(root / "vlm_prefix.onnx")
    with pytest.raises(ConfigError, match=r"vlm_prefix\.onnx: input 'pose': unknown"):
        load_policy(root)
