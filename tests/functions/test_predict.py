"""POST /predict: kinds of functions, types of items in every form that they come in, results of every kind."""

from __future__ import annotations

import base64
import contextlib
import enum
import http.client
import io
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as a_field
from decimal import Decimal
from typing import Any, Generic, NamedTuple, TypeVar

import msgpack
import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.functions.source import _signature
from reflex_runtime.functions.values import ArrayType, Values, encode
from reflex_runtime.run.process import telemetry_off
from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.oip import tensor_out
from serving.harness import Answer

from .door import Functions
from .served import CARELESS, KINDS, RAISED, TYPES, Family, Person

telemetry_off()
MSGPACK, NPY = "application/msgpack", "application/x-npy"
KINDS_OF_BODIES = (
    "application/json",
    MSGPACK,
    "multipart/form-data; boundary=edge",
    "application/x-npy",
    "image/png",
    "",
)
TYPED = [name for name in (*KINDS, *TYPES) if name not in ("plain_lambda", "anything")]
ROUNDS = 60  # of fuzz, for each function


@pytest.fixture(scope="module")
def server() -> Iterator[Functions]:
    """All of them. Nothing of what they are asked below ends it."""
    with Functions(*KINDS, *TYPES, *CARELESS, "root", "length", "result") as made:
        yield made
        assert made.get("/health").status == 200


