"""GR00T's protocol as a session: endpoints, tokens, episodes, and calls whose rows are as many requests.

One `GrootSession` serves all clients of a listener, because ZeroMQ says who sent a message and not who left. A client
(a routing id) is a robot of its own. Every message is answered, also an invalid one, because a REQ client without an
answer waits for ever.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.policies.serving.handler import RequestHandler
from reflex_runtime.policies.serving.pending import PendingRequest
from reflex_runtime.policies.serving.question import Question
from reflex_runtime.policies.serving.wire_names import GROOT
from reflex_runtime.policies.wires.groot_codec import decode, encode
from reflex_runtime.policies.wires.groot_observation import MAX_ROWS, GrootObservation, modalities
from reflex_runtime.policies.wires.limits import RequestLimits, SocketLimits, limits_of, question_of
from reflex_runtime.policies.wires.observations import Reading, text_of
from reflex_runtime.policies.wires.openpi import Episodes
from reflex_runtime.web.errors import ClientError, NotFound, Reported, Unauthorized, describe_error, known
from reflex_runtime.web.fields import check_id, invalid
from reflex_runtime.web.json import printable
from reflex_runtime.web.zeromq import ZmqMessage

DEADLINE_MS: Final = 15_000.0  # default `timeout_ms` of clients; those of N1.5 and N1.6 never apply it
MAX_CLIENTS: Final = 4096  # routing ids; beyond it the least recently used one is forgotten
_OPTIONS: Final = RequestLimits.__struct_fields__
_SENT: Final = ("request_id", "timing", "batch", "cache", "guard", "rtc", "model_hash", "policy_changed", "warnings")


class GrootClient:
    """The state of one routing id. name: of the robot. said: options of its last reset."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.said: dict[str, Any] = {}
        self._episodes: dict[str, Episodes] = {}

    def episodes(self, part: str) -> Episodes:
        """The episodes of one row or environment."""
        if part not in self._episodes and len(self._episodes) >= MAX_ROWS:
            raise invalid("env_id", f"env_id: a connection may have {MAX_ROWS} environments")
        return self._episodes.setdefault(part, Episodes(self.name + part))

    def reset(self, options: Mapping[str, Any]) -> None:
        """Begin new episodes, of the named environments or of all."""
        said = {name: options[name] for name in ("robot_id", "episode_id", "policy") if options.get(name) is not None}
        limits_of(said)
        for name, value in said.items():
            check_id(name, value)
        environments = options.get("env_id")
        named = [self.episodes(part) for part in _parts(environments)] if environments is not None else None
        self.said = said
        for episodes in self._episodes.values() if named is None else named:
            episodes.reset()


