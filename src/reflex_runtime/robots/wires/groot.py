"""GR00T's protocol over ZeroMQ. Each row of a call is a request.

Messages are msgpack, with arrays in one of two forms of `common.array_of_map`: numpy.save until the release of N1.7,
msgpack-numpy since. Answers have the first form, which all clients read.

Observations have flat or nested names. The number of an array's dimensions shows whether it has a batch axis. Of
several steps T the last one is used.

    {"video.front": [T, H, W, C], "state.arm": [T, D], "annotation.human.task": [text]}                      N1.5
    {"video": {"front": [B, T, H, W, C]}, "state": {"arm": [B, T, D]}, "language": {"task": [[text]]}}       N1.6, N1.7

One `GrootSession` serves all clients of a listener, because ZeroMQ does not report that a client left. Each client (a
routing id) is a robot. Every message is answered, an invalid one too, because a REQ client without an answer waits for
ever.
"""

from __future__ import annotations

import hmac
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots.policy.episodes import Lru
from reflex_runtime.robots.serving.handler import PendingRequest, RequestHandler
from reflex_runtime.robots.serving.question import GROOT, MAX_ROWS, PROMPTS, ObservationReader, Question, text_of
from reflex_runtime.robots.wires.common import (
    LIMITS,
    Episodes,
    answer_details,
    limits_among,
    limits_of,
    packer,
    question_of,
    unpack,
)
from reflex_runtime.web.errors import ClientError, NotFound, Unauthorized, describe_error
from reflex_runtime.web.fields import brief, check_id, invalid, invalid_input, printable

if TYPE_CHECKING:  # json-numpy reads the same observations, without pyzmq
    from reflex_runtime.web.app import App
    from reflex_runtime.web.zeromq import ZmqListener, ZmqMessage

# -- messages ----------------------------------------------------------------------------------------------------------


def decode(frame: bytes) -> dict[str, Any]:
    """The map in a message, arrays as read-only views of it; ClientError when there is none."""
    value = unpack(frame)
    if not isinstance(value, dict):
        raise ClientError("the message must be a map with an endpoint")
    return value


def _npy(array: NDArray[Any]) -> dict[str, Any]:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


encode = packer(_npy)
"""A message in the form of N1.6."""


def modality_config(names: list[str], steps: int, as_text: bool) -> dict[str, Any]:
    """One modality in the answer to get_modality_config. as_text: in the form of N1.5."""
    told = {"delta_indices": list(range(steps)), "modality_keys": names}
    return {"__ModalityConfig_class__": True, "as_json": msgspec.json.encode(told).decode() if as_text else told}


# -- observations ------------------------------------------------------------------------------------------------------


GROUPS: Final = ("video", "state", "language")
VIDEO, STATE, ACTION, LANGUAGE = "video.", "state.", "action.", "language."
LANGUAGE_KEY: Final = "annotation.human.task_description"  # of N1.5 and N1.6, if the export gives none
_AXES: Final = {VIDEO: 3, STATE: 1}  # of one picture, of one state