def picture(size: tuple[int, int] = (3, 2), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", size, "red").save(file, kind)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def form(fields: dict[str, str | bytes]) -> tuple[bytes, str]:
    """A form, and its content type. Bytes are files."""
    text = b""
    for name, value in fields.items():
        file = "" if isinstance(value, str) else '; filename="a.bin"'
        data = value.encode() if isinstance(value, str) else value
        text += b'--edge\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (
            name.encode(),
            file.encode(),
            data,
        )
    return text + b"--edge--\r\n", "multipart/form-data; boundary=edge"


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def right(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json


def refused(answer: Answer, status: int, field: str | None = None) -> str:
    """The message of a refusal. field: that it names."""
    assert answer.status == status, answer.body
    body = answer.json
    assert body["request_id"] == answer.headers["x-request-id"]
    assert body.get("field") == field, body
    return str(body["message"])


# -- kinds of functions ------------------------------------------------------------------------------------------------


def test_every_kind_of_function_is_served(server: Functions) -> None:
    assert {name: right(server.predict(name, 21)) for name in KINDS} == dict.fromkeys(KINDS, 42)
    assert right(server.predict("root", 4.0)) == 2.0  # of numpy
    assert "len returned an int" in refused(server.predict("length", [1]), 500)


def test_a_careless_function_is_served_or_fails_by_itself(server: Functions) -> None:
    for i in range(3):
        assert "only be used in that same thread" in refused(server.predict("database", i), 500)
        assert right(server.predict("own_loop", i)) == i + 1
        assert right(server.predict("threads", i)) == i + 1
        assert right(server.predict("contexts", i)) >= 0


def test_a_wrong_path_and_a_wrong_method_are_said(server: Functions) -> None:
    assert "did you mean" in refused(server.predict("doble", 1), 404)
    assert "/predict/double" in refused(server.predict("", 1), 404)
    assert refused(server.get("/predict/double"), 405)


# -- types -------------------------------------------------------------------------------------------------------------


def test_an_alias_of_a_type_is_that_type() -> None:
    """`NDArray` is an alias since NumPy 2.5."""
    shape, kind = TypeVar("shape"), TypeVar("kind", bound=np.generic)
    array = TypeAliasType("array", np.ndarray[Any, np.dtype[kind]], type_params=(kind,))
    several = TypeAliasType("several", list[shape], type_params=(shape,))  # type: ignore[valid-type]

    def doubled(items: Any) -> Any:
        return items

    doubled.__annotations__ = {"items": several[array[np.uint8]], "return": several[array[np.float32]]}
    (item, result), *_ = _signature("here", doubled)
    assert [Values(hint, "here").array(hint) for hint in (item, result)] == [ArrayType(np.uint8), ArrayType(np.float32)]
    read = Values(item, "here")
    assert read.raw == (NPY.encode(),)
    assert read.decode(npy(np.array([1, 2])), NPY.encode()).dtype == np.uint8
    assert Values(TypeAliasType("words", str), "here").decode(b"as it is", b"text/plain") == "as it is"


def test_arrays_come_as_lists_bytes_and_files(server: Functions) -> None:
    wanted = [[2.0, 4.0], [6.0, 8.0]]
    array = np.array([[1, 2], [3, 4]], np.float32)
    packed = {"dtype": "<f4", "shape": [2, 2], "data": array.tobytes()}
    sent = packed | {"data": in_base64(array.tobytes())}
    for item in ([[1, 2], [3, 4]], [[1.0, 2.0], [3.0, 4.0]], sent):
        assert right(server.predict("arrays", item)) == wanted
    answer = server.send("arrays", msgpack.packb(packed), MSGPACK)
    assert answer.headers["content-type"] == MSGPACK
    back = msgpack.unpackb(answer.body)
    assert np.frombuffer(back["data"], back["dtype"]).reshape(back["shape"]).tolist() == wanted
    assert (
        right(server.send("arrays", msgpack.packb(array.tolist()), MSGPACK, {"Accept": "application/json"})) == wanted
    )
    assert right(server.send("arrays", npy(array), "application/x-npy")) == wanted
    assert right(server.send("arrays", npy(array.astype(np.float64)), "application/x-npy")) == wanted
    body, kind = form({"file": npy(array)})
    assert right(server.send("arrays", body, kind)) == wanted
    assert right(server.predict("any_array", [1, 2])) == "int64 (2,)"
    assert right(server.predict("any_array", 1.5)) == "float64 ()"
    assert right(server.predict("any_array", sent)) == "float32 (2, 2)"
    assert right(server.predict("whole", [250, 5])) == 255


@pytest.mark.parametrize(
    "item",
    [
        [1, [2]], "text", None, {}, {"a": 1}, [[1, None]], ["1"], {"dtype": "O", "shape": [1], "data": "AAAA"},
        {"dtype": "<f4", "shape": [3], "data": in_base64(b"1234")}, {"dtype": "nope", "shape": [1], "data": "AAAA"},
        {"dtype": "<f4", "shape": [1e300], "data": in_base64(b"1234")}, {"dtype": "<f4", "shape": 4, "data": "AAAA"},
        {"dtype": "f4,(", "shape": [1], "data": in_base64(b"1234")}, {"dtype": "<f4", "shape": [1], "data": "?"},
        {"dtype": {"names": 1}, "shape": [1], "data": "AAAA"}, {"dtype": ["f4"], "shape": [1], "data": "AAAA"},
        {"dtype": "<f4", "shape": [1] * 9, "data": in_base64(b"1234")}, {"dtype": "<f4", "shape": [None], "data": ""},
        {"dtype": "<f4", "shape": [4], "data": in_base64(bytes(16)), "order": "F"},
        {"shape": [1], "data": in_base64(b"12345678")}, [10**30],
        {"dtype": "<c8", "shape": [1], "data": in_base64(b"12345678")},
    ],
)  # fmt: skip
def test_what_is_no_array_is_refused(server: Functions, item: Any) -> None:
    assert refused(server.predict("arrays", item), 422, "body")


def test_numbers_that_a_type_does_not_hold_are_refused(server: Functions) -> None:
    for item in ([-1], [256], [1.5], [True, 2.5]):
        assert refused(server.predict("whole", item), 422, "body")
    assert "must be float32, holds 1e+39" in refused(server.predict("arrays", [0.5, 1e39]), 422, "body")
    assert refused(server.send("arrays", npy(np.array([-1e300])), "application/x-npy"), 422, "body")
    assert right(server.send("arrays", npy(np.array([np.inf])), "application/x-npy")) is not None
    answer = server.send("arrays", b"[1, 2]", "application/octet-stream")
    assert "JSON needs Content-Type: application/json" in refused(answer, 422, "body")
    assert refused(server.send("arrays", npy(np.array([object()])), "application/x-npy"), 422, "body")
    assert refused(server.send("arrays", npy(np.array(["text"])), "application/x-npy"), 422, "body")


def test_integers_that_floats_would_round_are_refused() -> None:
    values = Values(NDArray[np.int64], "f")
    assert values.decode(b"[9007199254740993]", b"application/json").tolist() == [2**53 + 1]
    assert values.decode(b"[9007199254740991, 1.0]", b"application/json").tolist() == [2**53 - 1, 1]
    for body in (b"[9007199254740993, 1.0]", b"[[9007199254740993], [1.0]]", b"[-9007199254740993, 1.0]"):
        with pytest.raises(InvalidRequest, match=r"from 2\*\*53 on are not exact beside floats: send integers only"):
            values.decode(body, b"application/json")
    large = [2**64 - 1, 1]
    assert Values(NDArray[np.uint64], "f").decode(json.dumps(large).encode(), b"application/json").tolist() == large
    for body, says in ((b"[9223372036854775808, 1]", "must be int64"), (b"[9223372036854775808, -1]", "64 bits")):
        with pytest.raises(InvalidRequest, match=says):
            values.decode(body, b"application/json")


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="it is a float64 here")
def test_long_doubles_are_written_as_floats() -> None:
    """Their memory has bytes that nobody set."""
    array = np.ones(2, np.longdouble)
    for value, wanted in ((array, [1.0, 1.0]), (array[0], 1.0)):
        assert json.loads(encode(value, False, "f")[0]) == wanted
        assert msgpack.unpackb(encode(value, True, "f")[0]) == wanted
    with pytest.raises(ProcessorError, match="f returned a clongdouble, which has no form in JSON"):
        encode(np.clongdouble(1), False, "f")


