"""Parquet files of a LeRobot dataset, written row group by row group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.records.lerobot_video import FilePlace

LINES = 100  # kept in memory until they are written


class ParquetFiles:
    """Tables of one schema, in files of about max_bytes. The schema is that of the first rows."""

    def __init__(self, folder: Path, max_bytes: int, files_in_chunk: int) -> None:
        self._arrow = need_arrow()
        self.place = FilePlace(0, 0)
        self._folder, self._max_bytes, self._files_in_chunk = folder, max_bytes, files_in_chunk
        self._writer: Any = None
        self._path = folder
        self._schema: Any = None
        self._lines: list[Mapping[str, Any]] = []

    def begin(self) -> None:
        """What belongs in one file follows: in the current one, or, when that is full, in a new one."""
        if self._writer is not None and self._path.stat().st_size >= self._max_bytes:
            self.close()
            self.place = self.place.next(self._files_in_chunk)

    def write(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Rows as arrays [rows] or [rows, n]."""
        self._write({name: self._array(values) for name, values in columns.items()})

    def write_line(self, values: Mapping[str, Any]) -> None:
        """One row of whole numbers, numbers, texts, lists of them, and bool or None; written with others."""
        self._lines.append(values)
        if len(self._lines) >= LINES:
            self._write_lines()

    def close(self) -> None:
        if self._lines:
            self._write_lines()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_lines(self) -> None:
        lines, self._lines = self._lines, []
        columns = {name: [line[name] for line in lines] for name in lines[0]}
        self._write({name: self._arrow.array(values, self._type(values[0])) for name, values in columns.items()})

    def _write(self, arrays: dict[str, Any]) -> None:
        from pyarrow import parquet

        table = self._arrow.table(arrays, schema=self._schema)
        if self._writer is None:
            self._schema = table.schema
            self._path = self.place.path(self._folder, ".parquet")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = parquet.ParquetWriter(str(self._path), table.schema, compression="snappy")
        self._writer.write_table(table)

    def _array(self, values: NDArray[Any]) -> Any:
        """[rows, n] as lists of fixed length."""
        arrow = self._arrow
        if values.ndim == 1:
            return arrow.array(values.tolist(), arrow.string()) if values.dtype.kind == "U" else arrow.array(values)
        return arrow.FixedSizeListArray.from_arrays(arrow.array(values.reshape(-1)), values.shape[1])

    def _type(self, value: Any) -> Any:
        """None stands for a bool that is not known. A list's type is that of its first element."""
        arrow = self._arrow
        if isinstance(value, list):
            return arrow.list_(self._type(value[0]))
        kinds = {bool: arrow.bool_(), type(None): arrow.bool_(), int: arrow.int64(), float: arrow.float64()}
        return kinds.get(type(value), arrow.string())


def write_tasks(path: Path, tasks: Mapping[str, int]) -> None:
    """Tasks with their numbers. LeRobot reads them as a pandas table whose index is the task."""
    arrow = need_arrow()
    from pyarrow import parquet

    table = arrow.table({"task_index": list(tasks.values()), "task": arrow.array(list(tasks), arrow.string())})
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None}
        for name, kind, numpy_type in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    about = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0"}
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata({"pandas": json.dumps(about)}), str(path))


def need_arrow() -> Any:
    """pyarrow; ConfigError names the extra."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError("--to-lerobot needs pyarrow: in a clone, pip install '.[datasets]'") from error
    return pyarrow
