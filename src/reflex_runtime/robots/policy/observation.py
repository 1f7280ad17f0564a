"""The input of a policy (`Observation`), which `ObservationFields` makes from a request's fields; and its output
(`ActionChunk`)."""

from __future__ import annotations

import hashlib
import io
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import isfinite
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots.policy.episodes import EPISODES, Anchor, Prefix, PrefixKey
from reflex_runtime.robots.policy.spec import FLOAT_LEVELS, PolicySpec, Resize
from reflex_runtime.robots.policy.units import transformed
from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.pictures import MAX_IMAGE_PIXELS, bands, decode_picture, pixels_of, whole

Image = NDArray[Any]  # uint8, or float32 (`FLOAT_LEVELS`)
Sent = bytes | NDArray[Any]  # an image as the caller sent it: PNG or JPEG bytes, or an array
CacheUse = Literal["hit", "hit_stale", "miss", "off"]

MAX_REQUEST_PIXELS = 2 * MAX_IMAGE_PIXELS  # of all images of a request that the policy uses


class Doubt(NamedTuple):
    """A field of a request that lacks an effect that its caller may expect. kind: for the counter."""

    kind: Literal["instruction_ignored", "instruction_unknown", "instruction_cut"]
    message: str


@dataclass(slots=True, eq=False)  # treated as frozen; freezing it would cost as much as the rest of `prepare`
class Observation:
    """The input of a policy, ready for its model: decoded and resized.

    For a policy that sees n observations together, images, `present` and state have an axis [n] in front, oldest first.

    images: by the policy's names, uint8 [height, width, 3] (float32 with `FLOAT_LEVELS`), at its sizes unless the model
        fits them itself. One that was not sent is black. present: whether it was sent, by name; n of them with history.
    tokens: int64 [max_tokens], None if the policy reads no text, or its model makes the tokens. token_mask: bool
        [max_tokens], False for padding.
    state: float32 [state_dim], normalised. robot_state: the newest state after its transforms, not normalised.
    seed: of the noise, in [0, 2⁶⁴).
    episode_id: "" if the caller named none; nothing is then kept between its requests.
    cache, prefix: set by `Policy.request`: the cache's result, and the prefix found, which stays in memory until the
        request is settled, even if the cache evicts it.
    ready: the result of the model's own `prepare`.
    moment: the observation without the axis [n], kept for the next ones of its episode; past: the request ids of the
        earlier ones in it, oldest first.
    doubts: warnings for the answer. instruction: "" if there is none.
    executed, delay, received: as in `ChunkTails.anchor`. anchor: set by `Policy.request`.
    """

    images: Mapping[str, Image] = field(default_factory=dict)
    tokens: NDArray[np.int64] | None = None
    state: NDArray[np.float32] | None = None
    seed: int = 0
    request_id: str = ""
    episode_id: str = ""
    prefix_key: PrefixKey | None = None
    cache: CacheUse = "off"
    prefix: Prefix | None = None
    executed: int | None = None
    delay: int | None = None
    received: float | None = None
    anchor: Anchor | None = None
    doubts: tuple[Doubt, ...] = ()
    instruction: str = ""
    ready: Any = None
    token_mask: NDArray[np.bool_] | None = None
    present: Mapping[str, bool | tuple[bool, ...]] = field(default_factory=dict)
    robot_state: NDArray[np.float32] | None = None
    moment: Observation | None = None
    past: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that it counts in a history."""
        size = sum(image.nbytes for image in self.images.values())
        return size + (0 if self.state is None else self.state.nbytes) + MOMENT_OVERHEAD

    def row(self, role: str) -> NDArray[Any]:
        """The value for a role: "tokens", "token_mask", "state", the name of an image, or "image_masks": whether each
        image was sent, along a last axis, in their order."""
        if role in self.images:
            return self.images[role]
        if role == "image_masks":
            return np.array([self.present[name] for name in self.images], np.bool_).T
        value: NDArray[Any] = getattr(self, role)
        return value


@dataclass(slots=True, eq=False)  # only `GuardedProcessor` writes to one
class ActionChunk:
    """The output of a policy.

    actions: float32 [chunk_size, action_dim] in the robot's units, in the order of execution.
    denoising_steps: number of Euler steps. cache: of the prefix ("off" without a cache).
    guard: what the action guard changed: `clamped`, the number of values that were outside their range or not finite;
        `joints`, their names or else indices; `held`, whether the chunk is the episode's last good action, repeated.
    rtc: how it continues the episode's last chunk (`Anchor.report`), or None if it does not.
    """

    actions: NDArray[np.float32]
    denoising_steps: int
    cache: CacheUse = "off"
    guard: dict[str, Any] | None = None
    rtc: Mapping[str, Any] | None = None


def seed_of(request_id: str) -> int:
    """The default noise seed of a request: the first 8 bytes, big-endian, of SHA-256(UTF-8 request id)."""
    return int.from_bytes(hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def noise_of(seed: int, chunk_size: int, action_dim: int) -> NDArray[np.float32]:
    """Standard normal float32 [chunk_size, action_dim]; the same seed gives the same noise in every process."""
    return np.random.Generator(np.random.PCG64(seed)).standard_normal((chunk_size, action_dim), dtype=np.float32)


def decode_image(
    data: bytes, field: str = "image", size: tuple[int, int] | None = None, resize: Resize = "stretch"
) -> Image:
    """A PNG or JPEG as [height, width, 3]; InvalidRequest for a file that is broken, too large or neither.

    size: (height, width); None keeps its own. resize: see `resize_image`. A JPEG that is at least twice as large is
    decoded at 1/2, 1/4 or 1/8 of its size first, except with `FLOAT_LEVELS`.
    """
    if size is None:
        return decode_picture(data, field)
    if resize == FLOAT_LEVELS:
        return resize_image(decode_picture(data, field), *size, resize)
    fit = partial(_fitted, height=size[0], width=size[1], resize=resize)
    return resize_image(decode_picture(data, field, size, fit), *size, resize)


def warm_decoders() -> None:
    """Decode a small PNG and JPEG: the first one imports Pillow, which may take longer than a deadline. Pillow's
    warnings about callers' files, a line for each request, are turned off."""
    import PIL.Image

    warnings.filterwarnings("ignore", module=r"PIL\.")
    for kind in ("PNG", "JPEG"):
        file = io.BytesIO()
        PIL.Image.new("RGB", (32, 32)).save(file, kind)
        pixels_of(file.getvalue())
        decode_image(file.getvalue(), size=(8, 8))


