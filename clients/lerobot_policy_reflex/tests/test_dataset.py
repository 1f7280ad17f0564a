"""Recorded episodes on their way into a LeRobotDataset; `tests/lerobot` reads what LeRobot itself makes of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lerobot_policy_reflex.dataset import LeRobotDataset, Recordings, main, write_dataset
from robots.analysis.fleet import Fleet, chunk_of, picture, png, two_robots
from serving.exports import write_tiny
from serving.harness import Server

TOP = "observation.images.top"

pytestmark = pytest.mark.skipif(
    not hasattr(LeRobotDataset, "stands_in"), reason="LeRobot itself is tested in tests/lerobot"
)


def written(recordings: Path, root: Path, kind: str = "requests", fps: int | None = None, **chosen: Any) -> Any:
    with tempfile.TemporaryFile() as scratch:
        return write_dataset(Recordings([recordings], scratch, **chosen), root, kind, fps)


def about(root: Path) -> Any:
    return json.loads((root / "meta" / "reflex.json").read_text())


def test_each_request_of_an_episode_is_a_frame_with_its_chunk(tmp_path: Path) -> None:
    data = written(two_robots(tmp_path / "recordings"), tmp_path / "fleet")
    assert data.finalized
    assert (data.fps, data.robot_type) == (5, "bench-arm")
    assert data.features["action"]["names"] == ["shoulder", "elbow"]
    assert data.features[TOP] == {"dtype": "video", "shape": (48, 64, 3), "names": ["height", "width", "channels"]}
    for rows, numbers in zip(data.episodes, ([0, 2, 4, 6], [1, 3, 5]), strict=True):
        for place, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            assert row["task"] == ("open the door" if number % 2 == 0 else "close the drawer")
            assert row["request_time"] == pytest.approx(0.2 * place, abs=1e-5)
            assert row["observation.state"].tolist() == [number / 8, -number / 4]
            assert np.array_equal(row["chunk"].reshape(4, 2), chunk_of(number))
            assert np.array_equal(row["action"], chunk_of(number)[0])
            assert np.array_equal(row[TOP], picture(number))
            assert not row["chunk_is_pad"].any()
            assert (row["slot"], row["latency_ms"]) == ("prod", pytest.approx(50.0))
    assert [[int(row["executed"][0]) for row in rows] for rows in data.episodes] == [[3, 3, 3, -1], [3, 3, -1]]
    ids = [(e["episode_id"], e["robot_id"], e["success"]) for e in about(tmp_path / "fleet")["episodes"]]
    assert ids == [("e1", "robot of e1", True), ("e2", "robot of e2", None)]
    assert (tmp_path / "fleet").stat().st_mode & 0o777 == 0o700


def test_a_shorter_chunk_repeats_its_last_action(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    fleet.look(0, "e", 0.0)
    fleet.look(1, "e", 0.2, actions=chunk_of(1, 2))
    ((_, short),) = written(fleet.close(), tmp_path / "fleet").episodes
    assert short["chunk_is_pad"].tolist() == [False, False, True, True]
    assert np.array_equal(short["chunk"].reshape(4, 2)[2:], [chunk_of(1, 2)[1]] * 2)


def test_steps_are_the_executed_actions_told_or_by_time(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    fleet.look(0, "e", 0.0)
    fleet.look(1, "e", 0.2, executed=3)
    fleet.look(2, "e", 0.36)  # 0.11 s after the answer: two actions at 20 Hz
    data = written(fleet.close(), tmp_path / "fleet", "steps")
    (rows,) = data.episodes
    assert data.fps == 20
    expected = [*chunk_of(0)[:3], *chunk_of(1)[:2], chunk_of(2)[0]]
    assert np.array_equal([row["action"] for row in rows], expected)
    assert [bool(row["observed"][0]) for row in rows] == [True, False, False, True, False, True]


def test_after_an_answer_that_was_left_out_one_action_is_known(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    fleet.look(0, "e", 0.0)
    fleet.look(1, "e", 0.2, executed=3, images={"top": b"no picture"})
    fleet.look(2, "e", 0.4, executed=3)
    (rows,) = written(fleet.close(), tmp_path / "fleet", "steps").episodes
    assert np.array_equal([row["action"] for row in rows], [chunk_of(0)[0], chunk_of(2)[0]])
    assert about(tmp_path / "fleet")["left_out"] == {"unreadable picture": 1}


def test_steps_need_a_control_rate(tmp_path: Path) -> None:
    recording = two_robots(tmp_path / "recordings", header={"embodiment": "?"})
    with pytest.raises(SystemExit, match="give it with --fps"):
        written(recording, tmp_path / "fleet", "steps")
    assert written(recording, tmp_path / "fleet", "steps", fps=10).fps == 10


def test_what_is_no_frame_is_counted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    for number in range(3):
        fleet.look(number, "e", number * 0.2)
    fleet.look(3, None, 0.6)
    fleet.look(4, "e", 0.8, outcome="cancelled", actions=None)
    fleet.look(5, "e", 1.0, state=[float("nan"), 0.0])
    fleet.look(6, "e", 1.2, images={"top": png(picture(6, 40, 64))})
    data = written(fleet.close(), tmp_path / "fleet")
    assert data.num_frames == 3
    told = {"no episode_id": 1, "cancelled": 1, "numbers that are not finite": 1, "another shape": 1}
    assert about(tmp_path / "fleet")["left_out"] == told


def test_an_id_that_two_robots_use_is_two_episodes_without_an_outcome(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    for number in range(4):
        fleet.look(number, "e", number * 0.1, robot_id=f"r{number % 2}")
    fleet.ended("e", True)
    written(fleet.close(), tmp_path / "fleet")
    found = about(tmp_path / "fleet")["episodes"]
    assert [(episode["robot_id"], episode["success"]) for episode in found] == [("r0", None), ("r1", None)]


def test_recordings_without_pictures_say_how_to_record(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--record-images full"):
        written(two_robots(tmp_path / "recordings", images="hash_only"), tmp_path / "fleet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=f"^{tmp_path}/empty: no recordings .* there"):
        written(tmp_path / "empty", tmp_path / "fleet")
    (tmp_path / "no.jsonl").write_text('{"kind": "header", "schema_version": 3}\n')
    with pytest.raises(SystemExit, match="no journal of version 1 or 2"):
        written(tmp_path / "no.jsonl", tmp_path / "fleet")


def test_a_recording_of_schema_version_1_is_read() -> None:
    """The one that the tests of Reflex's own reader have."""
    file = Path(__file__).parents[3] / "tests" / "observe" / "schema_1" / "recording.jsonl.gz"
    with tempfile.TemporaryFile() as scratch:
        found = Recordings([file], scratch)
        told = {known.key[1]: (len(list(found.frames(known))), known.success) for known in found.episodes}
    assert told == {"ep-0": (2, True), "ep-1": (2, True), "ep-2": (2, False), "ep-3": (2, True)}
    assert dict(+found.left_out) == {"rejected": 6, "client_error": 1}


