"""Reads and writes values of one type: as JSON, msgpack, a form with files, or as the body itself.

The type is a function's annotation. `msgspec` checks it; this module adds arrays, pictures and models of pydantic. A
value that does not fit is a 422 that names the field.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args, get_origin

import msgspec
import numpy as np
import pybase64

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.functions.members import Members, told
from reflex_runtime.run.modules import in_one_line
from reflex_runtime.run.onnx_session import fits, shown
from reflex_runtime.run.processor import kind_of
from reflex_runtime.web.arrays import array_in, check_json, check_keys
from reflex_runtime.web.errors import JSON, MSGPACK, ClientError, InvalidJson, InvalidRequest, UnsupportedMediaType
from reflex_runtime.web.fields import client_errors, invalid, invalid_field, printable
from reflex_runtime.web.pictures import decode_picture, decoded_base64, picture_bytes

BYTES: Final = b"application/octet-stream"
NPY: Final = b"application/x-npy"
PNG: Final = b"image/png"
FORM: Final = b"multipart/form-data"
MOST_PARTS: Final = 256  # of a form
MOST_EXAMPLE: Final = 200  # numbers in an example
_CURL: Final = b"application/x-www-form-urlencoded"  # the default of curl
_NOT_RAW: Final = (JSON, b"application/msgpack", FORM)


class ArrayType(msgspec.Struct):
    """The type of an array's numbers, and its sizes; None for any."""

    dtype: Any
    dims: tuple[int | None, ...] | None = None


def unaliased(hint: Any) -> Any:
    """The type that an alias stands for (`type Name = …`); `NDArray` is one since NumPy 2.5."""
    while (meant := getattr(get_origin(hint) or hint, "__value__", None)) is not None:
        hint = meant[get_args(hint)] if get_args(hint) else meant
    return hint


