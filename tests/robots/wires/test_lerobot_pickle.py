"""LeRobot's pickles: what is read, and that nothing else is ever loaded or called."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.wires.lerobot import (
    HELPERS,
    OBSERVATION,
    SETUP,
    LerobotObservation,
    LerobotSetup,
    read,
    read_pickle,
)
from reflex_runtime.web.errors import ClientError, InvalidRequest
from robots.wires.broken import FRESH, check

from .lerobot_robot import features, lerobot

PICTURE = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)


def seen(**more: Any) -> Any:
    return lerobot().TimedObservation(1.5, 4, {"a.pos": 1.0, "task": "go"} | more, True)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize(
    "array",
    [PICTURE, np.asfortranarray(PICTURE), PICTURE[::2], np.array([1.5, -2.0], ">f4"), np.zeros((0, 3)), np.array(3)],
)
def test_w40_observations_are_read_as_pickle_writes_them(protocol: int, array: Any) -> None:
    sent = seen(front=array, small=np.float32(2.5), many=-(2**40), no=None)
    fields = read_pickle(pickle.dumps(sent, protocol), OBSERVATION)
    assert (fields["timestamp"], fields["timestep"], fields["must_go"]) == (1.5, 4, True)
    found = fields["observation"]
    assert np.array_equal(found["front"], array)
    assert found["front"].dtype == array.dtype
    assert {name: found[name] for name in ("a.pos", "task", "small", "many", "no")} == {
        "a.pos": 1.0, "task": "go", "small": 2.5, "many": -(2**40), "no": None,
    }  # fmt: skip


def test_w40_an_array_cannot_be_written_to() -> None:
    for protocol in (4, 5):
        fields = read_pickle(pickle.dumps(seen(front=PICTURE.copy()), protocol), OBSERVATION)
        assert not fields["observation"]["front"].flags.writeable


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
def test_w40_pictures_are_views_of_the_message(protocol: int, order: Any) -> None:
    """A copy of two pictures of 480 × 640 would hold the loop for milliseconds; up to 64 KB are in frames."""
    picture = np.asarray(np.random.default_rng(0).integers(0, 255, (160, 160, 3), np.uint8), order=order)
    data = pickle.dumps(seen(front=picture), protocol)
    found = read_pickle(data, OBSERVATION)["observation"]["front"]
    assert np.array_equal(found, picture)
    assert np.shares_memory(found, np.frombuffer(data, np.uint8))
    with pytest.raises(ClientError):
        read_pickle(data[:60_000], OBSERVATION)


def test_w40_instructions_are_read_as_pickle_writes_them() -> None:
    setup = lerobot().RemotePolicyConfig("act", "lab/x", features(("front",)), 50, rename_map={"a": "b"})
    for protocol in (2, 3, 4, 5):
        fields = read_pickle(pickle.dumps(setup, protocol), SETUP)
        assert fields == vars(setup)


class _Calls:
    """What runs a command where `pickle` loads it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._called = function, arguments

    def __reduce__(self) -> Any:
        return self._called


