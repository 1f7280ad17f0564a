"""Results sent elsewhere: to a real MQTT broker and a real HTTP server, which are slow, away, or refuse."""

from __future__ import annotations

import gc
import json
import random
import re
import signal
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

from feeds.broker import Broker, Receiver, Subscriber, needs_mosquitto
from feeds.commands import PATIENCE, Feeds, by_feed, ran, refusal, results
from feeds.fakes import frame
from feeds.videos import clip
from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.outputs.json_lines import line_of
from reflex_runtime.feeds.outputs.mqtt import WINDOW, MqttPublisher
from reflex_runtime.feeds.outputs.output import WAITING, ResultLine, ResultOutput
from reflex_runtime.feeds.outputs.webhook import Webhook
from reflex_runtime.feeds.runtime.pipeline import Result
from reflex_runtime.feeds.runtime.runtime import Runtime
from serving.place import Place

SHAPES = ("--onnx", "shapes")
USER = ("cam", "s3cr:et")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker"), USER) as running:
        yield running


def result(number: int, feed: str = "a") -> Result:
    return Result(frame(number), feed, {"text": str(number)}, 0.01)


def number_of(line: ResultLine) -> int:
    found: int = json.loads(line.data)["sequence"]
    return found


def balanced(output: ResultOutput) -> bool:
    s = output.snapshot()
    return s.taken == s.sent + sum(s.drops.values()) + s.waiting


# -- the queue ---------------------------------------------------------------------------------------------------------


class Kept(ResultOutput):
    """Sends nothing by itself: the test is its thread."""

    kind = "kept"

    def waits(self) -> int:
        return self.snapshot().waiting

    def next(self, most: int) -> list[Any]:
        return self._next(most)


@pytest.mark.parametrize("seed", range(20))
def test_f14_an_output_keeps_the_newest_and_counts_every_result_once(seed: int) -> None:
    rng, kept, now = random.Random(seed), Kept("nowhere", 5), 0
    hand: list[Any] = []
    arrived: list[int] = []
    for _ in range(300):
        match rng.randrange(5):
            case 0 | 1:
                kept.take(result(now))
                now += 1
            case 2 if kept.waits() > len(hand):
                hand += kept.next(rng.randrange(1, 4))
            case 3 if hand:
                kept._sent(len(hand))
                arrived, hand = arrived + [number_of(line) for line in hand], []
            case 4 if hand:
                if rng.random() < 0.5:
                    kept._back(hand)
                else:
                    kept._drop("lost", len(hand))
                hand = []
        assert balanced(kept)
        assert kept.snapshot().taken == now
        assert kept.waits() <= 5 + len(hand)
        assert arrived == sorted(set(arrived))
    kept._drop("lost", len(hand))
    waits = kept.waits()
    left = [number_of(line) for line in kept.next(9)] if waits else []
    assert left == list(range(now - waits, now)), "the newest, in order"


def test_f14_what_comes_after_the_close_is_unsent() -> None:
    kept = Kept("nowhere", 5)
    kept.take(result(1))
    kept.signal(0.0)
    kept.take(result(2))
    assert kept.next(1) == []
    assert kept.join()
    kept._sent()  # of a thread that hung until now
    assert kept.snapshot().drops["unsent"] == 2
    assert kept.snapshot().sent == 0


# -- MQTT --------------------------------------------------------------------------------------------------------------