class GrootSession:
    """The session of all clients of a listener. form: of get_modality_config, n1.5 or n1.6."""

    def __init__(self, handler: RequestHandler, form: str) -> None:
        self._handler, self._form = handler, form
        self._clients: OrderedDict[bytes, GrootClient] = OrderedDict()

    async def answer(self, message: ZmqMessage) -> bytes:
        """The answer to a message; errors are answers too."""
        try:
            return await self._answer(message)
        except Reported as reported:
            return _error(reported.error, reported.request_id)
        except Exception as failure:
            return self.failed(message, known(failure, message.id))

    async def _answer(self, message: ZmqMessage) -> bytes:
        sent = decode(message.data)
        self._check_token(sent.get("api_token"))
        endpoint = text_of(sent.get("endpoint", "get_action"))
        if endpoint == "get_action":
            return await self._act(message, _map(sent, "data"))
        if endpoint == "reset":
            self._client(message).reset(_options(_map(sent, "data")))
            return encode({})
        if endpoint == "ping":
            self._handler.runtime.need_policy()
            handler = self._asked_by(message)
            expects = {} if handler.unnamed else handler.reading(GROOT).describe()  # stock clients do not read it
            return encode({"status": "ok", "message": "Server is running", "reflex": expects})
        if endpoint == "get_modality_config":
            self._handler.runtime.need_policy()
            return encode(modalities(self._asked_by(message).reading(GROOT), self._form == "n1.5"))
        if endpoint == "kill":
            raise NotFound("kill is not served")
        raise NotFound(printable(f"Unknown endpoint: {str(endpoint)[:100]}"))

    def failed(self, message: ZmqMessage, error: ReflexError) -> bytes:
        """Count an error and return the message for it."""
        client = self._clients.get(message.peer)
        name = message.id if client is None else client.name
        self._handler.refused(PendingRequest(GROOT, message.id, name, message.started), error)
        return _error(error, message.id)

    def _asked_by(self, message: ZmqMessage, options: Mapping[str, Any] | None = None) -> RequestHandler:
        """What takes the requests of a client: for the policy that its options name, those of its last reset too."""
        name = (self._client(message).said if options is None else options).get("policy")
        return self._handler.of(limits_of({"policy": name}).policy)

    def _check_token(self, token: Any) -> None:
        key, token = self._handler.config.api_key, text_of(token)
        if key and not (isinstance(token, str) and hmac.compare_digest(token.encode(errors="replace"), key.encode())):
            raise Unauthorized("Unauthorized: Invalid API token")

    def _client(self, message: ZmqMessage) -> GrootClient:
        """The client of a message. Named after the message, because routing ids repeat after a restart."""
        client = self._clients.get(message.peer)
        if client is None:
            client = self._clients[message.peer] = GrootClient(f"gr00t-{message.id}")
            if len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
        self._clients.move_to_end(message.peer)
        return client

    async def _act(self, message: ZmqMessage, data: Mapping[str, Any]) -> bytes:
        """One get_action. Each row is a request; they are answered together."""
        client, nested = self._client(message), "observation" in data
        options = client.said | _options(data)
        handler = self._asked_by(message, options)
        reading = handler.reading(GROOT)
        seen = _map(data, "observation") if nested else {name: data[name] for name in data if name != "options"}
        observation = GrootObservation(seen)
        limits = limits_of({name: options[name] for name in _OPTIONS if options.get(name) is not None})
        if limits.deadline_ms is None and not handler.served.config.deadline_ms:
            limits.deadline_ms = DEADLINE_MS
        parts = _parts(options.get("env_id"), observation.size)
        rows = observation.rows(reading.wire)
        questions = [_question(reading, row, client, part, limits) for row, part in zip(rows, parts, strict=True)]
        many = len(questions) > 1
        for row, question in enumerate(questions):
            if many and question.request_id:
                question.request_id = f"{question.request_id}.{row}"
        ids = [f"{message.id}.{row}" if many else message.id for row in range(len(questions))]
        pending = [PendingRequest(GROOT, own, client.name, message.started) for own in ids]
        answers = await handler.infer_all(pending, questions, message.received)
        actions = observation.actions(reading, [answer.actions for answer in answers])
        if not nested:
            return encode(actions)
        return encode([actions, {"reflex": [{name: getattr(answer, name) for name in _SENT} for answer in answers]}])


def _question(
    reading: Reading, row: Mapping[str, Any], client: GrootClient, part: str, limits: RequestLimits
) -> Question:
    observed = reading.read(row)
    name = None if limits.episode_id is None else limits.episode_id + part
    own = msgspec.structs.replace(limits, robot_id=(limits.robot_id or client.name) + part)
    return question_of(observed, own, SocketLimits(), None, client.episodes(part).of(name, observed[2]))


def _error(error: ReflexError, request_id: str) -> bytes:
    told = describe_error(error, request_id)
    del told["message"]
    return encode(told | {"error": error.message, "code": error.code})


def _map(sent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = sent.get(name)
    if not isinstance(found, dict):
        raise ClientError(f"{name}: must be a map")
    return found


def _options(data: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a message. Ids may be numbers."""
    found = data.get("options")
    if found is None:
        return {}
    options = {name: text_of(value) for name, value in _map(data, "options").items()}
    return options | {name: str(options[name]) for name in ("robot_id", "episode_id") if type(options.get(name)) is int}


def _parts(environments: Any, rows: int = 1) -> list[str]:
    """The suffix of each row's robot and episode: its environment, otherwise its number."""
    if environments is None:
        return [""] if rows == 1 else [f"/{row}" for row in range(rows)]
    named = environments if isinstance(environments, list) else [environments]
    if any(type(name) not in (int, str) for name in named) or len(named) > MAX_ROWS or rows not in (1, len(named)):
        raise invalid("env_id", "env_id: must be a number or a text, or a list of them, one for each row")
    for name in named:
        check_id("env_id", str(name))
    return [f"/{name}" for name in named]
