"""Publishes results to an MQTT broker, one message each.

TOPIC/feeds/NAME   a feed's results, with the lines of --results; for NAME see `path_name`
TOPIC/status       online or offline, retained. The broker publishes offline when this process is gone; if another
                   process uses the same topic, as in a rolling restart, that then publishes online again
"""

from __future__ import annotations

import ssl
import sys
import threading
from typing import Any, Final
from urllib.parse import unquote
from uuid import uuid4

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.outputs.json_lines import path_name
from reflex_runtime.feeds.outputs.output import ReceiverAddress, ResultLine, ResultOutput, address_of, unreachable
from reflex_runtime.feeds.runtime.pipeline import library

WINDOW: Final = 20  # messages not yet written to the socket (QoS 0) or acknowledged (QoS 1 and 2)
MOST_BYTES: Final = 1_000_000  # of a message: many brokers end the connection at a larger one
LONGEST_TOPIC: Final = 200
PORTS: Final = {False: 1883, True: 8883}  # by TLS
KEEPALIVE_S: Final = 30
RECONNECT_S: Final = (1, 30)  # the first and the longest pause
CONNECT_S: Final = 5.0  # to connect
FAREWELL_S: Final = 0.3  # for the last status, and for the disconnect


class MqttPublisher(ResultOutput):
    """Publishes every result to TOPIC/feeds/NAME of mqtt[s]://[user:password@]host[:port]/TOPIC. Raises ConfigError for
    another address, and if paho-mqtt is missing.

    qos: when the connection breaks, unconfirmed messages are lost and counted (0), are sent again and may arrive twice
    (1), or are sent again and arrive once (2).

    While the broker is away, the newest results wait. At the end they are sent, unless the broker is still away.
    """

    kind = "mqtt"

    def __init__(self, url: str, qos: int = 0, name: str = "") -> None:
        address = address_of(url, "mqtt", "mqtt://HOST[:PORT]/TOPIC, or mqtts://… over TLS")
        super().__init__(address.shown, name=name)
        self._topic = _topic_of(address)
        self._qos = qos
        self._connected = self._refused = False  # refused: by the broker, at the last try
        self._on_way: set[int] = set()  # message numbers of results that are sent and not confirmed
        self._acknowledged: set[int] = set()  # message numbers, maybe before `publish` returned them
        self._leaving = False
        self._client = self._new_client(address)

    def _new_client(self, address: ReceiverAddress) -> Any:
        mqtt = library("paho.mqtt.client", "MQTT")
        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id=f"reflex-{uuid4().hex[:12]}")
        if address.user is not None or address.password is not None:
            client.username_pw_set(address.user or "", address.password)
        if address.secure:
            client.tls_set_context(ssl.create_default_context())
        client.will_set(f"{self._topic}/status", "offline", qos=1, retain=True)
        client.max_inflight_messages_set(WINDOW)
        client.reconnect_delay_set(*RECONNECT_S)
        client.connect_timeout = CONNECT_S
        client.on_connect, client.on_connect_fail = self._on_connect, self._on_connect_fail
        client.on_disconnect, client.on_publish = self._on_disconnect, self._on_publish
        client.on_message = self._on_status
        client.connect_async(address.host, address.port or PORTS[address.secure], KEEPALIVE_S)
        return client

    # -- on the output's thread ----------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        self._client.loop_start()
        try:
            while lines := self._next(1, ready=self._ready):
                self._publish(*lines)
            with self.news:
                self.news.wait_for(lambda: (self._ready() and not self._on_way) or not self._connected, self.time_left)
        finally:
            self._leave()

    def _ready(self) -> bool:
        """Count what is acknowledged. Returns whether a further message may be sent."""
        if self._state == "away" and self.time_left is not None:
            self.signal(0.0)  # the end does not wait for a broker that is away
        self._count_arrived()
        self._acknowledged.clear()  # the rest are statuses
        return self._connected and len(self._on_way) < WINDOW

    def _count_arrived(self) -> None:
        arrived = self._on_way & self._acknowledged
        self._on_way -= arrived
        self._sent(len(arrived))

    def _publish(self, line: ResultLine) -> None:
        """Publish one result. Called without `news` held, because the client calls back while it holds its own lock."""
        feed, text = line
        if len(text) > MOST_BYTES:
            self._drop("refused")
            self._failed(f"a result of {feed} has {len(text)} bytes, a message at most {MOST_BYTES}")
            return
        made = self._client.publish(f"{self._topic}/feeds/{path_name(feed)}", text, qos=self._qos)
        with self.news:
            if self._qos == 0 and made.rc != 0:  # the connection was lost just now
                self._back([line])
            else:
                self._on_way.add(made.mid)

    def _leave(self) -> None:
        """Publish `offline` and disconnect, in a bounded time."""
        self._leaving = True
        if self._connected and not self._on_way:  # a broker that takes no messages would not take this
            self._client.publish(f"{self._topic}/status", "offline", qos=1, retain=True).wait_for_publish(FAREWELL_S)
        self._client.disconnect()
        ending = threading.Thread(target=self._client.loop_stop, name="reflex-mqtt-end", daemon=True)
        ending.start()
        ending.join(FAREWELL_S)

    # -- on the client's thread ----------------------------------------------------------------------------------------

    def _on_connect(self, client: Any, _: Any, __: Any, reason: Any, ___: Any) -> None:
        self._refused = reason.is_failure
        if self._refused:
            self._set_away(f"the broker refuses the connection: {reason}")
            return
        client.subscribe(f"{self._topic}/status", qos=1)
        self._publish_online()
        with self.news:
            self._count_arrived()
            if self._qos == 0:  # the client drops the others
                self._drop("lost", len(self._on_way))
                self._on_way.clear()
            self._connected = True
            self._set_connected()
            self.news.notify_all()

    def _on_status(self, _: Any, __: Any, message: Any) -> None:
        """Another process on the same topic went offline: publish that this one has not."""
        if message.payload == b"offline" and not self._leaving:
            self._publish_online()

    def _publish_online(self) -> None:
        self._client.publish(f"{self._topic}/status", "online", qos=1, retain=True)

    def _on_connect_fail(self, _: Any, __: Any) -> None:
        self._lost(unreachable(sys.exception()))  # the client calls this while it handles the error

    def _on_disconnect(self, _: Any, __: Any, ___: Any, reason: Any, ____: Any) -> None:
        known = self._refused or self.time_left is not None
        self._lost(None if known else f"the connection was lost ({reason})")

    def _lost(self, why: str | None) -> None:
        with self.news:
            self._connected = False
            if why is not None:
                self._set_away(why)
            self.news.notify_all()

    def _on_publish(self, _: Any, __: Any, number: int, ___: Any, ____: Any) -> None:
        with self.news:
            self._acknowledged.add(number)
            self.news.notify_all()


def _topic_of(address: ReceiverAddress) -> str:
    topic = unquote(address.path[1:])
    if not 0 < len(topic) <= LONGEST_TOPIC or set(topic) & set("+#\0") or topic[0] in "$/" or topic[-1] == "/":
        what = f"a topic of 1 to {LONGEST_TOPIC} characters, without + and #, and no / or $ at its ends"
        raise ConfigError(f"{address.shown}: the path must be {what}")
    return topic
