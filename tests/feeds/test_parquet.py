"""Results as Parquet: the same as the JSON lines, in parts that outlive a kill."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from feeds.commands import Feeds, ran, results, scratch
from feeds.fakes import PATIENCE, Clock, frame
from feeds.videos import clip
from reflex_runtime.feeds import ParquetResults, read_parquet
from reflex_runtime.feeds.outputs import parquet as module
from reflex_runtime.feeds.outputs.json_lines import SinkError, record_of
from reflex_runtime.feeds.outputs.parquet import check_parquet
from reflex_runtime.feeds.runtime.pipeline import Frame, Result
from reflex_runtime.observe import files


def result(number: int, value: Any, feed: str = "a", pts: float | None = 0.5) -> Result:
    return Result(Frame(frame().image, number, pts, 0.0), feed, value, 0.0123456)


def parts(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


BOXES = {"boxes": [[1, 2.5, 3, 4], [5, 6, 7, 8]], "scores": [0.5, 0.25], "labels": ["a", "b"]}
VALUES = [
    None, 7, "text", [], {}, [1, {"x": None}], BOXES, BOXES | {"tracker_ids": [None, 3], "text": "two"},
    BOXES | {"labels": ["a", 1]}, BOXES | {"scores": [0.5, float("nan")]}, BOXES | {"boxes": [[1, 2, 3]]},
    BOXES | {"zones": {"door": [0]}, "keypoints": [[[1, 2, 0.5]]]}, {"boxes": [], "scores": [], "labels": []},
    {"boxes": np.array([[1.5, 2, 3, 4]]), "labels": np.array([2])}, {"text": None}, {"text": "half \ud800 of a"},
    {"tracker_ids": [1.5]}, {"tracker_ids": [2**60]}, {"scores": [True]}, {"boxes": {"a": 1}}, {"labels": "abc"},
]  # fmt: skip


def test_f14_every_value_comes_back_as_its_json_line_has_it(tmp_path: Path) -> None:
    sink, rng = ParquetResults(tmp_path / "r.parquet"), random.Random(1)
    given = [result(k, value, rng.choice("ab"), rng.choice((None, 0.04 * k))) for k, value in enumerate(VALUES)]
    for each in given:
        sink(each)
    sink.close()
    lines = [json.loads(record_of(each).as_json().encode("utf-8", "replace")) for each in given]
    assert list(read_parquet(tmp_path / "r.parquet")) == lines
    table = parquet.read_table(tmp_path / "r.parquet")
    assert table.column_names == ["feed", "sequence", "pts", "latency_ms", "boxes", "scores", "labels", "tracker_ids", "text", "model", "value"]  # fmt: skip # noqa: E501
    assert str(table.schema.field("boxes").type) == "list<element: list<element: double>>"
    assert table["value"].to_pylist()[6] is None, "nothing is left of a usual result"


def test_f14_results_to_a_parquet_folder_are_those_of_the_lines_and_an_earlier_run_is_kept(tmp_path: Path) -> None:
    arguments = (f"a={clip(20)}", f"b={clip(10)}", "--onnx", "shapes", "--results")
    ran(*arguments, "r.jsonl", cwd=tmp_path)
    lines = {(line["feed"], line["sequence"]): line["value"] for line in results(tmp_path / "r.jsonl")}
    sink = ParquetResults(tmp_path / "r.parquet")
    sink(result(0, None))
    sink.close()
    feeds = ran(*arguments, "r.parquet", cwd=tmp_path)
    rows = {(row["feed"], row["sequence"]): row["value"] for row in read_parquet(tmp_path / "r.parquet")}
    assert rows == lines
    assert parts(tmp_path / "r.parquet") == parts(tmp_path / "r.parquet.1") == ["part-000000.parquet"]
    assert len(list(read_parquet(tmp_path / "r.parquet.1"))) == 1
    assert any("wrote results: r.parquet" in line for line in feeds.log)


SMALL = """
import logging
import threading
from reflex_runtime.feeds.outputs import parquet
parquet.ROWS = 5

