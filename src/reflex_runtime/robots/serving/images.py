"""The images of a request as they come over the wire: base64 text, PNG or JPEG bytes, raw arrays.

Their names are checked on the loop. Everything else happens on a thread, for the pictures that the policy reads.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from reflex_runtime.robots import Observation, Policy, PolicySpec
from reflex_runtime.robots.policy.fields import names_of
from reflex_runtime.robots.policy.observation import Sent
from reflex_runtime.robots.serving.decode_pool import Done, Job
from reflex_runtime.robots.serving.question import Array, Image, Question, array_of
from reflex_runtime.web.fields import invalid, printable

PIECE = 1 << 20  # characters decoded at a time: nothing else runs meanwhile


def check_names(question: Question, known: AbstractSet[str]) -> None:
    """422 for an image under a name that no served policy reads, and for one that is given twice."""
    seen = set()
    for name, field, _ in question.images:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise invalid(field, printable(f"{field}: no policy here has such a camera (there are: {there})"))
        if name in seen:
            raise invalid(field, f"{field}: given twice")
        seen.add(name)


def cameras_of(specs: Iterable[PolicySpec]) -> set[str]:
    """The names under which images are looked at."""
    return {name for spec in specs for name in names_of(spec)}


def _sent(image: Image, field: str) -> Sent:
    if isinstance(image, Array):
        return array_of(image, field)
    if isinstance(image, np.ndarray):
        return pixels_in(image, field)
    return _from_base64(image, field) if isinstance(image, str) else image


def pixels_in(image: NDArray[Any], field: str) -> NDArray[Any]:
    """The picture in an array: what is float and in [0, 1] as uint8."""
    if image.dtype.kind != "f":
        return image
    if not ((image >= 0.0) & (image <= 1.0)).all():
        raise invalid(field, printable(f"{field}: a picture of floats must be within [0, 1]"))
    pixels: NDArray[np.uint8] = (image * image.dtype.type(255)).astype(np.uint8)
    return pixels


def _from_base64(text: str, field: str) -> bytes:
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise invalid(field, f"{field}: a data URL must be data:image/…;base64,…")
    try:
        return decoded_base64(text)
    except (binascii.Error, ValueError) as error:
        raise invalid(field, f"{field}: not base64: {error}") from None


def decoded_base64(text: str) -> bytes:
    """The bytes of a text, in pieces, so that other threads run in between. ValueError where it is not base64.

    Both alphabets of RFC 4648 are read, and lines as MIME breaks them.
    """
    try:
        return _decoded(text)
    except ValueError:
        plain = text.replace("\r", "").replace("\n", "").replace("-", "+").replace("_", "/")
        if plain == text:
            raise
        return _decoded(plain + "=" * (-len(plain) % 4))  # of URLs, where it is mostly left out


def _decoded(text: str) -> bytes:
    if text.find("=", 0, len(text) - 2) >= 0:
        raise ValueError("padding before its end")
    return b"".join(pybase64.b64decode(text[at : at + PIECE], validate=True) for at in range(0, len(text), PIECE))


def job_of(
    policy: Policy, request_id: str, question: Question, received: float, client: Any, share: float, done: Done
) -> Job:
    """The decoding of a question's pictures; its value is the observation."""
    sent: dict[str, Sent] = {}  # PNG or JPEG bytes, or arrays, of what the policy reads

    def look() -> int:
        """Pixels to be decoded, or the 422 of what can be seen without decoding."""
        reads = policy.fields.reads
        sent.update({name: _sent(image, field) for name, field, image in question.images if reads(name)})
        return policy.fields.look(sent)

    make = partial(observe, policy, request_id, question, received, sent)
    return Job(client, share, sum(_size(image) for _, _, image in question.images), look, make, done)


def _size(image: Image) -> int:
    """Bytes of a picture as it came."""
    if isinstance(image, np.ndarray):
        return image.nbytes
    return len(image.data) if isinstance(image, Array) else len(image)


def observe(
    policy: Policy, request_id: str, question: Question, received: float, pictures: Mapping[str, Sent] | None = None
) -> Observation:
    """What the policy makes of a question, and of its pictures if it has some.

    A caller that gives a seed wants the same answer again: how long the last one took has no part in it.
    """
    delay = 0 if question.delay is None and question.seed is not None else question.delay
    return policy.prepare(
        images=pictures,
        instruction=question.instruction,
        state=question.state_vector(),
        episode_id=question.episode,
        request_id=request_id,
        seed=question.seed,
        executed=question.executed,
        delay=delay,
        received=received,
    )
