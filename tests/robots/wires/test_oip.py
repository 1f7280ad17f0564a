"""The Open Inference Protocol: tensors to questions. Its clients are in test_oip_grpc.py."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from reflex_runtime.robots import Export, InvalidRequest
from reflex_runtime.robots.serving.question import Question
from reflex_runtime.robots.wires.oip import Sequences, inputs_of, questions
from reflex_runtime.web.oip import InferRequest, Tensor, tensor_of_bytes, tensor_of_values
from serving.exports import write_tiny

STATE = tensor_of_values("state", "FP32", [1, 2], [0.5, -0.5])
PICTURES = tensor_of_bytes("image", "UINT8", [2, 6, 8, 3], bytes(range(144)) * 2)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return Export.load(write_tiny(tmp_path_factory.mktemp("oip") / "export", model_id="lab/tiny"))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return Export.load(write_tiny(tmp_path_factory.mktemp("oip") / "export", cameras=("image",)))


def asked(export: Export, *inputs: Tensor, sequences: Sequences | None = None, **more: Any) -> list[Question]:
    outputs, own = more.pop("outputs", ()), more.pop("id", "")
    most = more.pop("most_ms", None)
    return questions(export, sequences or Sequences(), InferRequest(inputs, more, outputs, own), most)


def wrong(export: Export, *inputs: Tensor, **more: Any) -> str:
    with pytest.raises(InvalidRequest) as info:
        asked(export, *inputs, **more)
    return str(info.value.details["field"])


def test_w45_tensors_are_read_from_bytes_and_from_values(export: Export) -> None:
    raw = tensor_of_bytes("state", "FP32", [1, 2], struct.pack("<ff", 0.5, -0.5))
    for tensor in (raw, STATE, tensor_of_values("state", "FP32", [1, 2], [[0.5, -0.5]])):
        (question,) = asked(export, tensor)
        assert question.state_vector().tolist() == [0.5, -0.5]  # type: ignore[union-attr]
    texts = tensor_of_bytes("t", "BYTES", [2, 1], b"\2\0\0\0go\0\0\0\0")
    values = tensor_of_values("t", "BYTES", [2, 1], [["go"], [b""]])
    assert texts.values.tolist() == values.values.tolist() == [[b"go"], [b""]]


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("FP32", [1, 2], b"1234567"), ("FP32", [-1], b"1234"), ("FP32", [1] * 9, b"1234"), ("FP128", [1], b"1234"),
        ("FP32", [2**31], b"1234"), ("BYTES", [1], b"\xff\xff\xff\xffab"), ("BYTES", [2], b"\0\0\0\0"),
        ("BYTES", [1], b"\0\0\0\0\0"), ("OBJECT", [1], b"1"), ("FP32", [0, 2**30, 2**30, 2**30], b""),
    ],
)  # fmt: skip
def test_w45_bytes_that_make_no_tensor_are_refused_by_its_name(datatype: str, shape: list[int], data: bytes) -> None:
    with pytest.raises(InvalidRequest) as info:
        tensor_of_bytes("it", datatype, shape, data)
    assert info.value.details["field"] == "it"


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("UINT8", [256]), ("UINT8", [1.5]), ("UINT8", ["1"]), ("FP32", ["1"]), ("FP32", [None]), ("FP32", {}),
        ("FP32", [[1.0], 2.0]), ("BOOL", [1]), ("BYTES", [1]), ("INT64", [2**63]), ("FP32", [1.0, 2.0]),
    ],
)  # fmt: skip
def test_w45_values_of_another_kind_are_refused_by_name(datatype: str, values: Any) -> None:
    with pytest.raises(InvalidRequest) as info:
        tensor_of_values("it", datatype, [1], values)
    assert info.value.details["field"] == "it"


def test_w45_a_tensor_of_a_million_texts_is_not_taken_apart() -> None:
    for read, data in ((tensor_of_bytes, bytes(4 * 5000)), (tensor_of_values, [""] * 5000)):
        with pytest.raises(InvalidRequest, match="has 5000 BYTES, at most 4096 are read"):
            read("it", "BYTES", [5000], data)


def test_w45_no_values_make_no_huge_array() -> None:
    with pytest.raises(InvalidRequest):
        tensor_of_values("it", "FP32", [0, 2**30, 2**30, 2**30], [])


def test_w46_the_model_says_what_it_takes_and_gives(export: Export, seeing: Export) -> None:
    assert inputs_of(seeing) == [
        ("image", "UINT8", [-1, 6, 8, 3]), ("state", "FP32", [-1, 2]), ("seed", "INT64", [-1, 1]),
    ]  # fmt: skip


def test_w47_every_row_is_a_question_of_its_own(seeing: Export) -> None:
    states = tensor_of_values("state", "FP32", [2, 2], [0.0, 0.1, 0.2, 0.3])
    seeds = tensor_of_values("seed", "INT64", [2, 1], [7, 8])
    found = asked(seeing, PICTURES, states, seeds, robot_id="r", episode_id="e", id="q", outputs=["actions"])
    assert [(f.robot_id, f.episode_id, f.request_id, f.seed) for f in found] == [
        ("r/0", "e/0", "q/0", 7), ("r/1", "e/1", "q/1", 8)
    ]  # fmt: skip
    assert np.array_equal(found[1].images[0][2], PICTURES.values[1])
    assert np.float32(found[1].state).tolist() == np.float32([0.2, 0.3]).tolist()
    file = tensor_of_values("image", "BYTES", [1], [b"a PNG"])
    assert asked(seeing, file, STATE)[0].images == (("image", "image", b"a PNG"),)


def test_w47_what_does_not_fit_is_refused_by_name(export: Export, seeing: Export) -> None:
    assert wrong(export) == "state"
    assert wrong(export, STATE, PICTURES) == "image"
    assert wrong(export, STATE, STATE) == "inputs"
    assert wrong(export, STATE, outputs=["values"]) == "values"
    assert wrong(seeing, PICTURES, STATE) == "state"  # two rows and one
    assert wrong(export, tensor_of_values("state", "FP32", [2], [0.5, 0.5])) == "state"
    assert wrong(export, tensor_of_values("state", "FP32", [300, 2], [0.5] * 600)) == "state"
    assert wrong(export, tensor_of_values("state", "FP32", [0, 2], [])) == "state"
    assert wrong(export, tensor_of_values("state", "BYTES", [1, 2], ["a", "b"])) == "state"
    assert wrong(export, STATE, tensor_of_values("seed", "FP32", [1], [1.0])) == "seed"
    assert wrong(export, STATE, tensor_of_values("seed", "INT64", [1, 2], [1, 2])) == "seed"
    assert wrong(export, STATE, timeout=-1) == "timeout"
    assert wrong(export, STATE, timeout=10**400) == "timeout"
    assert wrong(export, STATE, sequence_id=1.5) == "sequence_id"
    assert wrong(export, STATE, priority="high") == "priority"
    assert wrong(export, STATE, robot_id="\n") == "robot_id"


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (0, "default"), (1, "urgent"), (2, "default"), (3, "background"), (9, "background"), ("urgent", "urgent"),
    ],
)  # fmt: skip
def test_w48_priorities_are_levels(export: Export, sent: int | str, found: str) -> None:
    assert asked(export, STATE, priority=sent)[0].priority == found


def test_w48_what_json_has_for_a_whole_number_and_for_nothing_is_read_as_on_act(export: Export) -> None:
    (question,) = asked(export, STATE, executed=3.0, delay=2.0, priority=None, robot_id=None, sequence_id=None)
    assert (question.executed, question.delay, question.priority, question.robot_id) == (3, 2, "default", None)
    assert wrong(export, STATE, executed=3.5) == "executed"


def test_w48_the_time_limit_is_the_shorter_one(export: Export) -> None:
    assert asked(export, STATE)[0].deadline_ms is None
    assert asked(export, STATE, timeout=2500)[0].deadline_ms == 2.5
    assert asked(export, STATE, timeout=2500, most_ms=9.0)[0].deadline_ms == 2.5
    assert asked(export, STATE, timeout=2500, most_ms=1.5)[0].deadline_ms == 1.5
    assert asked(export, STATE, timeout=0, most_ms=1.5)[0].deadline_ms == 1.5


def test_w48_a_sequence_is_an_episode_until_it_ends_or_starts_again(export: Export) -> None:
    sequences = Sequences()

    def episode(**more: Any) -> str | None:
        return asked(export, STATE, sequences=sequences, **more)[0].episode_id

    assert [episode(), episode(sequence_id=0), episode(sequence_id="")] == [None] * 3
    assert [episode(sequence_id=7, sequence_start=True), episode(sequence_id=7)] == ["7", "7"]
    assert episode(sequence_id="7", sequence_end=True) == "7"
    assert episode(sequence_id=7, priority=1) == "7#1"
    assert episode(sequence_id=7, sequence_start=True) == "7#2"
    assert episode(sequence_id=8, sequence_start=True) == "8"
    assert episode(sequence_id=8, episode_id="e") == "e"
    for other in range(100, 5000):
        episode(sequence_id=other)
    assert len(sequences._episodes) == 4096