def tell(result):
    if result.frame.sequence == 15:  # 10 to 14 were handed over, so 5 to 9 are written
        logging.getLogger().info("fifteen")
        threading.Event().wait()
    return result
"""


def test_f14_a_kill_leaves_every_part_but_the_last(tmp_path: Path) -> None:
    (scratch(tmp_path) / "small.py").write_text(SMALL)
    arguments = ("a=markers:feed=1,frames=40,live=0", "--processor", "mine:Sizes", "--stage", "small:tell")
    with Feeds(*arguments, "--results", "r.parquet", cwd=tmp_path) as feeds:
        feeds.wait_log("fifteen")
        feeds.process.kill()
        feeds.process.wait()
        feeds.process.poll = lambda: None  # type: ignore[method-assign]  # it was killed on purpose
    folder = tmp_path / "r.parquet"
    rows = list(read_parquet(folder))
    assert len(rows) in (10, 15), "the third part may have been ready"
    assert all(parquet.read_metadata(part).num_rows == 5 for part in folder.glob("part-*"))
    assert [row["sequence"] for row in rows] == list(range(len(rows)))


def test_f14_a_part_ends_after_so_many_rows_bytes_or_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, folder = Clock(), tmp_path / "r.parquet"
    monkeypatch.setattr(module, "ROWS", 4)
    monkeypatch.setattr(module, "BYTES", 5000)
    sink = ParquetResults(folder, clock)
    for k in range(4):
        sink(result(k, None))
    sink(result(4, "x" * 6000))
    sink(result(5, None))
    clock.now += 60.0
    sink(result(6, None))
    sink(result(7, None))
    sink.close()
    sink(result(8, None))  # a feed that was added after the last one had ended
    sink.close()
    rows = [parquet.read_metadata(folder / part).num_rows for part in parts(folder)]
    assert rows == [4, 1, 2, 1, 1]
    assert [row["sequence"] for row in read_parquet(folder)] == list(range(9))


def test_f14_a_part_that_cannot_be_written_is_said_once_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "ROWS", 2)
    monkeypatch.setattr(files, "create", full)
    sink = ParquetResults(tmp_path / "r.parquet")
    for k in range(3):
        sink(result(k, None))
    with pytest.raises(SinkError, match=r"r\.parquet failed: No space left on device; no more is written"):
        sink(result(3, None))
    sink(result(4, None))
    sink.close()
    assert sink.lost == 5


def test_f14_a_feed_does_not_wait_for_the_disk_until_a_second_part_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate, create = threading.Event(), threading.Event(), files.create

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert gate.wait(PATIENCE)
        return create(*arguments)

    monkeypatch.setattr(module, "ROWS", 2)
    monkeypatch.setattr(files, "create", slow)
    sink = ParquetResults(tmp_path / "r.parquet")
    for k in range(3):
        sink(result(k, None))
    assert entered.wait(PATIENCE)
    late = threading.Thread(target=sink, args=(result(3, None),), daemon=True)
    late.start()
    gate.set()
    late.join(PATIENCE)
    sink.close()
    assert [row["sequence"] for row in read_parquet(tmp_path / "r.parquet")] == [0, 1, 2, 3]


def test_f14_a_folder_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "r.parquet"
    folder.write_text("a file")
    with pytest.raises(OSError, match="is a file, and Parquet results are a directory of parts"):
        check_parquet(folder)
    folder.unlink()
    folder.mkdir()
    (folder / "thesis.doc").write_text("mine")
    with pytest.raises(OSError, match=r"has files that are no parts of results, such as thesis\.doc"):
        check_parquet(folder)
    sink = ParquetResults(folder)
    sink(result(0, None))
    with pytest.raises(SinkError, match="no parts of results"):
        sink.close()
    assert parts(folder) == ["thesis.doc"]


def test_f14_one_writer_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "r.parquet"
    first = ParquetResults(folder)
    first.begin()
    with pytest.raises(OSError, match="is being written"):
        check_parquet(folder)
    first.close()
    check_parquet(folder)