def resize_image(image: Image, height: int, width: int, resize: Resize = "stretch") -> Image:
    """Bilinear; unchanged when it already has the size.

    "stretch": to the size. "pad": with its aspect ratio, in the middle of black, as openpi does. "pad-smolvla-float",
    as SmolVLA of LeRobot does: in the bottom right corner, in float32, each pixel interpolated between the four nearest
    of the original, without averaging over more.
    """
    if image.shape[:2] == (height, width):
        return image
    if resize == FLOAT_LEVELS:
        inner = _inner(image.shape[1], image.shape[0], height, width, resize)
        return _padded(_sampled(image, *inner), height, width, resize)
    import PIL.Image

    return _fitted(PIL.Image.fromarray(image), height, width, resize)


def _fitted(image: Any, height: int, width: int, resize: Resize) -> Image:
    """The same for an image of Pillow in any mode, but not for `FLOAT_LEVELS`."""
    inner = _inner(image.width, image.height, height, width, resize)
    pixels = whole(image) if image.size == inner else np.asarray(_resized(image, *inner))
    return _padded(pixels, height, width, resize)


def _inner(wide: int, high: int, height: int, width: int, resize: Resize) -> tuple[int, int]:
    """(width, height) of the fitted picture within the result."""
    if resize == "stretch" or (wide, high) == (width, height):
        return width, height
    ratio = max(wide / width, high / height)
    return max(1, int(wide / ratio)), max(1, int(high / ratio))