@needs_mosquitto
def test_f14_publish_and_webhook_get_the_lines_of_results_and_show_no_secret(broker: Broker, tmp_path: Path) -> None:
    publish = f"mqtt://cam:s3cr%3Aet@127.0.0.1:{broker.port}/site/cams"
    with Receiver() as receiver, Subscriber(broker.port, "site", USER) as told:
        webhook = receiver.url.replace("//", "//joe:s3cret@") + "?token=t0ken"
        arguments = (f"a={clip(20)}", f"b={clip(10)}", *SHAPES, "--results", "r.jsonl", "--webhook", webhook)
        feeds = ran(*arguments, "--publish", publish, "--publish-qos", "1", cwd=tmp_path)
        heard = told.until("site/cams/status", "offline")
    lines = results(tmp_path / "r.jsonl")
    assert heard[0] == ("site/cams/status", "online", 1)
    published: dict[str, list[Any]] = {}
    for topic, text, qos in heard[1:-1]:
        assert qos == 1
        published.setdefault(topic.removeprefix("site/cams/feeds/"), []).append(json.loads(text))
    assert published == by_feed(lines)
    assert by_feed(line for body in receiver.bodies for line in body) == by_feed(lines)
    assert receiver.headers[0]["Content-Type"] == "application/x-ndjson"
    assert receiver.headers[0]["Authorization"] == "Basic am9lOnMzY3JldA=="
    assert receiver.paths[0] == "/in?token=t0ken"
    assert any(f"mqtt: 30 results to mqtt://127.0.0.1:{broker.port}/site/cams" in line for line in feeds.log)
    assert any(f"webhook: 30 results to {receiver.url}" in line for line in feeds.log)
    assert not any(word in str(feeds) for word in ("s3cr", "t0ken"))