class Values:
    """Values of one type.

    hint: the annotation. where: the beginning of errors. arrays: types of arrays, by the class that stands for each in
    `hint`. schema: JSON Schema; parts: the schemas that it refers to, under names that begin with `prefix`. raw:
    content types of bodies that are the value itself. slow: it has pictures, which must be decoded in a thread.
    """

    def __init__(self, hint: Any, where: str, arrays: Mapping[Any, ArrayType] | None = None, prefix: str = "") -> None:
        self.hint = hint = unaliased(hint)
        self.arrays, self.where = arrays or {}, where
        self.raw = self._raw_types()
        self._refers = f"#/components/schemas/{prefix}"
        self._own_parts: dict[str, Any] = {}  # schemas by pydantic
        self.slow = False
        try:
            self._json = msgspec.json.Decoder(hint, dec_hook=self._read)
            self._msgpack = msgspec.msgpack.Decoder(hint, dec_hook=self._read)
            self._members = Members(hint)
            (self.schema,), parts = msgspec.json.schema_components(
                (hint,), schema_hook=self._schema_of, ref_template=self._refers + "{name}"
            )
            for part in parts.values():
                if part.get("title", "").partition("[")[0] in self._members.closed:
                    part["additionalProperties"] = False
            self.parts = {prefix + name: part for name, part in parts.items()} | self._own_parts
        except ConfigError:
            raise
        except (TypeError, NameError, ValueError) as error:
            raise ConfigError(f"{where}: {_named(hint)} cannot be a schema: {in_one_line(error)}") from error

    # -- in ------------------------------------------------------------------------------------------------------------

    def decode(self, body: bytes, content_type: bytes) -> Any:
        """The value in a body. Raises a 400, 415 or 422 for a wrong one."""
        kind = content_type.partition(b";")[0].strip().lower()
        if kind.startswith(FORM):
            form = _form(body, content_type)
            value = self.convert(form)
            self._members.check(form)
            return value
        raw = self._is_raw(kind, body)
        if not body and not (raw and self.hint in (str, bytes)):
            raise InvalidJson("the body is empty: send an item")
        if raw:
            if self.hint is not str:
                return self.convert(body)
            try:
                return body.decode()
            except UnicodeDecodeError:
                raise invalid("body", "body: is not UTF-8") from None
        if b"msgpack" in kind:
            return self._decoded(self._msgpack, msgspec.msgpack.decode, body, "msgpack")
        if kind in (b"", JSON, _CURL) or kind.endswith(b"+json"):
            check_json(body)
            return self._decoded(self._json, msgspec.json.decode, body, "JSON")
        known = ", ".join(map(bytes.decode, (JSON, MSGPACK, FORM, *self.raw)))
        raise UnsupportedMediaType(printable(f"Content-Type {kind[:100].decode('latin-1')!r} is not one of {known}"))

    def _decoded(self, decoder: Any, decode: Callable[..., Any], body: bytes, form: str) -> Any:
        with client_errors(form=form):
            try:
                value = decoder.decode(body)
            except msgspec.ValidationError as error:
                raise self._refusal(error) from None
            if self._members.closed:
                self._members.check(decode(body))  # not `value`: a class may change its fields
            return value

    def _refusal(self, error: msgspec.ValidationError) -> InvalidRequest:
        found = invalid_field(error)
        return invalid(str(found.details["field"]), found.message + printable(told(error, self.hint)))

    def _raw_types(self) -> tuple[bytes, ...]:
        if self.array(self.hint) is not None:
            return (NPY,)
        if is_picture(self.hint):
            return (PNG, b"image/jpeg")
        return (BYTES,) if self.hint is bytes else (b"text/plain",) if self.hint is str else ()

    def _is_raw(self, kind: bytes, body: bytes) -> bool:
        """Whether a body of this content type is the value itself. curl's default is JSON for texts and lists."""
        if self.hint is str:
            return kind.startswith(b"text/")
        if kind == _CURL and self.raw == (NPY,) and body and not body.startswith(b"\x93NUMPY"):
            return False
        return bool(self.raw) and not (kind in _NOT_RAW or kind.endswith(b"+json"))

    def convert(self, value: Any) -> Any:
        """The value from a form, a tensor or a raw body. Raises a 422 for a wrong one."""
        try:
            if self.hint is bytes:
                return value if isinstance(value, bytes) else msgspec.convert(value, bytes)
            if self.array(self.hint) is not None or is_picture(self.hint):
                return self._read(self.hint, value)
            return msgspec.convert(value, self.hint, strict=False, dec_hook=self._read)
        except msgspec.ValidationError as error:
            raise self._refusal(error) from None
        except InvalidRequest:
            raise
        except ValueError as error:
            raise invalid("body", printable(f"body: {error}")) from None

    def array(self, hint: Any) -> ArrayType | None:
        """The type of the arrays of a type, such as `NDArray[np.float32]`; None for other values."""
        hint = unaliased(hint)
        if not (hint is np.ndarray or get_origin(hint) is np.ndarray):
            return self.arrays.get(hint) if self.arrays else None  # a hint need not be hashable
        of = next((get_args(arg) for arg in get_args(hint) if get_origin(arg) is np.dtype), ())
        if not (of and isinstance(of[0], type) and issubclass(of[0], np.generic) and of[0] not in _ABSTRACT):
            return ArrayType(None)
        dtype = np.dtype(of[0])
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise ConfigError(f"{self.where}: arrays of {dtype.name} cannot be sent; bool, int and float can")
        return ArrayType(dtype)

    def _read(self, hint: Any, value: Any) -> Any:
        """A value of a type that msgspec does not know. Raises ValueError for a wrong one."""
        if (array := self.array(hint)) is not None:
            return _array(value, array)
        if is_picture(hint):
            return _picture(value)
        if _is_pydantic(hint):
            try:
                return hint.model_validate(value)
            except ValueError as error:  # pydantic's is one
                raise _first(error) from None
        raise NotImplementedError(_named(hint))

    # -- out -----------------------------------------------------------------------------------------------------------

    def _schema_of(self, hint: Any) -> dict[str, Any]:
        if (array := self.array(hint)) is not None:
            return _tensor_schema(array)
        if is_picture(hint):
            self.slow = True
            return {"type": "string", "format": "image", "description": "a PNG or JPEG in base64"}
        if _is_pydantic(hint):
            found: dict[str, Any] = hint.model_json_schema(ref_template=self._refers + "{model}")
            self._own_parts |= {self._refers[21:] + name: part for name, part in found.pop("$defs", {}).items()}
            return found
        known = "plain types, dataclass, TypedDict, msgspec.Struct, pydantic, numpy.ndarray and PIL.Image are read"
        raise ConfigError(f"{self.where}: {_named(hint)} is no type that can be sent: {known}")


def encode(value: Any, packed: bool, name: str) -> tuple[bytes, bytes]:
    """A result of the function `name` as (body, content type). packed: the caller reads msgpack. Raises ProcessorError
    for a result that cannot be written."""
    if isinstance(value, bytes):
        return value, BYTES
    if is_picture(type(value)):
        return _png(value), PNG
    if packed:
        return _written(msgspec.msgpack.encode, value, _packed, name), MSGPACK
    return encode_text(value, name), JSON