def _padded(pixels: Image, height: int, width: int, resize: Resize) -> Image:
    """The pixels in a black frame; grey ones are repeated in three channels."""
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=2)
    down, right = height - pixels.shape[0], width - pixels.shape[1]
    if not (down or right):
        return pixels
    top, left = (down, right) if resize == FLOAT_LEVELS else (down // 2, right // 2)
    padded = np.zeros((height, width, 3), pixels.dtype)
    padded[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return padded


def _resized(image: Any, width: int, height: int) -> Any:
    """Bilinear. A picture that must be converted is narrowed band by band, and then made lower; the rounding in between
    may change levels by one."""
    import PIL.Image

    bilinear, narrow = PIL.Image.Resampling.BILINEAR, None
    for top, band in bands(image):
        if band.height == image.height:
            return band.resize((width, height), bilinear)
        narrow = narrow or PIL.Image.new(band.mode, (width, image.height))
        narrow.paste(band.resize((width, band.height), bilinear), (0, top))
    assert narrow is not None
    return narrow.resize((width, height), bilinear)


def _sampled(image: Any, width: int, height: int) -> NDArray[np.float32]:
    """Each pixel interpolated between the four nearest of the original, as by PyTorch's `interpolate`."""
    (y, y_next, y_share), (x, x_next, x_share) = _nearest(len(image), height), _nearest(image.shape[1], width)
    above, below = image[y], image[y_next]
    sides: list[NDArray[np.float32]] = []
    for column in (x, x_next):
        upper = above.take(column, axis=1).astype(np.float32)
        sides.append(upper + y_share.reshape(-1, 1, 1) * (below.take(column, axis=1) - upper))
    return sides[0] + x_share.reshape(1, -1, 1) * (sides[1] - sides[0])


def _nearest(size: int, wanted: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """For each of `wanted` places along an axis: the pixels before and after it, and the share of the second."""
    at = np.maximum((np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * np.float32(size / wanted) - 0.5, 0.0)
    before = np.minimum(at.astype(np.intp), size - 1)
    return before, np.minimum(before + 1, size - 1), (at - before).astype(np.float32)


# -- earlier observations ----------------------------------------------------------------------------------------------


HISTORY_BYTES: Final = 256 << 20
MOMENT_OVERHEAD: Final = 1024  # bytes that an observation counts besides its arrays


class ObservationHistory:
    """The newest observations of each episode of one slot. Read on threads that prepare, written on the device thread.

    An observation is kept once its chunk has been computed: a request that was refused, shed, cancelled or failed
    leaves nothing, and a repeated request sees the same past. Observations are in the order in which the server
    received them, not in that of decoding or answers.

    steps: observations that the policy sees together, >= 2. Beyond `max_bytes` or `episodes` the least recently used
    episode is forgotten, and continues as a new one.
    """

    def __init__(self, steps: int, max_bytes: int = HISTORY_BYTES, episodes: int = EPISODES) -> None:
        self.steps, self.max_bytes, self._most = steps, max_bytes, episodes
        self._lock = threading.Lock()
        self._moments: OrderedDict[str, tuple[Observation, ...]] = OrderedDict()
        self._bytes = 0
        self.evictions = 0

    def before(self, episode: str, moment: Observation) -> tuple[Observation, ...]:
        """At most steps − 1 moments that were received before this one, oldest first, without that of the request."""
        with self._lock:
            kept = self._moments.get(episode, ())
            if kept:
                self._moments.move_to_end(episode)
        past = [one for one in kept if one.request_id != moment.request_id and _received(one) <= _received(moment)]
        return tuple(past[1 - self.steps :])

    def remember(self, episode: str, moment: Observation) -> None:
        """Keep a moment, in the order of `received`; it replaces that of the same request."""
        if not episode:
            return
        with self._lock:
            kept = [one for one in self._moments.get(episode, ()) if one.request_id != moment.request_id]
            kept = sorted([*kept, moment], key=_received)
            self._remove(episode)
            # One more than a request sees before its own: a repeated request must see the same past.
            self._moments[episode] = tuple(kept[-self.steps :])
            self._bytes += sum(one.nbytes for one in self._moments[episode])
            while self._bytes > self.max_bytes or len(self._moments) > self._most:
                self._remove(next(iter(self._moments)))
                self.evictions += 1

    def forget(self, episode: str | None = None) -> None:
        """Forget an episode, or every one."""
        with self._lock:
            for one in list(self._moments) if episode is None else (episode,):
                self._remove(one)

    def snapshot(self) -> dict[str, int]:
        """JSON-safe."""
        with self._lock:
            return {
                "steps": self.steps,
                "episodes": len(self._moments),
                "bytes": self._bytes,
                "max_bytes": self.max_bytes,
                "evictions": self.evictions,
            }

    def _remove(self, episode: str) -> None:
        for moment in self._moments.pop(episode, ()):
            self._bytes -= moment.nbytes


def together(moments: tuple[Observation, ...], steps: int) -> dict[str, Any]:
    """The fields of an `Observation` that have an axis of `steps`: the moments, oldest first, which is repeated.

    InvalidRequest if a camera's pictures have another size than earlier in the episode.
    """
    moments = (moments[0],) * (steps - len(moments)) + moments
    newest = moments[-1]
    for name, image in newest.images.items():
        if any(moment.images[name].shape != image.shape for moment in moments):
            field = f"images.{name}"
            raise InvalidRequest(f"{field}: another size than earlier in this episode; use a new episode_id", field)
    return {
        "images": {name: np.stack([moment.images[name] for moment in moments]) for name in newest.images},
        "present": {name: tuple(moment.present[name] for moment in moments) for name in newest.present},
        "state": None if newest.state is None else np.stack([moment.state for moment in moments]),  # type: ignore[misc]
    }


def _received(moment: Observation) -> float:
    assert moment.received is not None
    return moment.received


# -- the fields of a request -------------------------------------------------------------------------------------------


MAX_WORDS = 8  # unknown words that a warning names
MAX_WORD = 40  # characters of each


class ObservationFields:
    """Reads the fields of requests to a policy: checks them, decodes pictures, normalises the state, and makes tokens.
    Slow: for worker threads. InvalidRequest names a missing or wrong field that the policy needs.

    names: under which requests may send its images.
    """

    def __init__(self, spec: PolicySpec) -> None:
        self.spec, self.names = spec, frozenset(names_of(spec))

    def look(self, images: Mapping[str, Sent]) -> int:
        """The number of pixels to decode, from the headers alone; InvalidRequest for a missing or wrong field."""
        pixels = sum([pixels_of(*found) for found in self.found(images).values()])
        if pixels > MAX_REQUEST_PIXELS:
            most = f"at most {MAX_REQUEST_PIXELS:,} are accepted"
            raise InvalidRequest(f"images: {pixels:,} pixels to decode in all, {most}", "images")
        return pixels

    def pictures(self, sent: Mapping[str, tuple[Sent, str]]) -> tuple[dict[str, Image], dict[str, bool]]:
        """The picture of every camera, decoded and resized, black if missing; whether it was sent. sent: of `found`."""
        spec, made = self.spec, {}
        for name, size in spec.images.items():
            black = (*size, np.float32 if spec.resize == FLOAT_LEVELS else np.uint8)
            made[name] = self._image(name, *sent[name]) if name in sent else _black(*black)
        return made, {name: name in sent for name in made}

    def found(self, images: Mapping[str, Sent]) -> dict[str, tuple[Sent, str]]:
        """The image sent for each camera, with the field's name for errors; optional images may be missing."""
        found = {}
        for name in self.spec.images:
            sent, field = self._sent_for(name, images)
            if sent is not None:
                found[name] = sent, field
        if not found and self.spec.images:
            raise InvalidRequest(f"images: one of {', '.join(self.spec.images)} is needed", "images")
        return found

    def _sent_for(self, name: str, images: Mapping[str, Sent]) -> tuple[Sent | None, str]:
        """The image sent for a camera, None for a missing one that is optional, and the field name for errors."""
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
            fit = () if resize == "none" else (size, resize)
            image = decode_image(bytes(sent), field, *fit)
        else:
            pixels_of(sent, field)
            image = sent if resize == "none" else resize_image(sent, *size, resize)
        return image.astype(np.float32, copy=False) if resize == FLOAT_LEVELS else image

    def doubts(self, instruction: str, cut: int) -> tuple[Doubt, ...]:
        """Doubts about an instruction that is accepted. cut: tokens that were cut off."""
        tokenizer, found = self.spec.tokenizer, []
        if not self.spec.takes_text:
            found.append(Doubt("instruction_ignored", "instruction: this policy reads no text; it changes nothing"))
        if tokenizer is not None and (unknown := tokenizer.unknown(instruction)):
            words = ", ".join(repr(word[:MAX_WORD]) for word in unknown[:MAX_WORDS])
            more = f" and {len(unknown) - MAX_WORDS} more" if len(unknown) > MAX_WORDS else ""
            message = f"instruction: words that the policy does not know: {words}{more}"
            found.append(Doubt("instruction_unknown", message))
        if cut:
            read = f"the policy reads {self.spec.max_tokens} tokens, and {cut} more were cut off its end"
            found.append(Doubt("instruction_cut", f"instruction: {read}"))
        return tuple(found)

    def tokens(
        self, instruction: str, state: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.bool_] | None, int]:
        """See `InstructionTokenizer.row`; (None, None, 0) if the policy reads no text, or its model makes tokens."""
        tokenizer, prompt = self.spec.tokenizer, self.spec.prompt
        if tokenizer is None or not self.spec.takes_text:
            return None, None, 0
        return tokenizer.row(prompt.render(instruction, state) if prompt else instruction, self.spec.max_tokens)

    def state(
        self, state: Sequence[float] | NDArray[Any] | None
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
        """The state after its transforms, and normalised as well; both None if the policy takes none."""
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
            count = f", has {len(sent)}" if sent.ndim == 1 else ""
            raise InvalidRequest(f"state: must be {dim} numbers{count}", "state")
        changed: NDArray[np.float32] = sent
        values = changed
        if norm is not None or transforms or sent.dtype != np.float32:
            with np.errstate(all="ignore"):  # values too large for float32 become infinite, and are refused below
                changed = transformed(sent.astype(np.float32, copy=False), transforms)
                values = changed if norm is None else norm.normalise(changed)
        if not isfinite(sum(values.tolist())):  # for some dozen numbers twice as fast as numpy
            raise InvalidRequest("state: must be finite numbers", "state")
        return (changed, values) if self.spec.takes_state else (None, None)


def names_of(spec: PolicySpec) -> set[str]:
    """The names under which a request may send the policy's images."""
    return {*spec.images, *spec.other_names.values(), *(("image",) if len(spec.images) == 1 else ())}


@cache
def _black(height: int, width: int, kind: type[Any]) -> Image:
    """Read only."""
    black = np.zeros((height, width, 3), kind)
    black.setflags(write=False)
    return black