def _hostile(file: Path) -> list[bytes]:
    touch = f"touch {file}"
    found = [
        pickle.dumps(value, protocol)
        for protocol in (0, 1, 2, 3, 4, 5)
        for value in (
            _Calls(os.system, touch), _Calls(eval, f"open({str(file)!r}, 'w')"), _Calls(exec, "x = 1"),
            _Calls(__import__, "os"), seen(front=_Calls(os.system, touch)),
            seen(front=np.array([_Calls(os.system, touch)], object)), _Calls(type, "x", (), {}), seen(front={1, 2}),
        )
    ]  # fmt: skip
    begin = b"\x80\2" + f"c{HELPERS}\n{OBSERVATION}\n".encode()
    found += [
        b"cos\nsystem\n(S'%s'\ntR." % touch.encode(),  # protocol 0
        b"\x80\4\x8c\5posix\x8c\6system\x93\x8c%c%s\x85R." % (len(touch), touch.encode()),
        b"\x80\2cbuiltins\neval\n.", b"\x80\2c__main__\nx\n.", b"\x80\2cnumpy\nload\n.", b"\x80\2ctorch\nload\n.",
        b"\x80\2" + f"c{HELPERS}\nos\n.".encode(), b"\x80\2" + f"c{HELPERS}\nTimedAction\n.".encode(),
        b"\x80\2" + f"c{HELPERS}\n{OBSERVATION}.__init__.__globals__\n.".encode(),
        b"\x80\2c" + b"a" * 10_000 + b"\nb\n.", b"\x82\1.", b"\x80\2Pid\n.", b"i", b"\x80\2(o.", b"\x97.", b"\x98.",
        begin + b")R.", begin + b"(K\1tR.", begin + b")}\x92.", begin + b")\x81K\1b.", begin + b")\x81(K\1K\2d}b.",
        b"\x80\2cnumpy\ndtype\nX\2\0\0\0O8\x85R.", b"\x80\2cnumpy\nndarray\n)R.", b"\x80\2cnumpy\nndarray\n)\x81.",
        begin + b")\x81}b", b"", b".", b"\x80", b"0.", b"h\0.", b"a.", b"(a.", b"e.", b"]e.", b"}(K\1u.", b"t.", b"R.",
        b"\x8e" + b"\xff" * 8, b"\x96" + b"\xff" * 8, b"\x8d" + b"\xff" * 8, b"r\xff\xff\xff\xff.",
        b"B\xff\xff\xff\x7f",
        b"\x8a\xff" + b"\xff" * 255 + b".", b"\x8b\xff\xff\xff\x7f", b"N" * 10_000 + b".", b"(" * 4000 + b".",
    ]  # fmt: skip
    return found


def test_w40_hostile_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    for data in _hostile(tmp_path / "ran"):
        with pytest.raises(ClientError):
            read_pickle(data, OBSERVATION)
    assert not list(tmp_path.iterdir())


def _doubled(levels: int) -> bytes:
    """A list that holds a list twice, and so on: 2^levels texts in 8 bytes a level."""
    within = _doubled(levels - 1) if levels > 1 else b"X\1\0\0\0xq\1"
    return b"](" + within + b"h%ceq%c" % (levels, levels + 1)


@pytest.mark.parametrize("levels", [10, 60])
def test_w40_parts_that_are_shared_are_made_once(levels: int) -> None:
    begin = b"\x80\2" + f"c{HELPERS}\n{SETUP}\n".encode() + b")\x81"
    as_value = begin + b"}(X\1\0\0\0a" + _doubled(levels) + b"ub."
    as_key = begin + b"}(" + _doubled(levels).replace(b"](", b"(").replace(b"e", b"t") + b"Nub."
    as_name = b"\x80\4" + _doubled(levels) + b"X\1\0\0\0y\x93."
    as_type = b"\x80\2cnumpy\ndtype\n" + _doubled(levels) + b"\x85R."
    assert len(read_pickle(as_value, SETUP)["a"]) == 2
    for data in (as_key, as_name, as_type):
        assert len(data) < 700
        with pytest.raises(ClientError):
            read_pickle(data, SETUP)
    for field in ("policy_type", "actions_per_chunk", "lerobot_features", "rename_map"):
        sent = {"policy_type": "act", "actions_per_chunk": 5, "lerobot_features": {"a": {"dtype": "image"}}}
        with pytest.raises(InvalidRequest):
            read(LerobotSetup, sent | {field: read_pickle(as_value, SETUP)["a"]})
    kept = {"timestamp": 1.0, "timestep": 2, "observation": read_pickle(as_value, SETUP)}
    assert read(LerobotObservation, kept).observation["a"] is kept["observation"]["a"]  # nothing walks through it


def test_w40_a_list_that_holds_itself_is_no_task() -> None:
    sent = b"\x80\2" + f"c{HELPERS}\n{OBSERVATION}\n".encode() + b")\x81}(X\4\0\0\0task]q\1h\1aub."
    setup = LerobotSetup("act", 5, {})
    with pytest.raises(InvalidRequest, match="task: must be a text"):
        setup.observation(read_pickle(sent, OBSERVATION))


@pytest.mark.parametrize("value", [np.zeros(2), "\ud800"])
def test_w41_a_value_of_another_type_is_the_clients_error(value: Any) -> None:
    sent = {"policy_type": "act", "actions_per_chunk": 5, "lerobot_features": {}}
    seen_of = {"timestamp": 1.0, "timestep": 2, "observation": {}}
    for name in ("actions_per_chunk", "lerobot_features", "rename_map"):
        with pytest.raises(ReflexError) as caught:
            read(LerobotSetup, sent | {name: value})
        assert caught.value.http_status in (400, 422)
    for name in seen_of:
        with pytest.raises(ReflexError) as caught:
            read(LerobotObservation, seen_of | {name: value})
        assert caught.value.http_status in (400, 422)