@needs_mosquitto
def test_f14_the_address_may_stand_in_the_environment_and_the_will_is_heard(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"mqtt://127.0.0.1:{broker.port}/will"
    own = {"REFLEX_PUBLISH": where.replace("//", f"//{USER[0]}:{USER[1]}@")}
    with Subscriber(broker.port, "will", USER) as told:
        with Feeds("a=shapes:seed=1", *SHAPES, "--port", "0", cwd=tmp_path, env=own) as feeds:
            assert told.get() == ("will/status", "online", 1)
            assert [told.get()[0::2] for _ in range(3)] == [("will/feeds/a", 0)] * 3
            connection = HTTPConnection("127.0.0.1", feeds.port, timeout=PATIENCE)
            connection.request("GET", "/status")
            status = json.loads(connection.getresponse().read())
            connection.request("GET", "/metrics")
            metrics = connection.getresponse().read().decode()
            connection.close()
            assert main(["top", "--once", f"http://127.0.0.1:{feeds.port}"]) == 0
            feeds.process.send_signal(signal.SIGKILL)
            told.until("will/status", "offline")
            feeds.process.wait()
            feeds.process.poll = lambda: None  # type: ignore[method-assign]  # it was killed on purpose
    table = capsys.readouterr().out
    assert re.search(rf"mqtt +connected +\d+ .*{where}", table), table
    mqtt = status["outputs"]["mqtt"]
    assert (mqtt["state"], mqtt["where"], mqtt["drops"]["overrun"]) == ("connected", where, 0)
    assert mqtt["sent"] > 0
    assert status["status"] == "ok"
    assert 'reflex_feed_output_up{output="mqtt"} 1.0' in metrics
    assert "s3cr" not in json.dumps(status) + metrics + str(feeds)


@needs_mosquitto
def test_one_that_leaves_does_not_leave_offline_behind_where_another_publishes(broker: Broker) -> None:
    """As in a rolling restart: both are there for a while, and the old one ends."""
    url = f"mqtt://{USER[0]}:{USER[1]}@127.0.0.1:{broker.port}/rolling"
    with Subscriber(broker.port, "rolling", USER) as told:
        new = MqttPublisher(url)
        new.start()
        assert told.get()[1] == "online"
        old = MqttPublisher(url)
        old.start()
        assert told.get()[1] == "online"
        old.signal(PATIENCE)
        assert old.join()
        told.until("rolling/status", "offline")
        assert told.get()[:2] == ("rolling/status", "online")
        new.signal(PATIENCE)
        assert new.join()
        told.until("rolling/status", "offline")
    with Subscriber(broker.port, "rolling", USER) as later:
        assert later.get()[:2] == ("rolling/status", "offline")


def published(url: str, count: int = 3) -> MqttPublisher:
    """So many results given at once, then the end."""
    output = MqttPublisher(url)
    for number in range(count):
        output.take(result(number))
    output.start()
    output.signal(PATIENCE)
    assert output.join()
    assert balanced(output)
    return output


@needs_mosquitto
def test_f14_a_broker_that_refuses_the_password_does_not_delay_the_end(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    output = published(f"mqtt://cam:wr0ng@127.0.0.1:{broker.port}/x")
    assert output.snapshot().error == "the broker refuses the connection: Not authorized"
    assert output.snapshot().drops["unsent"] == 3
    assert "wr0ng" not in caplog.text + repr(output.snapshot())


def test_f14_that_a_broker_refuses_stays_told_when_it_then_closes_the_connection() -> None:
    output = MqttPublisher("mqtt://cam:wr0ng@127.0.0.1:1883/x")
    refused = ReasonCode(PacketTypes.CONNACK, identifier=0x87)
    output._on_connect(None, None, None, refused, None)
    output._on_disconnect(None, None, None, ReasonCode(PacketTypes.DISCONNECT, identifier=0x80), None)
    assert output.snapshot().error == "the broker refuses the connection: Not authorized"


@needs_mosquitto
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # paho-mqtt leaves the refused socket
def test_f14_mqtts_checks_the_certificate_of_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker(tmp_path, tls=True) as broker, Subscriber(broker.port, "tls", ca=broker.ca) as told:
        url = f"mqtts://localhost:{broker.port}/tls"
        monkeypatch.setattr("reflex_runtime.feeds.outputs.mqtt.RECONNECT_S", (0.05, 0.1))
        monkeypatch.setattr("reflex_runtime.feeds.outputs.mqtt.FAREWELL_S", PATIENCE)  # no thread is left
        refused = published(url).snapshot()
        assert refused.drops["unsent"] == 3
        assert re.search("cannot be reached: .*certificate verify failed: self.signed", str(refused.error))
        gc.collect()
        monkeypatch.setenv("SSL_CERT_FILE", str(broker.ca))
        assert published(url).snapshot().sent == 3
        assert len(told.until("tls/status", "offline")) == 5


@needs_mosquitto
def test_f14_while_the_broker_is_away_the_newest_results_wait_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reflex_runtime.feeds.outputs.mqtt.RECONNECT_S", (0.05, 0.1))
    broker = Broker(tmp_path)
    output = MqttPublisher(f"mqtt://127.0.0.1:{broker.port}/away", qos=1)
    tries = threading.Semaphore(1)  # the next comes once somebody is there who hears the first result
    output._client.on_pre_connect = lambda *_: tries.acquire(timeout=PATIENCE)
    output.start()
    for number in range(WAITING + 500):
        output.take(result(number))
    assert balanced(output)
    assert output.snapshot().drops["overrun"] == 500
    with output.news:
        assert output.news.wait_for(lambda: output.snapshot().state == "away", PATIENCE)
    with broker, Subscriber(broker.port, "away") as told:
        tries.release(1000)
        heard = [told.get() for _ in range(WAITING + 1)]
        assert heard[0][:2] == ("away/status", "online")
        assert [json.loads(text)["sequence"] for _, text, _ in heard[1:]] == list(range(500, WAITING + 500))
        output.take(result(9999))
        assert json.loads(told.get()[1])["sequence"] == 9999
        broker.stop()
        broker.start()
        with Subscriber(broker.port, "away") as again:
            output.take(result(10_000))
            assert again.until("away/feeds/a", line_of(result(10_000)).decode())
            output.signal(PATIENCE)
            assert output.join()
    snapshot = output.snapshot()
    assert (snapshot.sent, snapshot.waiting, snapshot.state) == (WAITING + 2, 0, "closed")
    assert snapshot.retries >= 1
    assert balanced(output)


@needs_mosquitto
@pytest.mark.parametrize("qos", [0, 1])
def test_f14_a_broker_that_hangs_gets_a_bounded_number_of_messages_and_a_bounded_time_at_the_end(
    tmp_path: Path, qos: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reflex_runtime.feeds.outputs.output.GRACE_S", PATIENCE)
    with Broker(tmp_path) as broker, Subscriber(broker.port, "h") as told:
        output = MqttPublisher(f"mqtt://127.0.0.1:{broker.port}/h", qos)
        output.start()
        assert told.get()[:2] == ("h/status", "online")
        broker.hang()
        large = "x" * 200_000  # each, so that whichever are dropped, what the sockets' buffers take is few of them
        for number in range(WAITING + 100):
            output.take(Result(frame(number), "a", large, 0.01))
        output.signal(0.2)
        assert output.join()
    snapshot = output.snapshot()
    assert snapshot.sent <= (100 if qos == 0 else 0)
    assert snapshot.sent + snapshot.drops["overrun"] >= 100 - WINDOW, "no more than that is on its way"
    assert snapshot.drops["unsent"] > WAITING / 2
    assert balanced(output)


@needs_mosquitto
def test_f14_a_topic_may_have_any_characters_and_a_result_that_no_broker_takes_is_refused(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    output = MqttPublisher(f"mqtt://cam:s3cr%3Aet@127.0.0.1:{broker.port}/h%C3%B6f%201", qos=2)
    with Subscriber(broker.port, "höf 1", USER) as told:
        output.take(Result(frame(0), "a", "x" * 1_000_001, 0.01))
        output.take(Result(frame(2), "a", Unwritable(), 0.01))
        output.take(Result(frame(1), "a", "half \ud800", 0.01))
        output.start()
        output.signal(PATIENCE)
        assert output.join()
        heard = [told.get() for _ in range(3)]  # a message of QoS 2 may come after the status
    (topic, text, qos), *_ = sorted(heard)
    assert (topic, json.loads(text)["sequence"], qos) == ("höf 1/feeds/a", 1, 2)
    assert (output.snapshot().sent, output.snapshot().drops["refused"]) == (1, 2)
    assert "a result of a cannot be written as JSON: ValueError: has no text" in caplog.text
    assert (output.snapshot().error or "").startswith("a result of a has 1000")


@needs_mosquitto
@pytest.mark.parametrize("feed", ["a/#", "+", "../b", "x\0y", "\udc80"])
def test_f14_a_feed_whose_name_is_no_part_of_a_topic_is_published_below_its_own(broker: Broker, feed: str) -> None:
    site = f"site/named-{ord(feed[0])}"  # the status of each is kept by the broker
    address = f"mqtt://cam:s3cr%3Aet@127.0.0.1:{broker.port}/{site}"
    with Subscriber(broker.port, site, USER) as told:
        publisher = MqttPublisher(address, qos=1)
        publisher.start()
        publisher.take(result(1, feed))
        publisher.signal(PATIENCE)
        assert publisher.join()
        heard = told.until(f"{site}/status", "offline")
    (topic,) = {topic for topic, _, _ in heard} - {f"{site}/status"}
    assert re.fullmatch(f"{site}/feeds/feed-[0-9a-f]{{16}}", topic)


class Unwritable:
    def __str__(self) -> str:
        raise ValueError("has no text")


# -- webhooks ----------------------------------------------------------------------------------------------------------


def posted(receiver: Receiver, count: int, timeout: float = PATIENCE) -> Webhook:
    """So many results given at once, then the end."""
    output = Webhook(receiver.url)
    for number in range(count):
        output.take(result(number))
    output.start()
    output.signal(timeout)
    output.join()
    assert balanced(output)
    return output


def test_f14_a_webhook_that_is_slow_gets_more_in_a_request_and_never_too_many() -> None:
    with Receiver() as receiver:
        output = posted(receiver, 250)
    assert [len(body) for body in receiver.bodies] == [100, 100, 50]
    assert [line["sequence"] for body in receiver.bodies for line in body] == list(range(250))
    assert output.snapshot().sent == 250


def test_f14_a_request_has_no_further_result_after_a_megabyte() -> None:
    with Receiver() as receiver:
        output = Webhook(receiver.url)
        for number in range(4):
            output.take(Result(frame(number), "a", "x" * 400_000, 0.01))
        output.start()
        output.signal(PATIENCE)
        assert output.join()
    assert [[line["sequence"] for line in body] for body in receiver.bodies] == [[0, 1, 2], [3]]
    assert balanced(output)


def test_f14_a_result_that_cannot_be_written_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    with Receiver() as receiver:
        output = Webhook(receiver.url)
        for number in range(4):
            output.take(Result(frame(number), "a", Unwritable() if number in (0, 2) else number, 0.01))
        output.start()
        output.signal(PATIENCE)
        assert output.join()
    assert [[line["sequence"] for line in body] for body in receiver.bodies] == [[1, 3]]
    assert (output.snapshot().sent, output.snapshot().drops["refused"]) == (2, 2)
    assert "a result of a cannot be written as JSON: ValueError: has no text" in caplog.text
    assert balanced(output)


def test_f14_a_webhook_is_asked_again_after_a_pause_that_grows_and_not_before_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(Webhook, "_pause", lambda _, seconds: pauses.append(seconds))
    answers = {0: (503, {}), 1: (429, {"Retry-After": "7"}), 2: (500, {}), 3: (503, {"Retry-After": "999999"})}
    with Receiver(lambda n: answers.get(n, (204, {}))) as receiver:
        output = Webhook(receiver.url)
        output.take(result(0))
        output.start()
        receiver.wait(5)
        output.signal(PATIENCE)
        assert output.join()
    assert receiver.bodies == receiver.bodies[:1] * 5
    assert 0.25 < pauses[0] <= 0.5
    assert (pauses[1], pauses[3]) == (7.0, 30.0)
    assert 1.0 < pauses[2] <= 2.0
    assert (output.snapshot().sent, output.snapshot().retries) == (1, 4)


def test_f14_a_webhook_that_always_fails_gives_a_group_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Webhook, "_pause", lambda *_: None)
    with Receiver(lambda n: (500, {}) if n < 8 else (200, {})) as receiver:
        output = Webhook(receiver.url)
        output.take(result(0))
        output.start()
        receiver.wait(8)
        output.take(result(1))
        receiver.wait(9)
        output.signal(PATIENCE)
        assert output.join()
    told = output.snapshot()
    assert (told.sent, told.drops["lost"]) == (1, 1)


@pytest.mark.parametrize(
    ("status", "headers", "says"),
    [
        (400, {}, "answers 400"),
        (302, {"Location": "http://127.0.0.1:1/"}, "answers 302; redirects are not followed"),
    ],
)
def test_f14_what_a_webhook_refuses_is_dropped_and_not_sent_elsewhere(
    status: int, headers: dict[str, str], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Receiver(lambda _: (status, headers)) as receiver:
        output = posted(receiver, 3)
    told = output.snapshot()
    assert (told.drops["refused"], told.retries, told.error) == (3, 0, says)
    assert len(receiver.bodies) == 1
    assert caplog.messages == [f"{output.where}: {says}; dropped"]


def test_f14_an_answer_without_an_end_is_an_answer() -> None:
    with Receiver(lambda _: (200, {"Transfer-Encoding": "chunked"})) as receiver:  # and no chunk comes
        output = posted(receiver, 3)
    assert (output.snapshot().sent, output.snapshot().retries, len(receiver.bodies)) == (3, 0, 1)


def test_f14_an_answer_whose_body_breaks_off_is_an_answer() -> None:
    with Receiver(lambda _: (200, {"Content-Length": "50"}), closes=True, body=b"abc") as receiver:
        output = posted(receiver, 3)
    assert (output.snapshot().sent, output.snapshot().retries, len(receiver.bodies)) == (3, 0, 1)


@pytest.mark.parametrize(
    ("headers", "body", "connections"),
    [
        ({"Transfer-Encoding": "chunked"}, b"2\r\nok\r\n0\r\n\r\n", 1),
        ({"Content-Length": "2"}, b"ok", 1),
        ({"Content-Length": "70000"}, b"." * 70_000, 3),  # longer than what is read
    ],
)
def test_f14_a_connection_is_kept_after_a_short_answer(
    headers: dict[str, str], body: bytes, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reflex_runtime.feeds.outputs.webhook.BODY_S", PATIENCE)
    with Receiver(lambda _: (200, headers), body=body) as receiver:
        output = posted(receiver, 250)
    assert (output.snapshot().sent, len(receiver.bodies), len(receiver.clients)) == (250, 3, connections)


@pytest.mark.parametrize("kept", [0, 1])
def test_f14_a_webhook_that_hangs_delays_the_end_by_a_bounded_time(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """kept: requests that are answered before on the connection."""
    monkeypatch.setattr("reflex_runtime.feeds.outputs.output.GRACE_S", PATIENCE)
    monkeypatch.setattr("reflex_runtime.feeds.outputs.webhook.TIMEOUT_S", 2 * PATIENCE)
    hangs = threading.Event()
    with Receiver(lambda n: (200, {}) if n < kept or hangs.wait(PATIENCE) else (500, {})) as receiver:
        output = Webhook(receiver.url)
        output.start()
        for number in range(kept + 1):
            with output.news:
                assert output.news.wait_for(lambda n=number: output._sent_count == n, PATIENCE)
            output.take(result(number))
            receiver.wait(number + 1)
        output.take(result(kept + 1))
        output.signal(0.1)
        assert output.join(), "the request was cut off"
        hangs.set()
        assert len(receiver.bodies) == kept + 1, "and not sent again"
    assert output.snapshot().drops["unsent"] == 2
    assert balanced(output)


@pytest.mark.parametrize("says_so", [True, False])
def test_f14_a_connection_that_the_server_closed_is_made_again_at_once(says_so: bool) -> None:
    headers = {"Connection": "close"} if says_so else {}
    with Receiver(lambda _: (200, headers), closes=True) as receiver:
        output = Webhook(receiver.url)
        output.start()
        for number in range(3):
            output.take(result(number))
            receiver.wait(number + 1)
        output.signal(PATIENCE)
        assert output.join()
    assert (output.snapshot().sent, output.snapshot().retries) == (3, 0)


# -- both --------------------------------------------------------------------------------------------------------------


def test_f14_receivers_that_are_away_cost_no_frame_and_the_end_does_not_wait_for_them(tmp_path: Path) -> None:
    arguments = (f"a={clip(30)}", *SHAPES, "--results")
    with Place() as away:
        outputs = ("--publish", f"mqtt://127.0.0.1:{away.port}/x", "--webhook", f"http://127.0.0.1:{away.port}/")
        feeds = ran(*arguments, "r.jsonl", *outputs, cwd=tmp_path, status=1)
    assert len(results(tmp_path / "r.jsonl")) == 30
    for line in ("mqtt: 0 results", "webhook: 0 results"):
        why = "dropped: 30 unsent (cannot be reached: Connection refused)"
        assert any(line in told and why in told for told in feeds.log), feeds


def test_f14_an_output_of_a_runtime_has_a_name_of_its_own() -> None:
    runtime = Runtime()
    address = "http://127.0.0.1:1/"
    runtime.output(Webhook(address))
    runtime.output(Webhook(address, name="second"))
    with pytest.raises(ConfigError, match=r"Runtime\.output: the name 'webhook' is used already"):
        runtime.output(Webhook(address))
    runtime.stop()
    assert {name: o.state for name, o in runtime.snapshot().outputs.items()} == {
        "webhook": "closed", "second": "closed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--publish amqp://u:secret@h/t", "--publish=amqp://h/t: must be mqtt://HOST[:PORT]/TOPIC"),
        ("--publish mqtt://u:secret@h", "--publish=mqtt://h: the path must be a topic of 1 to 200 characters"),
        ("--publish mqtt://h/a/%23", "--publish=mqtt://h/a/%23: the path must be a topic"),
        ("--publish mqtt://h:99999/t", "--publish=mqtt://h:99999/t: must be mqtt://HOST[:PORT]/TOPIC"),
        ("--publish-qos 1", "--publish-qos needs --publish"),
        ("--publish mqtt://h/t --publish-qos 3", "--publish-qos=3: must be in [0, 2]"),
        ("--webhook ftp://u:secret@h/", "--webhook=ftp://h/: must be http[s]://HOST[:PORT]/PATH"),
        ("--webhook http:///x", "--webhook=http:///x: must be http[s]://HOST[:PORT]/PATH"),
    ],
)
def test_f14_an_address_that_is_none_is_refused_without_its_secrets(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, f"a={clip(3)}", *SHAPES, *arguments.split())
    assert says in said
    assert "secret" not in said
