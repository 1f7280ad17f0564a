"""Anyone's ONNX model as a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.processors.base import BaseProcessor
from reflex_runtime.processors.onnx_session import OnnxSession
from reflex_runtime.processors.ports import fits, shown
from reflex_runtime.processors.providers import CPU


class OnnxProcessor(BaseProcessor):
    """Anyone's model: a payload is {input name: array without batch axis}, a result {output name: array}.

    All rows of a batch run in one call. A payload that does not fit the graph fails alone, before the call. Inputs with
    several symbolic axes need partitions by shape: rows of one batch must have equal shapes, or the odd ones fail.
    """

    def __init__(self, path: str | Path, provider: str = CPU, threads: int = 1) -> None:
        self.any_thread = provider == CPU
        self.session = OnnxSession(Path(path), provider=provider, threads=threads)

    def run(self, batch: Batch) -> Sequence[dict[str, NDArray[Any]] | ProcessorError]:
        results: list[Any] = []
        fitting: list[Mapping[str, NDArray[Any]]] = []
        for ticket in batch.grants:
            try:
                row = self._row(ticket.request.payload)
                if fitting and any(row[name].shape != fitting[0][name].shape for name in row):
                    raise ProcessorError("its shape differs from the rest of the batch; use a partition per shape")
                fitting.append(row)
                results.append(None)
            except ProcessorError as error:
                results.append(error)
        if fitting:
            stacked = {name: np.stack([row[name] for row in fitting]) for name in self.session.inputs}
            outputs = self.session.run(stacked, batch.notes)
            done = iter([{name: array[i] for name, array in outputs.items()} for i in range(len(fitting))])
            results = [next(done) if result is None else result for result in results]
        return results

    def _row(self, payload: Any) -> dict[str, NDArray[Any]]:
        """The payload's arrays in the graph's types, or ProcessorError naming what does not fit."""
        if not isinstance(payload, Mapping) or set(payload) != set(self.session.inputs):
            found = sorted(map(str, payload)) if isinstance(payload, Mapping) else type(payload).__name__
            raise ProcessorError(f"payload: found {found}, expected the inputs {sorted(self.session.inputs)}")
        row = {}
        for name, port in self.session.inputs.items():
            try:
                array = np.asarray(payload[name]).astype(port.dtype, casting="same_kind", copy=False)
            except (TypeError, ValueError) as error:
                raise ProcessorError(f"payload[{name!r}]: {error}") from error
            if not fits(array.shape, port.dims[1:]):
                raise ProcessorError(f"payload[{name!r}]: found shape {array.shape}, expected {shown(port.dims[1:])}")
            row[name] = array
        return row
