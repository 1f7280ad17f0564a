"""Functions as models of the Open Inference Protocol: each row of the tensors is an item.

An item or result whose fields are arrays, numbers, texts or pictures has a tensor for each field; a single such value
is the tensor `item` or `result`. Any other type is JSON in a tensor of BYTES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, get_type_hints

import numpy as np

from reflex_runtime.core.errors import ProcessorError, ReflexError
from reflex_runtime.functions.server import Predict, Prediction, PredictOptions, options_of
from reflex_runtime.functions.values import Values, encode_text, is_picture, unaliased
from reflex_runtime.web.batch_server import together
from reflex_runtime.web.errors import JSON, NotFound, Reported
from reflex_runtime.web.fields import invalid_input
from reflex_runtime.web.oip import (
    BYTES,
    Described,
    InferParameters,
    InferRequest,
    OipAnswer,
    OipCall,
    Tensor,
    datatype_of,
    tensor_out,
)

WIRE: Final = "oip"
MOST_ROWS: Final = 256  # in a message
_PLAIN: Final = {bool: "BOOL", int: "INT64", float: "FP64", str: BYTES, bytes: BYTES}


class TensorField(NamedTuple):
    """A tensor. hint: the type of its values; None for JSON."""

    datatype: str
    shape: Sequence[int]
    hint: Any


def ports_of(values: Values, alone: str) -> tuple[dict[str, TensorField], bool]:
    """The tensors of a type, and whether each is one of its fields. alone: the tensor's name for a single value."""
    if (port := _port(values, values.hint)) is not None:
        return {alone: port}, False
    try:
        fields = get_type_hints(values.hint, include_extras=True) if hasattr(values.hint, "__annotations__") else {}
    except (NameError, TypeError):
        fields = {}
    found = {name: _port(values, hint) for name, hint in fields.items()}
    if found and None not in found.values():
        return found, True  # type: ignore[return-value]
    return {alone: TensorField(BYTES, [-1, 1], None)}, False


def _port(values: Values, hint: Any) -> TensorField | None:
    hint = unaliased(hint)
    if (array := values.array(hint)) is not None:
        dims = [-1] if array.dims is None else [-1 if size is None else size for size in array.dims]
        return TensorField("FP32" if array.dtype is None else datatype_of(array.dtype), [-1, *dims], hint)
    if is_picture(hint):
        return TensorField(BYTES, [-1, 1], hint)
    return TensorField(_PLAIN[hint], [-1, 1], hint) if hint in _PLAIN else None


class FunctionParameters(InferParameters, kw_only=True):
    """The parameters of a request to a function."""

    client: str | None = None


class FunctionAsModel:
    """One function as an OIP model."""

    def __init__(self, predict: Predict) -> None:
        self._predict, self.names = predict, [predict.served.name]
        self._items, self._by_field = ports_of(predict.served.items, "item")
        self._results, self._result_fields = ports_of(predict.served.results, "result")
        self.inputs, self.outputs = _described(self._items), _described(self._results)

    @property
    def ready(self) -> bool:
        return self._predict.server.state == "ready"

    def refused(self, call: OipCall, error: ReflexError) -> None:
        self._prediction(call, 0, 1).refuse(error)

    def _prediction(self, call: OipCall, row: int, rows: int) -> Prediction:
        id = f"{call.request_id}.{row}" if rows > 1 else call.request_id
        client = (call.client, row) if rows > 1 else call.client
        made = Prediction(self._predict.server, self.names[0], WIRE, id, client, call.started, call)
        made.received = call.received or call.started
        return made

    async def infer(self, call: OipCall, sent: InferRequest) -> OipAnswer:
        served = self._predict.served
        if served.streams:
            raise NotFound(f"{served.name} streams its results: use POST /predict/{served.name}")
        rows = sent.rows(self._items, (), self._results, MOST_ROWS)
        own, given = FunctionParameters.of(sent), {tensor.name: tensor for tensor in sent.inputs}
        limit = own.deadline_ms(call.left_ms)
        options = options_of({"deadline_ms": limit, "priority": own.level, "client": own.client})
        items = [self._item(given, row) for row in range(rows)]
        results = await together(self._row(call, row, rows, item, options) for row, item in enumerate(items))
        try:
            return OipAnswer(self._tensors(results))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            wrong = ProcessorError(f"its results are no tensors of {', '.join(self._results)}: {error}")
            raise Reported(wrong, call.request_id) from error

    def _item(self, given: Mapping[str, Tensor], row: int) -> Any:
        values = self._predict.served.items
        found = {name: _value(given[name], row, port.hint) for name, port in self._items.items()}
        if self._by_field:
            return values.convert(found)
        ((name, port),) = self._items.items()
        return values.decode(found[name], JSON) if port.hint is None else values.convert(found[name])

    async def _row(self, call: OipCall, row: int, rows: int, item: Any, options: PredictOptions) -> Any:
        prediction = self._prediction(call, row, rows)
        try:
            with prediction:
                return await self._predict.value(prediction, item, options)
        except ReflexError as error:
            raise Reported(error, prediction.request_id) from None

    def _tensors(self, results: Sequence[Any]) -> list[Tensor]:
        if self._result_fields:
            columns = {name: [_field(result, name) for result in results] for name in self._results}
            return [tensor_out(name, column) for name, column in columns.items()]
        if self._results["result"].hint is None:
            return [tensor_out("result", [encode_text(result, self.names[0]) for result in results])]
        return [tensor_out("result", results)]


def _described(ports: Mapping[str, TensorField]) -> list[Described]:
    return [(name, port.datatype, port.shape) for name, port in ports.items()]


def _value(tensor: Tensor, row: int, hint: Any) -> Any:
    """One row of a tensor, as a value of the type `hint`."""
    value = tensor.row(row)
    if tensor.datatype == BYTES:
        return value.decode("utf-8", "replace") if hint is str else value
    if hint in (bytes, str, None) or is_picture(hint):
        raise invalid_input(tensor.name, "must be BYTES")
    if hint not in _PLAIN:
        return np.asarray(value)
    if value.size != 1:
        raise invalid_input(tensor.name, "must have one number in each row")
    return value.item()


def _field(result: Any, name: str) -> Any:
    return result[name] if isinstance(result, Mapping) else getattr(result, name)