def test_a_file_that_a_crash_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    whole = two_robots(tmp_path / "recordings").read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) * 3 // 4])
    assert 0 < written(tmp_path / "cut.jsonl.gz", tmp_path / "fleet").num_frames < 7


def test_parts_of_a_recording_are_one(tmp_path: Path) -> None:
    two_robots(tmp_path / "recordings", max_bytes=1)
    assert len(list((tmp_path / "recordings").iterdir())) > 1
    assert written(tmp_path / "recordings", tmp_path / "fleet").num_frames == 7


def test_the_command_writes_one_episode_into_a_new_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(two_robots(tmp_path / "recordings")), "--root", str(tmp_path / "fleet")]
    main([*words, "--episode", "e2"])
    told = capsys.readouterr().out
    assert "fleet: 1 episodes, 3 frames at 5 fps" in told
    assert "left out: 4 requests: another episode" in told
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "exists; name a new directory" in capsys.readouterr().err


def test_episodes_of_a_server_become_a_dataset_of_what_was_sent_and_answered(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "tiny", noise=False)
    with Server(export, "--record", str(tmp_path / "there"), "--record-images", "full") as server:
        asked = [
            {"state": [0.1 * i, 0.01 * n], "episode_id": f"e{i}", "robot_id": f"r{i}", "executed": 1 if n else None}
            for i in range(2)
            for n in range(3)
        ]
        answers = [
            np.array(server.post({k: v for k, v in body.items() if v is not None}).json["actions"], np.float32)
            for body in asked
        ]
        server.ask("POST", "/episodes/e1/outcome", b'{"success": true}')
        server.stop()
    data = written(tmp_path / "there", tmp_path / "fleet")
    rows = [row for episode in data.episodes for row in episode]
    assert np.array_equal([row["chunk"] for row in rows], np.reshape(answers, (6, -1)))
    assert np.array_equal([row["observation.state"] for row in rows], np.float32([body["state"] for body in asked]))
    assert [int(row["executed"][0]) for row in rows] == [1, 1, -1] * 2
    assert [e["success"] for e in about(tmp_path / "fleet")["episodes"]] == [None, True]


def test_one_of_several_policies_is_read(tmp_path: Path) -> None:
    arm, hand = (write_tiny(tmp_path / name, noise=False) for name in ("arm", "hand"))
    options = ("--record", str(tmp_path / "there"), "--record-images", "full")
    with Server(f"--policy=arm={arm}", f"--policy=hand={hand}", *options) as server:
        for name in ("arm", "hand", "arm"):
            body = json.dumps({"state": [0.1, 0.2], "episode_id": name}).encode()
            assert server.ask("POST", f"/policies/{name}/act", body).status == 200
        server.stop()
    with pytest.raises(SystemExit, match="choose arm or hand with --policy"):
        written(tmp_path / "there", tmp_path / "fleet")
    data = written(tmp_path / "there", tmp_path / "fleet", policy="arm")
    assert [row["slot"] for row in data.episodes[0]] == ["prod", "prod"]
