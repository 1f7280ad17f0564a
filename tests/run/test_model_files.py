"""Model directories that lie: what is no file ends every load, texts have a bound, and tables cover their bytes."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import POLICY, SCRIBE
from reflex_runtime.llm.engine.load import describe, load
from reflex_runtime.robots.sources.load import read_source
from reflex_runtime.run import model_files
from reflex_runtime.run.model_files import MOST_TEXT, check_files, json_keys, read_file, read_table


def stored(file: Path, table: dict[str, Any] | str, size: int) -> Path:
    text = (table if isinstance(table, str) else json.dumps(table)).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return file


def tensor(start: int, stop: int, dtype: str = "U8", **shape: list[int]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape.get("shape", [stop - start]), "data_offsets": [start, stop]}


def test_a_table_whose_tensors_cover_the_bytes_is_read_in_any_order(tmp_path: Path) -> None:
    table = {"b": tensor(8, 12), "empty": tensor(8, 8), "a": tensor(0, 8, "F32", shape=[1, 2]), "__metadata__": {}}
    file = stored(tmp_path / "x.safetensors", table, 12)
    first = 8 + len(json.dumps(table))
    places = read_table(file)
    assert {name: (place.start - first, place.stop - first) for name, place in places.items()} == {
        "a": (0, 8), "b": (8, 12), "empty": (8, 8),
    }  # fmt: skip
    assert read_table(stored(tmp_path / "none.safetensors", {}, 0)) == {}


@pytest.mark.parametrize(
    ("table", "size", "says"),
    [
        ({"a": tensor(0, 8), "b": tensor(0, 8)}, 8, "invalid offset for tensor"),
        ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12, "tensor `b`"),
        ({"a": tensor(0, 8), "b": tensor(9, 12)}, 12, "tensor `b`"),
        ({"a": tensor(1, 8)}, 8, "tensor `a`"),
        ({"a": tensor(0, 8)}, 9, "file not fully covered"),
        (f'{{"a": {json.dumps(tensor(0, 8))}, "a": {json.dumps(tensor(8, 16))}}}', 16, "tensor `a`"),
        ({"a": tensor(0, 8, "F64", shape=[2])}, 8, "invalid shape"),
        ({"a": tensor(0, 8, "U8", shape=[2**62, 4])}, 8, "overflow"),
        ({"a": tensor(-8, 0)}, 8, "invalid JSON in header"),
        ({"a": tensor(0, 10**15)}, 8, "file not fully covered"),
        ("[" * 100_000, 8, "invalid JSON in header"),
        ("[]", 0, "invalid JSON in header"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_tell_each_byte_once_is_refused(
    tmp_path: Path, table: dict[str, Any] | str, size: int, says: str
) -> None:
    file = stored(tmp_path / "x.safetensors", table, size)
    with pytest.raises(ConfigError) as refused:
        read_table(file)
    assert refused.value.message.startswith(f"{file}: is truncated, damaged, or not safetensors (")
    assert says in refused.value.message


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


OPENS: dict[str, tuple[Path, Callable[[Path], object], tuple[str, ...]]] = {
    "describe": (SCRIBE, describe, ("config.json", "tokenizer.json", "model.safetensors")),
    "load": (SCRIBE, load, ("config.json", "tokenizer.json", "generation_config.json")),
    "an export": (POLICY, read_source, ("reflex_config.json", "expert_denoise.onnx")),
    "a checkpoint": (SCRIBE, lambda root: read_source(f"lerobot:{root}"), ("config.json",)),
    "a directory": (SCRIBE, read_source, ("config.json",)),
    "openpi's": (SCRIBE, lambda root: read_source(f"openpi:{root}"), ("config.json",)),
}


@pytest.mark.parametrize("put", [pipe, device, folder])
@pytest.mark.parametrize(("how", "name"), [(how, name) for how in OPENS for name in OPENS[how][2]])
def test_a_load_ends_where_something_else_is_in_the_place_of_a_file(
    tmp_path: Path, how: str, name: str, put: Callable[[Path], None]
) -> None:
    origin, open, _ = OPENS[how]
    root = Path(shutil.copytree(origin, tmp_path / "m"))
    file = root / name
    put(file)
    found = "directory" if put is folder else put.__name__
    with pytest.raises(ConfigError) as refused:
        open(root)
    assert refused.value.message == f"{file}: is a {found}, expected a file"


def test_a_text_has_a_bound_and_a_directory_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert (read_file(file), json_keys(file)) == (b"{}", frozenset())
    os.truncate(file, MOST_TEXT + 1)
    with pytest.raises(ConfigError, match=f"{file}: has over {MOST_TEXT} bytes, the most that are read of such a file"):
        read_file(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_file(tmp_path / "none.json")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")  # nobody may need it
    check_files(tmp_path)
    monkeypatch.setattr(model_files, "MOST_FILES", 1)
    with pytest.raises(ConfigError, match="holds over 1 files; name the directory of one model"):
        check_files(tmp_path)


def test_a_linked_folder_is_looked_into_once(tmp_path: Path) -> None:
    """As in a cache of Hugging Face's, whose files are links, and a folder may be one too."""
    root, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    (blobs / "inner").mkdir(parents=True)
    root.mkdir()
    (blobs / "weights").write_bytes(b"1")
    (root / "model.safetensors").symlink_to(blobs / "weights")
    (root / "linked").symlink_to(blobs)
    (root / "again").symlink_to(blobs)
    (blobs / "inner" / "above").symlink_to(root)
    check_files(root)
    os.mkfifo(blobs / "inner" / "pipe")
    with pytest.raises(ConfigError, match=r"inner/pipe: is a pipe, expected a file"):
        check_files(root)