def encode_text(value: Any, name: str) -> bytes:
    """A result of the function `name` in JSON, with bytes and pictures in base64. Raises ProcessorError."""
    return _written(msgspec.json.encode, value, _plain, name)


def _written(write: Callable[..., bytes], value: Any, hook: Callable[[Any], Any], name: str) -> bytes:
    try:
        return write(value, enc_hook=hook)
    except NotImplementedError as error:
        raise ProcessorError(f"{name} returned {in_one_line(error)}") from error
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ProcessorError(f"{name} returned a value that cannot be written: {in_one_line(error)}") from error


def _plain(value: Any) -> Any:
    """The form of a value in JSON: lists for arrays, base64 for pictures."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "tolist") and type(made := value.tolist()) is not type(value):  # arrays, their numbers, tensors
        return made
    if isinstance(value, np.longdouble):
        return float(value)
    if is_picture(type(value)):
        return pybase64.b64encode(_png(value)).decode()
    raise NotImplementedError(f"{kind_of(value)}, which has no form in JSON")


def _packed(value: Any) -> Any:
    """The form of a value in msgpack: bytes for arrays and pictures."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"dtype": value.dtype.str, "shape": value.shape, "data": np.ascontiguousarray(value).tobytes()}
    return _png(value) if is_picture(type(value)) else _plain(value)


def example_of(values: Values, given: Any = None) -> Any:
    """An item that may be sent, JSON-safe: the function's own, else one made from the schema. None if that is too large
    or does not fit, and for items of any type. Raises ConfigError if the function's own does not fit."""
    if given is None and not values.schema:
        return None
    try:
        sent = None if given is None else msgspec.json.decode(encode_text(given, "example"))
        made = _made(values.schema, values.parts) if given is None else sent
        text = msgspec.json.encode(made)
        values.decode(text, JSON)
    except Exception as error:
        if given is not None:
            raise ConfigError(f"{values.where}: the example does not fit: {in_one_line(error)}") from None
        return None
    return made if text.count(b",") <= MOST_EXAMPLE else None


# -- arrays, pictures, forms -------------------------------------------------------------------------------------------


