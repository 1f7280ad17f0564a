"""The fields of a request as its policy needs them: checked, pictures decoded, state normalised, text as tokens.

Slow, for worker threads. Raises InvalidRequest naming the field when something the policy needs is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots.policy.observation import (
    MAX_REQUEST_PIXELS,
    Doubt,
    Image,
    Sent,
    decode_image,
    resize_image,
)
from reflex_runtime.robots.policy.spec import FLOAT_LEVELS, PolicySpec
from reflex_runtime.robots.policy.units import transformed
from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.pictures import pixels_of

MAX_WORDS = 8  # unknown words that a warning names
MAX_WORD = 40  # characters of each


class ObservationFields:
    """Reads the fields of requests to a policy with this specification. names: under which its images may come."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec, self.names = spec, frozenset(names_of(spec))

    def look(self, images: Mapping[str, Sent]) -> int:
        """Pixels that `prepare` will decode, from the headers alone; InvalidRequest for a missing or wrong field."""
        pixels = sum(pixels_of(*found) for found in self.found(images).values())
        if pixels > MAX_REQUEST_PIXELS:
            most = f"at most {MAX_REQUEST_PIXELS:,} are accepted"
            raise InvalidRequest(f"images: {pixels:,} pixels to decode in all, {most}", "images")
        return pixels

    def pictures(self, sent: Mapping[str, tuple[Sent, str]]) -> tuple[dict[str, Image], dict[str, bool]]:
        """The picture of every camera, decoded and resized, black for one that was left out; and whether it was sent.
        sent: see `found`."""
        sizes = self.spec.images
        kind = np.float32 if self.spec.resize == FLOAT_LEVELS else np.uint8
        made = {
            name: self._image(name, *sent[name]) if name in sent else _black(size, kind) for name, size in sizes.items()
        }
        return made, {name: name in sent for name in sizes}

    def found(self, images: Mapping[str, Sent]) -> dict[str, tuple[Sent, str]]:
        """The image sent for each camera and the field name for errors, without those that were left out and may be."""
        found = {}
        for name in self.spec.images:
            sent, field = self._sent_for(name, images)
            if sent is not None:
                found[name] = sent, field
        if not found and self.spec.images:
            raise InvalidRequest(f"images: one of {', '.join(self.spec.images)} is needed", "images")
        return found

    def _sent_for(self, name: str, images: Mapping[str, Sent]) -> tuple[Sent | None, str]:
        """The image sent for one of its cameras, None where it may be left out, and the field name for errors."""
        # The field is as the caller would write it: `image` and `image_wrist` stand alone, others in `images`.
        field = name if name in ("image", "image_wrist") else f"images.{name}"
        sent, other = images.get(name), self.spec.other_names.get(name, "")
        if other in images:
            if sent is not None:
                raise InvalidRequest(f"images.{other}: is {name}, which was sent as well", f"images.{other}")
            sent, field = images[other], f"images.{other}"
        if sent is None and "image" in images and len(self.spec.images) == 1:
            sent, field = images["image"], "image"
        if sent is None and name not in self.spec.optional_images:
            raise InvalidRequest(f"{field}: missing, and this policy needs it", field)
        return sent, field

    def _image(self, name: str, sent: Sent, field: str) -> Image:
        size, resize = self.spec.images[name], self.spec.resize
        if isinstance(sent, bytes | bytearray | memoryview):
            image = decode_image(bytes(sent), field) if resize == "none" else decode_image(
                bytes(sent), field, size, resize
            )
        else:
            pixels_of(sent, field)
            image = sent if resize == "none" else resize_image(sent, *size, resize)
        return image.astype(np.float32, copy=False) if resize == FLOAT_LEVELS else image

    def doubts(self, instruction: str) -> tuple[Doubt, ...]:
        """What may be wrong with an instruction, although it is taken."""
        tokenizer = self.spec.tokenizer
        if not self.spec.takes_text:
            return (Doubt("instruction_ignored", "instruction: this policy reads no text; it changes nothing"),)
        if tokenizer is None or not (unknown := tokenizer.unknown(instruction)):
            return ()
        told = ", ".join(repr(word[:MAX_WORD]) for word in unknown[:MAX_WORDS])
        more = f" and {len(unknown) - MAX_WORDS} more" if len(unknown) > MAX_WORDS else ""
        return (Doubt("instruction_unknown", f"instruction: words that the policy does not know: {told}{more}"),)

    def tokens(
        self, instruction: str, state: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.bool_] | None]:
        """Tokens and their mask; None where its model makes the tokens."""
        tokenizer, prompt = self.spec.tokenizer, self.spec.prompt
        if tokenizer is None:
            return None, None
        return tokenizer.row(prompt.render(instruction, state) if prompt else instruction, self.spec.max_tokens)

    def state(
        self, state: Sequence[float] | NDArray[Any] | None
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
        """The state after its transforms, and normalised; both None where the policy takes none."""
        if state is None:
            if self.spec.takes_state:
                raise InvalidRequest("state: missing, and this policy needs it", "state")
            return None, None
        try:
            sent = np.asarray(state)
        except ValueError:  # ragged lists
            sent = np.array(None)
        dim, norm, transforms = self.spec.state_dim, self.spec.state_norm, self.spec.state_transforms
        if sent.shape != (dim,) or sent.dtype.kind not in "fiu":
            raise InvalidRequest(f"state: must be {dim} numbers", "state")
        changed: NDArray[np.float32] = sent
        values = changed
        if norm is not None or transforms or sent.dtype != np.float32:
            with np.errstate(all="ignore"):  # values too large for float32 become infinite, and are refused as such
                changed = transformed(sent.astype(np.float32, copy=False), transforms)
                values = changed if norm is None else norm.normalise(changed)
        if not isfinite(sum(values.tolist())):  # for some dozen numbers twice as fast as numpy
            raise InvalidRequest("state: must be finite numbers", "state")
        return (changed, values) if self.spec.takes_state else (None, None)


def names_of(spec: PolicySpec) -> set[str]:
    """The names under which a request may send the policy's images."""
    return {*spec.images, *spec.other_names.values(), *(("image",) if len(spec.images) == 1 else ())}


@cache
def _black(size: tuple[int, int], kind: type[Any]) -> Image:
    """A black picture of that size, read only."""
    black = np.zeros((*size, 3), kind)
    black.setflags(write=False)
    return black