def test_w41_a_setup_keeps_nothing_of_its_message() -> None:
    features = {"a": {"dtype": "image", "names": "x" * 1_000_000}}
    setup = read(LerobotSetup, {"policy_type": "act", "actions_per_chunk": 5, "lerobot_features": features})
    assert setup.cameras == {"a": "a"}
    assert not setup.lerobot_features


def test_w40_memo_bombs_are_bounded() -> None:
    bomb = b"\x80\4]\x94" + b"(h\0h\0t\x94h\0h\0e" * 800 + b"."
    nested = b"\x80\4)" + b"\x94h\0h\0\x86" * 1200 + b"."
    doubled = b"\x80\4]q\0(" + b"h\0" * 2000 + b"e."
    text = b"\x80\2cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nX\6\0\0\0S50000\x85Rq\0"
    scalars = text + b"B\x50\xc3\0\0" + bytes(50_000) + b"q\1" + b"\x86R."
    again = b"\x80\2" + f"c{HELPERS}\n{OBSERVATION}\n".encode() + b")\x81q\0}q\1(" + b"".join(
        b"X\4\0\0\0%04dN" % i for i in range(1000)
    ) + b"u0" + b"h\0h\1b0" * 700 + b"N."
    long = f"c{HELPERS}\n{OBSERVATION}\n".encode() + b")\x81}X\1\0\0\0acnumpy.core.multiarray\n_reconstruct\n)R"
    kind = b"cnumpy\ndtype\nX\2\0\0\0u1\x85R(K\3X\1\0\0\0|tb"
    shape = b"\x80\2" + long + b"(K\1X" + struct.pack("<I", 1_000_000) + b"a" * 1_000_000 + kind + b"\x89C\1atbsb."
    for data in (bomb, nested, doubled, scalars, again, shape):
        tracemalloc.start()
        with pytest.raises(ClientError):
            read_pickle(data, OBSERVATION)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
        tracemalloc.stop()


def test_w40_what_is_large_or_no_number_is_refused() -> None:
    for more, why in (
        ({str(i): 1.0 for i in range(6000)}, "over 5000 opcodes"), ({"text": np.str_("x")}, "no pickle"),
        ({"map": {1: 2}}, "keys are not texts"),
    ):  # fmt: skip
        with pytest.raises(ClientError, match=why):
            read_pickle(pickle.dumps(seen(**more)), OBSERVATION)


def test_w40_a_number_beyond_any_motor_is_refused() -> None:
    setup, much = LerobotSetup("act", 5, {}), 2**1500
    setup.motors = {"observation.state": ["many"]}
    with pytest.raises(InvalidRequest, match=r"many: must be a number, at most 1e\+30"):
        setup.observation(read_pickle(pickle.dumps(seen(many=much)), OBSERVATION)["observation"])
    late = lerobot().TimedObservation(much, 4, {}, True)
    with pytest.raises(ReflexError):
        read(LerobotObservation, read_pickle(pickle.dumps(late), OBSERVATION))


@pytest.mark.parametrize("target", [b"cnumpy\ndtype\n", b"]", b"}", b"X\1\0\0\0a", b"K\1", b")"])
def test_w40_nothing_but_a_described_object_gets_a_state(target: bytes) -> None:
    with pytest.raises(ClientError):
        read_pickle(b"\x80\2" + target + b"}X\1\0\0\0aNsb.", OBSERVATION)
    assert not hasattr(np.dtype, "a")


@FRESH
def test_w40_broken_pickles_raise_nothing_but_ours(count: int) -> None:
    whole = [pickle.dumps(seen(front=PICTURE, small=np.float32(1)), protocol) for protocol in (3, 4, 5)]
    whole.append(pickle.dumps(lerobot().RemotePolicyConfig("act", "x", features(("front",)), 5)))
    pieces = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
    pieces += [struct.pack("<Q", length) for length in (0, 1, 2**31, 2**63, 2**64 - 1)]

    def ask(data: bytes) -> None:
        read_pickle(data, SETUP if b"RemotePolicyConfig" in data else OBSERVATION)

    assert 0 < check("lerobot_pickle", whole, ask, count, pieces) < 0.6