def _array(value: Any, tensor: ArrayType) -> np.ndarray[Any, Any]:
    """An array from nested lists, {dtype, shape, data}, a file of numpy.save, or an array. Raises ValueError."""
    if isinstance(value, Mapping):  # data is base64 in JSON
        data = value.get("data")
        try:
            check_keys(value, "dtype", "shape", "data")
            data = decoded_base64(data) if isinstance(data, str) else data
            value = array_in(data, value.get("dtype"), value.get("shape"))
        except ClientError as error:
            raise ValueError(error.message) from None
    if isinstance(value, str):
        raise ValueError("is a text: send lists of numbers as JSON, or a file of numpy.save")
    if isinstance(value, bytes):
        try:
            value = np.load(io.BytesIO(value), allow_pickle=False)
        except Exception:
            raise ValueError("is no file of numpy.save; JSON needs Content-Type: application/json") from None
    if not isinstance(value, np.ndarray):
        try:
            sent, value = value, np.asarray(value)
        except ValueError:
            raise ValueError("rows of different lengths are no array") from None
        if value.dtype == float and np.dtype(tensor.dtype).kind in "iu" and (np.abs(value) >= 2.0**53).any():
            value = np.asarray(sent, object)  # NumPy makes floats of 2**63 beside smaller ones, too
            if any(isinstance(one, float) for one in value.flat):
                raise ValueError("integers from 2**53 on are not exact beside floats: send integers only")
            value = value.astype(np.uint64) if value.min() >= 0 else value
    if value.dtype.kind not in "biuf":
        raise ValueError("must be numbers of at most 64 bits, in lists of one length on each level")
    if tensor.dtype is not None and value.dtype != tensor.dtype:
        wanted = np.dtype(tensor.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            made = value.astype(wanted)
        same = np.isfinite(value) == np.isfinite(made) if wanted.kind == "f" else value == made
        if not same.all():
            raise ValueError(f"must be {wanted.name}, holds {value[~same].flat[0]}")
        value = made
    if tensor.dims is not None and not fits(tensor.dims, value.shape):
        raise ValueError(f"has shape {list(value.shape)}, must be {shown(tensor.dims)}")
    return value  # type: ignore[no-any-return]


def _picture(value: Any) -> Any:
    """A picture as Pillow's `Image`, in RGB and upright."""
    import PIL.Image

    try:
        if isinstance(value, str):
            value = picture_bytes(value, "picture")
        if not isinstance(value, bytes):
            raise ValueError("must be a PNG or JPEG")
        return PIL.Image.fromarray(decode_picture(value, "picture"))
    except InvalidRequest as error:
        raise ValueError(error.message) from None


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _form(body: bytes, content_type: bytes) -> Any:
    """The fields of a form; if a file is its only field, the content of the file."""
    from python_multipart.multipart import FormParser, parse_options_header

    _, options = parse_options_header(content_type)
    fields: dict[str, Any] = {}
    files: list[str] = []
    ends: list[bool] = []

    def found(name: bytes | None, value: Any, file: bool) -> None:
        text = (name or b"").decode("utf-8", "replace")
        if text in fields or len(fields) >= MOST_PARTS:
            raise ClientError(printable(f"the form has {text!r} twice, or over {MOST_PARTS} parts"))
        fields[text] = value
        files.extend([text] if file else [])

    def field(part: Any) -> None:
        found(part.field_name, (part.value or b"").decode("utf-8", "replace"), False)

    def file(part: Any) -> None:
        part.file_object.seek(0)
        found(part.field_name, part.file_object.read(), True)

    try:
        parser = FormParser(
            "multipart/form-data", field, file, lambda: ends.append(True), options.get(b"boundary"),
            config={"MAX_MEMORY_FILE_SIZE": len(body) + 1},
        )  # fmt: skip
        parser.write(body)
        parser.finalize()
        if not ends:
            raise ValueError("its last boundary is missing")
    except ClientError:
        raise
    except Exception as error:
        raise ClientError(printable(f"the body is no form: {error}")) from None
    return fields[files[0]] if len(files) == len(fields) == 1 else fields


# -- types -------------------------------------------------------------------------------------------------------------


def is_picture(hint: Any) -> bool:
    return isinstance(hint, type) and any(
        kind.__name__ == "Image" and kind.__module__ == "PIL.Image" for kind in hint.__mro__
    )


def _is_pydantic(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "model_validate") and hasattr(hint, "model_json_schema")


_ABSTRACT: Final = frozenset({np.generic, np.number, np.integer, np.signedinteger, np.unsignedinteger, np.inexact,
                              np.floating, np.complexfloating})  # fmt: skip


def _tensor_schema(tensor: ArrayType) -> dict[str, Any]:
    dtype = "numbers" if tensor.dtype is None else np.dtype(tensor.dtype).name
    kind = "boolean" if dtype == "bool" else "integer" if np.dtype(tensor.dtype or "f4").kind in "iu" else "number"
    schema: dict[str, Any] = {"type": kind} if tensor.dims is not None else {"type": "array", "items": {}}
    for size in reversed(tensor.dims or ()):
        schema = {"type": "array", "items": schema} | ({} if size is None else {"minItems": size, "maxItems": size})
    shape = "" if tensor.dims is None else f" of shape {shown(tensor.dims)}"
    return schema | {"description": f"an array of {dtype}{shape}: lists, or dtype, shape and data in base64"}


def _made(schema: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """A small value that a schema allows."""
    if "$ref" in schema:
        return _made(parts[schema["$ref"].rpartition("/")[2]], parts)
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _made(schema["anyOf"][0], parts)
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: _made(schema["properties"][name], parts) for name in schema.get("required", ())}
    if kind == "array":
        item = schema.get("items") or {"const": 1}
        if "prefixItems" in schema:
            return [_made(one, parts) for one in schema["prefixItems"]]
        return [_made(item, parts)] * min(schema.get("minItems", 1), MOST_EXAMPLE + 2)
    if kind == "string":
        return _PIXEL if schema.get("format") == "image" else "text"
    return {"integer": 1, "number": 1.0, "boolean": True, "null": None}[kind]


_PIXEL: Final = (  # a PNG of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQD3A0FDAAAAAElFTkSuQmCC"
)


def _named(hint: Any) -> str:
    return getattr(hint, "__qualname__", None) or str(hint)


def _first(error: Any) -> InvalidRequest:
    """The 422 for the first of pydantic's errors."""
    found = error.errors()[0] if hasattr(error, "errors") else {"loc": (), "msg": str(error)}
    place = ".".join(map(str, found["loc"])) or "body"
    return invalid(printable(str(found["loc"][0]) if found["loc"] else "body"), printable(f"{place}: {found['msg']}"))