class GrootObservation:
    """An observation. flat: names have prefixes. batched: arrays have a batch axis. So have the actions."""

    def __init__(self, observation: Mapping[str, Any]) -> None:
        self.flat = not any(isinstance(observation.get(name), dict) for name in GROUPS)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._languages: dict[str, Any] = {}
        for name, value in observation.items() if self.flat else _joined(observation):
            self._add(name, value)
        self.batched = any(array.ndim == _axes(name) + 2 for name, array in self._arrays.items())

    def rows(self, reading: ObservationReader) -> list[dict[str, Any]]:
        """The observation of each robot at the last step, for `ObservationReader`."""
        wire, seen = reading.wire, {}
        states = [name for name in self._arrays if name.startswith(STATE)]
        for name, array in self._arrays.items():
            steps = array.ndim - 1 - _axes(name)  # the axis
            if steps >= 0 and not array.shape[steps]:
                raise invalid_input(name, "has no step")
            if steps >= 0 and array.shape[steps] > 1 and reading.spec.observation_steps > 1:
                raise invalid_input(name, "has several steps: send the newest, the server keeps those before it")
            own = "state" if states == [name] and not wire.state else name
            seen[own] = array if steps < 0 else array[(slice(None),) * steps + (-1,)]
        languages = self._languages
        if len(languages) == 1:
            ((name, text),) = languages.items()
            languages = {wire.prompt or (name if name in PROMPTS else PROMPTS[0]): text}
        seen |= languages
        rows = reading.split(seen)
        return [seen] if rows is None else list(rows.values())

    def actions(self, reading: ObservationReader, chunks: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The actions of all rows, split into the groups of the export."""
        stacked = np.stack(chunks) if self.batched else chunks[0]
        found, at = {}, 0
        for name, size in groups_of(reading):
            found[ACTION + name if self.flat else name] = stacked[..., at : at + size]
            at += size
        return found

    def _add(self, name: str, value: Any) -> None:
        prefix = next((prefix for prefix in _AXES if name.startswith(prefix)), None)
        if prefix is None:
            if not name.startswith(ACTION) and _is_text(value):
                self._languages[name.removeprefix(LANGUAGE)] = _texts(name, value)
            return
        array = array_of(name, value)
        if not _AXES[prefix] <= array.ndim <= _AXES[prefix] + 2:
            axes = "[B, T, H, W, C], [T, H, W, C] or [H, W, C]" if prefix == VIDEO else "[B, T, D], [T, D] or [D]"
            raise invalid_input(name, f"has shape {list(array.shape)}, must be {axes}")
        self._arrays[name] = array


def groups_of(reading: ObservationReader) -> Sequence[tuple[str, int]]:
    """(name, size) of each group of an action, in order."""
    return reading.wire.actions or (("actions", reading.spec.action_dim),)


def modalities(reading: ObservationReader, flat: bool) -> dict[str, Any]:
    """The answer to get_modality_config. flat: with the flat names of N1.5."""
    wire, spec = reading.wire, reading.spec
    names = {"video.": [wire.images.get(camera, VIDEO + camera).removeprefix(VIDEO) for camera in spec.images]}
    names["state."] = [name.removeprefix(STATE) for name in wire.state or ("state",)] if spec.takes_state else []
    names["action."] = [name for name, _ in groups_of(reading)]
    found = {
        prefix[:-1]: modality_config(
            [prefix + name if flat else name for name in own], spec.chunk_size if prefix == ACTION else 1, flat
        )
        for prefix, own in names.items()
        if own
    }
    if spec.takes_text:
        found["language"] = modality_config([wire.prompt or LANGUAGE_KEY], 1, flat)
    return found


def _joined(observation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for modality in GROUPS:
        named = observation.get(modality)
        if named is None:
            continue
        if not isinstance(named, dict):
            raise invalid_input(modality, "must be a map")
        for name, value in named.items():
            yield f"{modality}.{name}", value


def _axes(name: str) -> int:
    return _AXES[VIDEO] if name.startswith(VIDEO) else _AXES[STATE]


def array_of(name: str, value: Any) -> NDArray[Any]:
    if _is_numbers(value, 5):  # if a text were among them, numpy would allocate the longest text for each value
        try:
            value = np.asarray(value)
        except (ValueError, OverflowError):
            value = None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise invalid_input(name, "must be an array of numbers")
    return value


def _is_numbers(value: Any, depth: int) -> bool:
    if isinstance(value, list):
        return depth > 0 and all(_is_numbers(part, depth - 1) for part in value)
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (str, bytes)) or (isinstance(value, np.ndarray) and value.dtype.kind in "US")


def _texts(name: str, value: Any) -> Any:
    """The last text of each row."""
    if isinstance(value, np.ndarray):
        if value.size > 16 * MAX_ROWS:
            raise invalid_input(name, f"has over {16 * MAX_ROWS} texts")
        value = value.tolist()
    if not isinstance(value, list):
        return text_of(value)
    return [text_of(text[-1] if isinstance(text, list) and text else text) for text in value]


# -- the session -------------------------------------------------------------------------------------------------------


OPTIONS: Final = {*LIMITS, "env_id"}
RESETS: Final = {"robot_id", "episode_id", "policy", "env_id"}
DEADLINE_MS: Final = 15_000.0  # default `timeout_ms` of clients; those of N1.5 and N1.6 never apply it
MAX_CLIENTS: Final = 4096  # routing ids; beyond it the least recently used one is forgotten


class GrootClient:
    """The state of one routing id. name: of the robot. said: options of its last reset."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.said: dict[str, Any] = {}
        self._episodes: dict[str, Episodes] = {}

    def episodes(self, part: str) -> Episodes:
        """The episodes of one row or environment. part: the suffix of its name."""
        if part not in self._episodes and len(self._episodes) >= MAX_ROWS:
            raise invalid("env_id", f"env_id: a connection may have {MAX_ROWS} environments")
        return self._episodes.setdefault(part, Episodes(self.name + part))

    def reset(self, options: Mapping[str, Any]) -> None:
        """Begin new episodes: of the environments that the options name, else of all."""
        said = {name: options[name] for name in ("robot_id", "episode_id", "policy") if options.get(name) is not None}
        limits_of(said)
        for name, value in said.items():
            check_id(name, value)
        environments = options.get("env_id")
        named = [self.episodes(part) for part in _parts(environments)] if environments is not None else None
        self.said = said
        for episodes in self._episodes.values() if named is None else named:
            episodes.reset()


def listener(app: App, handler: RequestHandler) -> ZmqListener:
    """The listener at --gr00t. Messages wait until a policy is loaded."""
    from reflex_runtime.web.zeromq import ZmqListener

    config, session = handler.config, GrootSession(handler, handler.config.gr00t_config)
    made = ZmqListener(app, "--gr00t", config.gr00t, config.max_body_bytes, session.answer, session.failed)

    async def begin() -> None:
        await handler.runtime.wait_started()
        made.begin()

    app.spawn(begin())
    return made


class GrootSession:
    """The session of all clients of a listener. form: of answers to get_modality_config, n1.5 or n1.6."""

    def __init__(self, handler: RequestHandler, form: str) -> None:
        self._handler, self._form = handler, form
        self._clients: Lru[tuple[bytes, ...], GrootClient] = Lru(MAX_CLIENTS)

    async def answer(self, message: ZmqMessage) -> bytes:
        """The bytes that answer a message; errors are answers too."""
        try:
            return await self._answer(message)
        except Exception as failure:
            return self.failed(message, failure)

    async def _answer(self, message: ZmqMessage) -> bytes:
        sent = decode(message.data)
        key, token = self._handler.config.api_key, text_of(sent.get("api_token"))
        if key and not (isinstance(token, str) and hmac.compare_digest(token.encode(errors="replace"), key.encode())):
            raise Unauthorized("Unauthorized: Invalid API token")
        only(sent, ("endpoint", "data", "api_token"))
        endpoint = text_of(sent.get("endpoint", "get_action"))
        if endpoint == "get_action":
            return await self._act(message, _map(sent, "data"))
        if endpoint == "reset":
            self._client(message).reset(options_of(only(_map(sent, "data"), ("options",)), RESETS))
            return encode({})
        if endpoint == "ping":
            self._handler.runtime.need_loaded()
            handler = self._asked_by(message)
            expects = {} if handler.unnamed else handler.reading(GROOT).describe()  # stock clients do not read it
            return encode({"status": "ok", "message": "Server is running", "reflex": expects})
        if endpoint == "get_modality_config":
            self._handler.runtime.need_loaded()
            return encode(modalities(self._asked_by(message).reading(GROOT), self._form == "n1.5"))
        if endpoint == "kill":
            raise NotFound("kill is not served")
        raise NotFound(printable(f"Unknown endpoint: {brief(endpoint)}"))

    def failed(self, message: ZmqMessage, failure: Exception) -> bytes:
        """The bytes that answer with an error, which is counted."""
        client = self._clients.get(message.peer)
        reported = self._handler.reported(failure, _pending(message, message.id if client is None else client.name))
        told = describe_error(reported.error, reported.request_id)
        del told["message"]
        return encode(told | {"error": reported.error.message, "code": reported.error.code})

    def _asked_by(self, message: ZmqMessage, options: Mapping[str, Any] | None = None) -> RequestHandler:
        """The handler of the policy that the options name; by default the options of the client's last reset."""
        name = (self._client(message).said if options is None else options).get("policy")
        return self._handler.of(limits_of({"policy": name}).policy)

    def _client(self, message: ZmqMessage) -> GrootClient:
        """The client of a message, named after its first message, because routing ids repeat after a restart."""
        return self._clients.use(message.peer, lambda: GrootClient(f"gr00t-{message.id}"))

    async def _act(self, message: ZmqMessage, data: Mapping[str, Any]) -> bytes:
        """Answer one get_action. Its rows are requests of their own, answered in one message."""
        client, nested = self._client(message), "observation" in data
        if nested:
            only(data, ("observation", "options"))
        options = client.said | options_of(data)
        handler = self._asked_by(message, options)
        reading = handler.reading(GROOT)
        seen = _map(data, "observation") if nested else {name: data[name] for name in data if name != "options"}
        observation = GrootObservation(seen)
        limits = limits_among(options)
        if limits.deadline_ms is None and not handler.served.config.deadline_ms:
            limits.deadline_ms = DEADLINE_MS
        rows = observation.rows(reading)
        parts = _parts(options.get("env_id"), len(rows))
        questions: list[Question] = []
        for row, part in zip(rows, parts, strict=True):
            observed = reading.read(row)
            named = None if limits.episode_id is None else limits.episode_id + part
            episode = client.episodes(part).of(named, observed[2])
            question = question_of(observed, limits, client.name, episode, part=part)
            if limits.request_id:  # by its number: one alone keeps its id, and environments may come twice
                question.request_id = limits.request_id + (f".{len(questions)}" if len(rows) > 1 else "")
            questions.append(question)
        answers = await handler.infer_all(_pending(message, client.name), questions, message.received)
        actions = observation.actions(reading, [answer.actions for answer in answers])
        if not nested:
            return encode(actions)
        return encode([actions, {"reflex": [answer_details(answer) for answer in answers]}])


def _pending(message: ZmqMessage, name: str) -> PendingRequest:
    return PendingRequest(GROOT, message.id, name, message.started)


def _map(sent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = sent.get(name)
    if not isinstance(found, dict):
        raise ClientError(f"{name}: must be a map")
    return found


def only(sent: Mapping[str, Any], names: Collection[str], where: str = "") -> Mapping[str, Any]:
    """The map itself; 422 if it has other names than these. where: prefix of the name in the error."""
    for name in sent.keys() - names:
        raise invalid_input(where + name, f"is not read here, only {', '.join(sorted(names))}")
    return sent


def options_of(data: Mapping[str, Any], names: Collection[str] = OPTIONS) -> dict[str, Any]:
    """The options of a message. Ids that are numbers become texts."""
    found = data.get("options")
    if found is None:
        return {}
    options = {name: text_of(value) for name, value in only(_map(data, "options"), names, "options.").items()}
    return options | {name: str(options[name]) for name in ("robot_id", "episode_id") if type(options.get(name)) is int}


def _parts(environments: Any, rows: int | None = None) -> list[str]:
    """The suffix of each row's robot and episode: its environment, else its number. rows: None for a reset."""
    if environments is None:
        return [""] if rows is None or rows == 1 else [f"/{row}" for row in range(rows)]
    named = environments if isinstance(environments, list) else [environments]
    if any(type(name) not in (int, str) for name in named) or len(named) > MAX_ROWS or rows not in (None, len(named)):
        raise invalid("env_id", "env_id: must be a number or a text, or a list of them, one for each row")
    for name in named:
        check_id("env_id", str(name))
    return [f"/{name}" for name in named]