T = TypeVar("T")


class Pair(NamedTuple):
    person: Person
    count: int = 1


@dataclass(frozen=True)
class Tag:
    name: str
    size: int = 0


@dataclass
class Boxed(Generic[T]):
    value: T
    size: int = 0


@dataclass
class Merged:
    """Its own code changes what was sent."""

    price: Decimal
    more: dict[str, int] = a_field(default_factory=dict)

    def __post_init__(self) -> None:
        self.more = {"depth": 1} | {name: value for name, value in self.more.items() if value}


def test_a_class_may_change_its_fields_and_decimals_are_exact() -> None:
    values = Values(Merged, "f")
    for sent, more in ((b"{}", {"depth": 1}), (b'{"a":2}', {"depth": 1, "a": 2}), (b'{"a":0,"b":0}', {"depth": 1})):
        made = values.decode(b'{"price":12345678901234567.89,"more":%b}' % sent, b"application/json")
        assert (made.price, made.more) == (Decimal("12345678901234567.89"), more)


def test_the_schema_of_a_generic_class_is_closed_too() -> None:
    (part,) = Values(Boxed[int], "f").parts.values()
    assert (part["title"], part.get("additionalProperties")) == ("Boxed[int]", False)


@pytest.mark.parametrize(
    ("hint", "item", "field", "says"),
    [
        (Pair, [{"name": "a", "agee": 1}], "body",
         "unknown field body[0].agee; did you mean age?"),
        (set[Tag], [{"name": "a"}, {"name": "a", "sice": 1}], "body", "unknown field body[1].sice; did you mean size?"),
        (Boxed[int], {"value": 1, "sice": 1}, "sice", "unknown field sice; did you mean size?"),
        (list[Person], [{"name": "a"}, {"name": "a", "agee": 1}], "body",
         "unknown field body[1].agee; did you mean age?"),
        (dict[str, Person], {"b": {"name": "a", "agee": 1}}, "b", "unknown field b.agee; did you mean age?"),
        (dict[int, Person], {"1": {"name": "a", "agee": 1}}, "1", "unknown field 1.agee; did you mean age?"),
        (Person, {"name": 1, "agee": 1}, "name", "name: expected `str`, got `int`"),
        (Family, {"name": "a", "children": [{"name": 1}]}, "children", "children[0].name: expected `str`, got `int`"),
        (Family, {"name": "a", "children": [{}]}, "children", "children[0].name: is missing"),
        (list[Person], [{}], "body", "body[0].name: is missing"),
    ],
)
def test_a_wrong_field_is_named_wherever_it_is(hint: Any, item: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Values(hint, "f").decode(json.dumps(item).encode(), b"application/json")
    assert (caught.value.message, caught.value.details["field"]) == (says, field)


def test_structs_dataclasses_and_dicts_are_read_from_json_msgpack_and_forms(server: Functions) -> None:
    assert right(server.predict("boxes", {"left": 2})) == {"left": 1.0, "right": 2.0}
    assert msgpack.unpackb(server.send("boxes", msgpack.packb({"left": 2}), MSGPACK).body) == {
        "left": 1.0,
        "right": 2.0,
    }
    body, kind = form({"left": "2", "right": "3"})
    assert right(server.send("boxes", body, kind)) == {"left": 3.0, "right": 2.0}
    person = {"name": "Ada", "age": 3, "boxes": [{"left": 1}, {"left": 2}]}
    assert right(server.predict("people", person)) == "Ada 3 2"
    assert right(server.predict("queries", {"text": "a", "top": None})) == {"text": "A", "top": None}
    assert right(server.predict("orders", {"count": 1})) == {"count": 2, "name": "nobody"}
    body, kind = form({"count": "4", "name": "me"})
    assert right(server.send("orders", body, kind)) == {"count": 5, "name": "me"}
    assert right(server.predict("words", "yes")) is True
    assert right(server.predict("maybe", None)) is None
    assert right(server.predict("maybe", 3)) == 3


@pytest.mark.parametrize(
    ("name", "item", "field"),
    [
        ("double", "1", "body"), ("double", 1.5, "body"), ("double", None, "body"), ("double", [1], "body"),
        ("boxes", {}, "left"), ("boxes", {"left": "1"}, "left"), ("boxes", 1, "body"), ("boxes", [], "body"),
        ("people", {"name": "a", "age": "b"}, "age"), ("people", {"age": 1}, "name"),
        ("people", {"name": "a", "boxes": [{"left": 1}, {}]}, "boxes"), ("people", {"name": "a", "boxes": 1}, "boxes"),
        ("people", {"name": "a", "boxes": [{"left": 1}, {"left": "x"}]}, "boxes"),
        ("queries", {"text": 1, "top": 1}, "text"), ("queries", {"text": "a"}, "top"), ("queries", {"top": 1}, "text"),
        ("orders", {"count": 0}, "count"), ("orders", {"count": "x"}, "count"), ("orders", {}, "count"),
        ("words", "perhaps", "body"), ("words", 1, "body"), ("maybe", "x", "body"), ("texts", 1, "body"),
        ("pictures", "AAAA", "body"), ("pictures", 1, "body"), ("pictures", "?", "body"), ("raw_bytes", "?", "body"),
        ("scenes", {"camera": "AAAA", "matrix": [1]}, "camera"), ("scenes", {"matrix": [1]}, "camera"),
        ("scenes", {"camera": in_base64(picture()), "matrix": "x"}, "matrix"),
        ("scenes", {"camera": in_base64(picture()), "matrix": [1], "kind": "dusk"}, "kind"),
        ("scenes", {"camera": in_base64(picture()), "matrix": [1], "person": {"name": 1}}, "person"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_the_422_that_names_its_field(server: Functions, name: str, item: Any, field: str) -> None:
    for answer in (
        server.predict(name, item),
        server.send(name, msgpack.packb(item), MSGPACK, {"Accept": "application/json"}),
    ):
        assert refused(answer, 422, field)


def test_pictures_come_as_bodies_forms_and_base64_and_go_out_as_png(server: Functions) -> None:
    for kind, mime in (("PNG", "image/png"), ("JPEG", "image/jpeg")):
        data = picture((3, 2), kind)
        body, multipart = form({"anything": data})
        for answer in (
            server.send("pictures", data, mime),
            server.send("pictures", body, multipart),
            server.send("pictures", msgpack.packb(data), MSGPACK),
            server.predict("pictures", base64.urlsafe_b64encode(data).decode()),
            server.predict("pictures", base64.encodebytes(data).decode()),
            server.predict("pictures", in_base64(data)),
            server.predict("pictures", f"data:{mime};base64,{in_base64(data)}"),
        ):
            assert (answer.status, answer.headers["content-type"]) == (200, "image/png"), answer.body
            assert PIL.Image.open(io.BytesIO(answer.body)).size == (6, 2)
    assert refused(server.send("pictures", b"no picture", "image/png"), 422, "body")
    assert refused(server.send("pictures", picture()[:45], "image/png"), 422, "body")


def test_bytes_and_texts_are_the_body_itself(server: Functions) -> None:
    for body, kind in ((b"\0abc", "application/octet-stream"), (b"\0abc", ""), (b"\0abc", "application/pdf")):
        answer = server.send("raw_bytes", body, kind)
        assert (answer.status, answer.body, answer.headers["content-type"]) == (
            200,
            b"cba\0",
            "application/octet-stream",
        )
    assert server.predict("raw_bytes", in_base64(b"\0abc")).body == b"cba\0"
    assert server.send("raw_bytes", msgpack.packb(b"\0abc"), MSGPACK).body == b"cba\0"
    body, kind = form({"file": b"\0abc"})
    assert server.send("raw_bytes", body, kind).body == b"cba\0"
    assert right(server.send("texts", "ä".encode(), "text/plain")) == "Ä"
    assert right(server.predict("texts", "ä")) == "Ä"
    assert refused(server.send("texts", b"\xff", "text/plain"), 422, "body")


def test_a_type_of_everything_is_read_in_every_form(server: Functions) -> None:
    wanted = {"size": [3, 2], "sum": 3.0, "kind": "night", "raw": 2, "name": "Ada"}
    scene = {"kind": "night", "matrix": [[1, 2]], "person": {"name": "Ada"}}
    packed = msgpack.packb(scene | {"camera": picture(), "raw": b"ab"})
    assert right(server.predict("scenes", scene | {"camera": in_base64(picture()), "raw": in_base64(b"ab")})) == wanted
    assert msgpack.unpackb(server.send("scenes", packed, MSGPACK).body) == wanted
    body, kind = form(
        {"camera": picture(), "matrix": npy(np.array([[1, 2]], np.float32)), "kind": "night", "raw": b"ab"}
    )
    assert right(server.send("scenes", body, kind)) == wanted | {"name": None}


def test_without_annotations_items_are_json_values(server: Functions) -> None:
    for item in (1, 1.5, "text", None, True, [1, [2]], {"a": {"b": [None]}}, 10**30, 1e300):
        assert right(server.predict("anything", item)) == item


def test_a_body_of_another_type_is_415_and_a_broken_one_is_400(server: Functions) -> None:
    assert "application/json" in refused(server.send("double", b"1", "text/csv"), 415)
    assert refused(server.send("double", b"1", "image/png"), 415)
    assert right(server.send("double", b"1")) == 2
    assert right(server.send("double", b"1", "application/json; charset=utf-8")) == 2
    assert right(server.send("double", b"1", "application/vnd.api+json")) == 2
    assert right(server.send("double", b"1", "application/x-www-form-urlencoded")) == 2  # curl -d
    for body in (b"", b"{", b"nul", b"\xff", b"1 2", b"[" * 100_000):
        assert refused(server.send("anything", body, "application/json"), 400)
    for body in (b"", b"\xc1", b"\x92\x01", b"\x01\x01", b"\x81\x81\x01\x02\x03"):
        assert refused(server.send("anything", body, MSGPACK, {"Accept": "application/json"}), 400)
    for body, kind in (
        (b"x", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=edge"),
        (form({"a": "1"})[0][:30], "multipart/form-data; boundary=edge"),
    ):
        assert refused(server.send("boxes", body, kind), 400)
    assert "twice" in refused(
        server.send("boxes", form({"left": "1"})[0][:-10] + form({"left": "2"})[0], form({})[1]), 400
    )


def test_a_field_that_a_type_does_not_have_is_refused(server: Functions) -> None:
    item = {"name": "a", "agee": 1}
    as_json = {"Accept": "application/json"}
    says = "unknown field agee; did you mean age?"
    assert refused(server.predict("people", item), 422, "agee") == says
    assert refused(server.send("people", msgpack.packb(item), MSGPACK, as_json), 422, "agee") == says
    assert refused(server.send("people", *form({"name": "a", "agee": "1"})), 422, "agee") == says
    assert refused(server.predict("queries", {"text": "a", "top": 1, "topp": 1}), 422, "topp")
    scene = {"camera": in_base64(picture()), "matrix": [1], "person": {"name": "a", "nam": "b"}}
    assert "unknown field person.nam; did" in refused(server.predict("scenes", scene), 422, "person")
    family = {"name": "a", "children": [{"name": "b", "children": [{"name": "c", "agee": 1}]}]}
    says = refused(server.predict("families", family), 422, "children")
    assert says.startswith("unknown field children[0].children[0].agee; did you mean age")
    assert right(server.predict("families", {"name": "a", "children": [{"name": "b"}]})) == 2
    parts = server.get("/openapi.json").json["components"]["schemas"]
    assert parts["people.Person"]["additionalProperties"] is False
    assert "additionalProperties" not in parts["boxes.Box"]
    assert right(server.predict("boxes", {"left": 1, "lift": 2}))  # the setting of its class


def test_curl_sends_lists_as_json_for_arrays_too(server: Functions) -> None:
    curl = "application/x-www-form-urlencoded"
    assert right(server.send("arrays", b"[5.1, 3.5]", curl)) == pytest.approx([10.2, 7])
    assert right(server.send("arrays", npy(np.float32([1, 2])), curl)) == [2, 4]
    assert "not JSON" in refused(server.send("arrays", b"hello", curl), 400)


def test_a_type_of_an_array_may_be_its_name(server: Functions) -> None:
    data = {"shape": [2], "data": in_base64(np.array([1, 2], "<f4").tobytes())}
    assert right(server.predict("any_array", data | {"dtype": "float32"})) == "float32 (2,)"
    assert "such as float32 or <f4" in refused(server.predict("any_array", data | {"dtype": "float"}), 422, "body")


def test_errors_list_what_is_allowed(server: Functions) -> None:
    says = refused(server.predict("words", "yess"), 422, "body")
    assert says.endswith("; must be one of yes, no; did you mean yes?")
    scene = {"camera": in_base64(picture()), "matrix": [1], "kind": "dusk"}
    assert refused(server.predict("scenes", scene), 422, "kind").endswith("; must be one of day, night")
    assert refused(server.predict("people", [1, 2]), 422, "body").endswith("; its fields are name, age, boxes")
    scene_form = form({"camera": picture(), "matrix": "[1,2]"})
    assert "is a text: send lists of numbers as JSON" in refused(server.send("scenes", *scene_form), 422, "matrix")
    for name, kind in (("people", ""), ("people", MSGPACK), ("arrays", NPY), ("texts", "application/json")):
        says = refused(server.send(name, b"", kind, {"Accept": "application/json"}), 400)
        assert says == "the body is empty: send an item"


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_of_every_kind_are_written(server: Functions) -> None:
    kinds = {
        "array": [0, 1, 2], "scalar": 1.5, "index": 7, "truth": True, "nothing": None, "nan": None, "huge": 10**30,
        "set": [1], "tuple": [1, 2], "struct": {"left": 1.0, "right": 1.0}, "model": {"count": 1, "name": "nobody"},
        "text": "text", "clear": 1,
    }  # fmt: skip
    assert {kind: right(server.predict("result", kind)) for kind in kinds} == kinds
    packed = {
        kind: msgpack.unpackb(server.send("result", msgpack.packb(kind), MSGPACK).body)
        for kind in kinds
        if kind not in ("array", "huge", "nan")
    }
    assert packed == {kind: kinds[kind] for kind in packed}
    assert server.predict("result", "bytes").body == b"\0\xff"
    assert server.predict("result", "picture").headers["content-type"] == "image/png"


def test_what_cannot_be_written_and_what_is_raised_is_a_500(server: Functions) -> None:
    for kind in ("objects", "circle", "complex", "object", "keys", "surrogate"):
        assert "result returned " in refused(server.predict("result", kind), 500)
    assert "of this item" in refused(server.predict("result", "own error"), 500)
    for kind in RAISED:
        assert f"it is {kind}" in refused(server.predict("result", kind), 500)
        assert f"it is {kind}" in refused(server.predict("result", kind), 500)
    for kind in ("short", "dict", "generator", "none"):
        assert "one result for each item" in refused(server.predict("result", kind), 500)
    assert right(server.predict("result", "after all")) == "after all"


# -- the document ------------------------------------------------------------------------------------------------------


def test_the_document_is_whole_and_its_examples_are_answered(server: Functions) -> None:
    text = server.get("/openapi.json").body.decode()
    document = json.loads(text)
    assert {*re.findall(r'"#/components/schemas/([^"]*)"', text)} <= document["components"]["schemas"].keys()
    assert document["paths"]["/predict/double"]["post"]["summary"] == "Twice the number."
    assert [name for name in TYPED if not answers_its_example(server, document, name)] == []


def answers_its_example(server: Functions, document: Any, name: str) -> bool:
    """Whether the example in the document is answered."""
    body = document["paths"][f"/predict/{name}"]["post"]["requestBody"]["content"]["application/json"]
    return "example" in body and server.predict(name, body["example"]).status == 200


def test_what_is_written_as_it_is_has_its_type_in_the_document(server: Functions) -> None:
    paths = json.loads(server.get("/openapi.json").body)["paths"]
    answers = {
        name: [*paths[f"/predict/{name}"]["post"]["responses"]["200"]["content"]]
        for name in ("pictures", "raw_bytes", "texts")
    }
    assert answers == {
        "pictures": ["image/png"],
        "raw_bytes": ["application/octet-stream"],
        "texts": ["application/json"],
    }


# -- fuzz --------------------------------------------------------------------------------------------------------------


def test_no_body_is_a_500(server: Functions) -> None:
    """Bodies that nearly fit, and bytes of any kind: an answer or a refusal."""
    seed = 35
    draw = random.Random(seed)
    bad = []
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        for name in TYPES:
            for kind in KINDS_OF_BODIES * (ROUNDS // len(KINDS_OF_BODIES)):
                body = body_of(draw, kind)
                connection.request("POST", server.path(name), body, {"Content-Type": kind} if kind else {})
                answer = connection.getresponse()
                said = answer.read()
                if answer.status >= 500:
                    bad.append((name, kind, body[:200], said[:200]))
    assert bad == []


def test_no_tensor_is_a_500(server: Functions) -> None:
    """The same over the Open Inference Protocol: tensors of other types, shapes and lengths than its metadata say."""
    draw = random.Random(36)
    bad = []
    for name in TYPED:
        ports = server.get(f"/v2/models/{name}").json["inputs"]
        for _ in range(12):
            sent = {"inputs": [tensor_of(draw, port) for port in ports]}
            if draw.random() < 0.2:
                sent[draw.choice(["parameters", "outputs", "id", "inputs"])] = value_of(draw, 2)
            answer = server.ask("POST", f"/v2/models/{name}/infer", json.dumps(sent, default=in_base64).encode())
            if answer.status >= 500:
                bad.append((name, sent, answer.body[:200]))
    assert bad == []


class Colour(enum.StrEnum):
    RED = "red"


def test_texts_of_every_type_are_elements_of_bytes() -> None:
    labels = [np.array(["cat"])[0], Colour.RED, "é", np.array([b"raw"])[0]]
    tensor = tensor_out("result", labels * 2000)
    assert tensor.values.shape == (8000, 1)
    assert tensor.values[:4, 0].tolist() == [b"cat", b"red", "é".encode(), b"raw"]
    with pytest.raises(ValueError, match="surrogates"):
        tensor_out("result", ["\ud800"])


def tensor_of(draw: random.Random, port: dict[str, Any]) -> dict[str, Any]:
    datatype = draw.choice([*[port["datatype"]] * 6, "BYTES", "FP32", "INT64", "UINT8", "X"])
    shape = [2, *(draw.randrange(3) if size == -1 else draw.choice([size, size, 2]) for size in port["shape"][1:])]
    values = ["a", "1", "[1]", in_base64(picture())] if datatype == "BYTES" else [1, 2.5, -1, 10**30, True, None]
    data = [draw.choice(values) for _ in range(2)] * 2
    made = {"name": port["name"], "datatype": datatype, "shape": shape, "data": data[: max(1, int(np.prod(shape)))]}
    if draw.random() < 0.3:
        made[draw.choice(list(made))] = draw.choice([value_of(draw, 2), [2**62, 4], [-1], [1] * 40])
    return made


def body_of(draw: random.Random, kind: str) -> bytes:
    """A body: a value as it would be sent, broken in one place or not; or noise."""
    value = value_of(draw, 3)
    if kind == "application/json":
        body = json.dumps(value, default=in_base64).encode()
    elif kind == MSGPACK:
        body = (
            msgpack.packb(value, default=str, use_bin_type=True)
            if draw.random() < 0.9
            else bytes([draw.choice([0x81, 0xC7, 0xD6, 0xDF, 0xC1]), *draw.randbytes(9)])
        )
    elif kind.startswith("multipart"):
        fields = value if isinstance(value, dict) else {"file": draw.randbytes(8)}
        body, _ = form(
            {
                str(k).replace('"', "").encode("ascii", "replace").decode(): v
                if isinstance(v, bytes)
                else str(v).encode("utf-8", "replace").decode()
                for k, v in fields.items()
            }
        )
    elif kind == "application/x-npy":
        body = npy(np.frombuffer(draw.randbytes(16), draw.choice(["<f4", "u1", "<f8", "S4", "<c8", "M8[s]"])))
    else:
        body = picture((draw.randrange(1, 9), draw.randrange(1, 9)), draw.choice(["PNG", "JPEG"]))
    if body and draw.random() < 0.4:
        at = draw.randrange(len(body))
        body = draw.choice(
            [
                body[:at],
                body[:at] + draw.randbytes(draw.randrange(1, 4)) + body[at + 1 :],
                body + draw.randbytes(2),
                body[at:],
            ]
        )
    return body


NAMES = (
    "left",
    "right",
    "name",
    "age",
    "boxes",
    "text",
    "top",
    "count",
    "camera",
    "matrix",
    "kind",
    "person",
    "raw",
    "dtype",
    "shape",
    "data",
)


def value_of(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(9 if depth else 6)
    if kind == 0:
        return draw.choice([0, -1, 1, 255, 2**31, 2**63, 2**64 - 1, -(2**63)])
    if kind == 1:
        return draw.choice([0.0, 1.5, -1e308, 1e-300, float("inf"), float("nan")])
    if kind == 2:
        return draw.choice(
            [
                "",
                "yes",
                "day",
                "<f4",
                "f4,(",
                "O",
                "V",
                "S9",
                "(2,)f4",
                "AAAA",
                "data:,",
                "ä",
                "1",
                in_base64(picture()),
            ]
        )
    if kind == 3:
        return draw.choice([None, True, False])
    if kind == 4:
        return draw.choice([b"", b"abcd", picture(), npy(np.zeros(2))])
    if kind == 5:
        return {
            "dtype": value_of(draw, 0),
            "shape": [value_of(draw, 0)],
            "data": draw.choice([b"12345678", in_base64(b"12345678"), None]),
        }
    if kind == 6:
        return [value_of(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice(NAMES): value_of(draw, depth - 1) for _ in range(draw.randrange(5))}
