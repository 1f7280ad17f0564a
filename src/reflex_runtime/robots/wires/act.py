"""POST /act over HTTP: requests and answers in JSON, msgpack, and json-numpy.

msgspec decodes and validates in one pass; its messages carry the path of the field. The two formats differ only in
images and arrays: base64 text in JSON, bytes in msgpack.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
import numpy as np

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.serving.handler import Asked, PendingRequest, RequestHandler
from reflex_runtime.robots.serving.question import (
    ACT,
    JSON_NUMPY,
    LARGEST,
    MAX_INSTRUCTION,
    MAX_STATE,
    ActAnswer,
    Array,
    Image,
    Level,
    Question,
    RequestLimits,
    says,
)
from reflex_runtime.robots.wires import json_numpy
from reflex_runtime.robots.wires.common import LIMITS
from reflex_runtime.robots.wires.json_numpy import GrootJson, JsonNumpy
from reflex_runtime.web.errors import (
    JSON,
    MSGPACK,
    CallerLeft,
    ClientError,
    Headers,
    InvalidJson,
    InvalidRequest,
    NotReady,
    Reported,
)
from reflex_runtime.web.fields import MAX_VALUES, encode, invalid, invalid_field, is_json, printable
from reflex_runtime.web.request import LARGE, OPERATOR_BODY, HttpRequest, HttpResponse, Route, header_text

# -- bodies ------------------------------------------------------------------------------------------------------------

MAX_IMAGES = 64
MAX_ESCAPES = 500_000  # backslashes in a body; some encoders write each / of a base64 text as \/

Number = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": -LARGEST, "maximum": LARGEST})]
Numbers = Annotated[list[Number], msgspec.Meta(max_length=MAX_STATE)]
Picture = Annotated[str, msgspec.Meta(extra_json_schema={"format": "image", "contentEncoding": "base64"})]
Instruction = Annotated[str, msgspec.Meta(max_length=MAX_INSTRUCTION)]
_MANY = msgspec.Meta(max_length=MAX_IMAGES)


class _ActBody(RequestLimits, forbid_unknown_fields=True, kw_only=True):
    instruction: Annotated[Instruction | None, says("what to do, in words")] = None
    priority: Annotated[Level, says("urgent goes first and at once, background fills free places")] = "default"


class ActJson(_ActBody, kw_only=True):
    """The JSON body."""

    image: Annotated[Picture | None, says("PNG or JPEG as base64, or a data URL of it")] = None
    image_wrist: Annotated[Picture | None, says("the same, for the camera of that name")] = None
    images: Annotated[Annotated[dict[str, Picture], _MANY] | None, says("further cameras by name")] = None
    state: Annotated[Numbers | None, says("the robot's state in its own units; finite")] = None


class ActMsgpack(_ActBody, kw_only=True):
    """The msgpack body."""

    image: bytes | Array | None = None
    image_wrist: bytes | Array | None = None
    images: Annotated[dict[str, bytes | Array], _MANY] | None = None
    state: Numbers | Array | None = None


_json = msgspec.json.Decoder(ActJson)
_msgpack = msgspec.msgpack.Decoder(ActMsgpack)


def decode(body: bytes, packed: bool) -> Question:
    """The question in a body; 400 or 422 names what is wrong. packed: msgpack, else JSON."""
    sent = _decode_msgpack(body) if packed else _decode_json(body)
    limits = {name: getattr(sent, name) for name in LIMITS}
    return Question(images=_images(sent), state=sent.state, instruction=sent.instruction, **limits)


def _images(sent: ActJson | ActMsgpack) -> Sequence[tuple[str, str, Image]]:
    if sent.image is None and sent.image_wrist is None and not sent.images:
        return ()
    found: list[tuple[str, str, Image]] = []
    if sent.image is not None:
        found.append(("image", "image", sent.image))
    if sent.image_wrist is not None:
        found.append(("image_wrist", "image_wrist", sent.image_wrist))
    for name, image in (sent.images or {}).items():
        found.append((name, printable(f"images.{name}"), image))
    return found


def _decode_json(body: bytes) -> ActJson:
    # A decoder holds the interpreter's lock, so its input is bounded.
    if len(body) > MAX_VALUES and body.count(b",") > MAX_VALUES:
        raise _too_many_values(body)
    if len(body) > MAX_ESCAPES and body.count(b"\\") > MAX_ESCAPES:
        raise invalid("body", f"body: has more than {MAX_ESCAPES} escapes")
    try:
        return _json.decode(body)
    except msgspec.ValidationError as error:
        if not is_json(body):
            raise InvalidJson("the body is not JSON to its end") from None
        raise invalid_field(error, ActJson) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    # NaN and Infinity are no JSON, but the error names their field.
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error if body else 'it is empty'}") from None
    try:
        return msgspec.convert(value, ActJson)
    except msgspec.ValidationError as error:
        raise invalid_field(error, ActJson) from None
    except UnicodeEncodeError:
        raise invalid("body", "body: a name in it is not Unicode (a lone surrogate)") from None


def _too_many_values(body: bytes) -> InvalidRequest:
    """The 422 for a body with more values than all fields may have: its first error, else the field with the values."""
    enough = len(body) - len(body.split(b",", MAX_VALUES)[-1])
    try:
        _json.decode(memoryview(body)[:enough])
    except msgspec.ValidationError as error:
        return invalid_field(error, ActJson)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    end = body.rfind(b'":', 0, enough)
    name = printable(body[body.rfind(b'"', 0, max(0, end)) + 1 : max(0, end)].decode("utf-8", "replace"))
    return invalid(name or "body", f"{name or 'the body'}: there are more than {MAX_VALUES} values up to here")


def _decode_msgpack(body: bytes) -> ActMsgpack:
    try:
        return _msgpack.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field(error, ActMsgpack) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(f"the body is not msgpack: {error}") from None


def encode_json(answer: ActAnswer) -> bytes:
    """JSON bytes; actions as lists."""
    answer.actions = answer.actions.tolist()
    return encode(answer)


def encode_msgpack(answer: ActAnswer) -> bytes:
    """msgpack bytes; actions as {dtype, shape, data}."""
    actions = np.ascontiguousarray(answer.actions, dtype="<f4")
    answer.actions = {"dtype": "<f4", "shape": list(actions.shape), "data": actions.tobytes()}
    return msgspec.msgpack.encode(answer)


# -- HTTP --------------------------------------------------------------------------------------------------------------


def routes(handler: RequestHandler) -> list[Route]:
    act, most = Act(handler), handler.config.max_body_bytes
    return [
        Route("/act", act.run, "POST", most=most, refused=act.refused),
        Route("/reset", act.reset, "POST", most=min(most, OPERATOR_BODY)),
    ]


class Act:
    """Bodies and headers of HTTP around `RequestHandler`."""

    def __init__(self, handler: RequestHandler) -> None:
        self.handler = handler

    async def run(self, request: HttpRequest) -> HttpResponse:
        pending = _pending(request)
        try:
            with self.handler.admit(pending):
                asked = await _read(request)
                if isinstance(asked, Question):
                    questions: Sequence[Asked] = [asked]
                else:
                    pending.wire = JSON_NUMPY
                    questions = asked.questions(self.handler.of(asked.policy).reading(asked.block))
                if len(questions) == 1:
                    answers = [await self.handler.infer(pending, questions[0], request.received)]
            if len(questions) > 1:  # one message of several robots: each is a request, and the message itself is not
                answers = await self.handler.infer_all(pending, questions, request.received)
        except CallerLeft:
            raise
        except Reported as reported:
            request.request_id = reported.request_id
            return request.app.refuse(request, reported.error)
        except ReflexError as error:
            if isinstance(error, NotReady) and not request.received:  # callers match answers by their own request ids
                with suppress(ReflexError):
                    asked = await _read(request)
                    pending.request_id = (isinstance(asked, Question) and asked.request_id) or pending.request_id
            request.request_id = pending.request_id
            return request.app.refuse(request, error, _routed(pending))
        request.request_id = pending.request_id
        if not isinstance(asked, Question):
            return HttpResponse(200, asked.answer([answer.actions for answer in answers]), JSON, _routed(pending))
        if request.wants_msgpack:
            return HttpResponse(200, encode_msgpack(answers[0]), MSGPACK, _routed(pending))
        return HttpResponse(200, encode_json(answers[0]), JSON, _routed(pending))

    async def reset(self, request: HttpRequest) -> HttpResponse:
        """For clients of GR00T, which send it before an episode. Changes nothing: they name no episodes."""
        self.handler.runtime.need_loaded()
        await request.body()
        return HttpResponse(200, b"{}")

    def refused(self, request: HttpRequest, error: ReflexError) -> None:
        """Count a request that is refused before its body is read."""
        self.handler.refused(_pending(request), error)


def _pending(request: HttpRequest) -> PendingRequest:
    return PendingRequest(ACT, request.request_id, request.client, request.started, request)


async def _read(request: HttpRequest) -> Question | JsonNumpy | GrootJson:
    """The question of a request."""
    body, packed = await request.body(), request.sent_msgpack
    request.refuse_query()
    if len(body) <= LARGE:
        return asked_in(body, packed)
    request.preparing = True
    asked = await request.app.bodies.beside(asked_in, body, packed)
    request.preparing = False  # it is queued in this turn
    return asked


def asked_in(body: bytes, packed: bool) -> Question | JsonNumpy | GrootJson:
    """The question in a body. A body that is no /act request is tried as json-numpy."""
    try:
        return decode(body, packed)
    except InvalidRequest:
        found = json_numpy.decode(body) if not packed and json_numpy.is_json_numpy(body) else None
        if found is None:
            raise
        return found


def _routed(pending: PendingRequest) -> Headers:
    """Headers that name policy and version, if there are several and they are known."""
    routing, served = pending.routing, pending.served
    if routing is None or served is None:
        return []
    headers = [] if served.alone else [(b"x-reflex-policy", served.name.encode())]
    if not routing.key:
        return headers
    version = pending.version or served.slots[routing.slot].version
    headers += [
        (b"x-reflex-policy-slot", routing.slot.encode()),
        (b"x-reflex-model-version", header_text(version.name)),
        (b"x-reflex-routing-key", header_text(routing.key)),
    ]
    if routing.degraded:
        headers.append((b"x-reflex-routing-degraded", b"true"))
    if routing.verdict != "ok":
        headers.append((b"x-reflex-verdict", routing.verdict.encode()))
    return headers
