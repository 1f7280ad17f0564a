"""Recorded episodes as a LeRobot dataset, read back with pyarrow and PyAV; `tests/lerobot` reads it with LeRobot."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet
import pytest
from numpy.typing import NDArray

from policies.records.fleet import BEGUN, ROBOT, Fleet, chunk_of, picture, png, two_robots
from reflex_runtime.cli import main
from reflex_runtime.cli.progress import ProgressLine
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.records import lerobot_dataset, lerobot_video
from reflex_runtime.policies.records.episodes import RecordedEpisodes
from reflex_runtime.policies.records.lerobot_dataset import DatasetWritten, camera_keys, write_lerobot
from reflex_runtime.policies.records.lerobot_stats import KEPT, QUANTILES, ColumnStats, PictureStats, sampled
from reflex_runtime.policies.records.lerobot_tables import ParquetFiles
from reflex_runtime.policies.records.lerobot_video import CameraVideos
from reflex_runtime.telemetry.journal_writer import JournalWriter

TOP = "observation.images.top"
NEAR = 8.0  # levels of 255 by which a decoded pixel may differ from the encoded one, on average over a picture


def exported(recordings: Path, target: Path, **options: Any) -> DatasetWritten:
    target.mkdir(exist_ok=True)
    with RecordedEpisodes([recordings], target) as found:
        return write_lerobot(found, target, **options)


def rows_of(target: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in sorted((target / "data").glob("*/*.parquet")):
        rows += pyarrow.parquet.read_table(file).to_pylist()
    return rows


def episodes_of(target: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for file in sorted((target / "meta" / "episodes").glob("*/*.parquet")):
        found += pyarrow.parquet.read_table(file).to_pylist()
    return found


def info_of(target: Path) -> dict[str, Any]:
    return dict(json.loads((target / "meta" / "info.json").read_text()))


def tasks_of(target: Path) -> list[str]:
    table = pyarrow.parquet.read_table(target / "meta" / "tasks.parquet").to_pylist()
    assert [row["task_index"] for row in table] == list(range(len(table)))
    return [row["task"] for row in table]


def pictures_of(target: Path, episode: dict[str, Any], key: str = TOP) -> list[NDArray[np.uint8]]:
    """The pictures of an episode, found by their times as LeRobot finds them."""
    fps = info_of(target)["fps"]
    place = {"chunk_index": episode[f"videos/{key}/chunk_index"], "file_index": episode[f"videos/{key}/file_index"]}
    path = target / info_of(target)["video_path"].format(video_key=key, **place)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == fps  # TorchCodec finds a frame by its number, time × rate
        shown = {round(float(f.pts * stream.time_base) * fps): f.to_ndarray(format="rgb24") for f in container.decode()}
    first = round(episode[f"videos/{key}/from_timestamp"] * fps)
    assert round(episode[f"videos/{key}/to_timestamp"] * fps) == first + episode["length"]
    return [shown[first + i] for i in range(episode["length"])]


def differ(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.abs(a.astype(float) - b.astype(float)).mean())


# -- one frame a request -----------------------------------------------------------------------------------------------


def test_each_request_of_an_episode_is_a_frame_with_its_chunk(tmp_path: Path) -> None:
    recording = two_robots(tmp_path / "recordings")
    assert main(["report", str(recording), "--to-lerobot", str(tmp_path / "fleet")]) == 0
    target = tmp_path / "fleet"
    info = info_of(target)
    assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", 5, "bench-arm")
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (2, 7, 2)
    assert info["splits"] == {"train": "0:2"}
    assert info["features"]["action"] == {"dtype": "float32", "shape": [2], "names": ["shoulder", "elbow"]}
    assert info["features"][TOP]["shape"] == [48, 64, 3]
    assert tasks_of(target) == ["open the door", "close the drawer"]

    numbers = [0, 2, 4, 6, 1, 3, 5]  # the requests of e1, then those of e2
    rows = rows_of(target)
    assert [row["index"] for row in rows] == list(range(7))
    assert [row["episode_index"] for row in rows] == [0, 0, 0, 0, 1, 1, 1]
    assert [row["frame_index"] for row in rows] == [0, 1, 2, 3, 0, 1, 2]
    assert [row["task_index"] for row in rows] == [0, 0, 0, 0, 1, 1, 1]
    for row, number in zip(rows, numbers, strict=True):
        assert row["timestamp"] == np.float32(row["frame_index"] / 5)
        assert row["request_time"] == pytest.approx(0.2 * row["frame_index"], abs=1e-5)
        assert row["observation.state"] == [number / 8, -number / 4]
        assert np.array_equal(np.array(row["chunk"], np.float32).reshape(4, 2), chunk_of(number))
        assert row["action"] == row["chunk"][:2]
        assert not any(row["chunk_is_pad"])
        assert (row["slot"], row["latency_ms"]) == ("prod", pytest.approx(50.0))
    assert [row["executed"] for row in rows] == [3, 3, 3, -1, 3, 3, -1]  # of the last chunk nobody says

    first, second = episodes_of(target)
    assert (first["episode_id"], first["success"], first["length"]) == ("e1", True, 4)
    assert (second["episode_id"], second["success"], second["length"]) == ("e2", None, 3)
    assert (second["dataset_from_index"], second["dataset_to_index"]) == (4, 7)
    assert (second["robot_id"], second["tasks"]) == ("robot of e2", ["close the drawer"])
    shown = pictures_of(target, first) + pictures_of(target, second)
    for seen, number in zip(shown, numbers, strict=True):
        assert differ(seen, picture(number)) < NEAR
        assert min(range(7), key=lambda other: differ(seen, picture(other))) == number


def test_a_shorter_chunk_is_padded_with_its_last_action(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    fleet.look(0, "e", 0.0)
    fleet.look(1, "e", 0.5, actions=chunk_of(1, length=2))
    exported(fleet.close(), tmp_path / "fleet")
    _, short = rows_of(tmp_path / "fleet")
    assert short["chunk_is_pad"] == [False, False, True, True]
    assert np.array_equal(np.array(short["chunk"], np.float32).reshape(4, 2), chunk_of(1, 2)[[0, 1, 1, 1]])


def test_frames_stand_in_the_order_in_which_the_robot_asked(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    for number, at in ((0, 0.0), (2, 0.8), (1, 0.4)):  # 1 was answered after 2
        fleet.look(number, "e", at)
    exported(fleet.close(), tmp_path / "fleet")
    assert [row["action"][0] for row in rows_of(tmp_path / "fleet")] == [0.0, 1.0, 2.0]


def test_the_same_id_in_two_runs_of_a_server_is_two_episodes(tmp_path: Path) -> None:
    for run in range(2):
        fleet = Fleet(tmp_path / "recordings", header={"model_hash": f"m{run}"})
        fleet.look(run, "e", 0.0)
        fleet.ended("e", success=run == 1)
        fleet.close()
    exported(tmp_path / "recordings", tmp_path / "fleet")
    assert sorted((e["episode_id"], e["success"]) for e in episodes_of(tmp_path / "fleet")) == [
        ("e", False), ("e", True),
    ]  # fmt: skip


def test_two_robots_that_use_the_same_id_have_two_episodes(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    for number in range(4):
        fleet.look(number, "e", number * 0.1, robot_id=f"r{number % 2}", executed=3)
    fleet.ended("e", True)
    exported(fleet.close(), tmp_path / "fleet")
    assert [(e["robot_id"], e["length"], e["success"]) for e in episodes_of(tmp_path / "fleet")] == [
        ("r0", 2, None), ("r1", 2, None),
    ]  # fmt: skip
    assert [row["executed"] for row in rows_of(tmp_path / "fleet")] == [3, -1, 3, -1]


def test_an_episode_over_several_parts_of_a_recording_is_one(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings", max_bytes=1)
    fleet.look(0, "e", 0.0)
    fleet.look(1, "e", 0.5)
    fleet.close()
    assert len(list((tmp_path / "recordings").iterdir())) >= 2
    exported(tmp_path / "recordings", tmp_path / "fleet")
    assert [e["length"] for e in episodes_of(tmp_path / "fleet")] == [2]


def test_policies_without_pictures_or_state_make_datasets_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    fleet.look(0, "e", 0.0, images={}, state=None)
    exported(fleet.close(), tmp_path / "fleet")
    assert info_of(tmp_path / "fleet")["video_path"] is None
    assert not (tmp_path / "fleet" / "videos").exists()
    assert "observation.state" not in rows_of(tmp_path / "fleet")[0]


def test_odd_sides_and_two_cameras_of_different_size(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    for number in range(3):
        images = {"top": png(picture(number)), "wrist": png(picture(number + 3, 33, 47))}
        fleet.look(number, "e", number * 0.5, images=images)
    exported(fleet.close(), tmp_path / "fleet")
    (episode,) = episodes_of(tmp_path / "fleet")
    for number, seen in enumerate(pictures_of(tmp_path / "fleet", episode, "observation.images.wrist")):
        assert seen.shape == (33, 47, 3)
        assert differ(seen, picture(number + 3, 33, 47)) < NEAR


def test_names_of_cameras_are_no_paths() -> None:
    keys = camera_keys(["../../etc", "a/b", "a_b", ""])
    assert list(keys.values()) == [
        "observation.images..._.._etc",
        "observation.images.a_b",
        "observation.images.a_b_",
        "observation.images.image",
    ]


# -- one frame a control step ------------------------------------------------------------------------------------------


def test_steps_are_the_executed_actions_of_each_chunk(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    fleet.look(0, "e", 0.0)
    fleet.look(1, "e", 1.0, executed=2)  # two of chunk 0 were executed
    fleet.look(2, "e", 2.0, executed=9)  # all four of chunk 1, and then it stood still
    fleet.look(3, "e", 3.0, executed=0)  # none of chunk 2
    written = exported(fleet.close(), tmp_path / "fleet", kind="steps")
    rows = rows_of(tmp_path / "fleet")
    assert info_of(tmp_path / "fleet")["fps"] == 20  # the control rate in the header
    executed = [*chunk_of(0)[:2], *chunk_of(1), chunk_of(3)[0]]  # of the last one the first, how it went on is unknown
    assert [row["action"] for row in rows] == [action.tolist() for action in executed]
    assert [row["observed"] for row in rows] == [True, False, True, False, False, False, True]
    assert [row["timestamp"] for row in rows] == [np.float32(i / 20) for i in range(7)]
    assert [row["observation.state"][0] for row in rows] == [0.0, 0.0, *[1 / 8] * 4, 3 / 8]
    (episode,) = episodes_of(tmp_path / "fleet")
    seen = pictures_of(tmp_path / "fleet", episode)
    assert all(differ(s, picture(n)) < NEAR for s, n in zip(seen, [0, 0, 1, 1, 1, 1, 3], strict=True))
    assert (written.assumed, written.frames, written.requests) == (0, 7, 4)


def test_steps_that_nobody_reports_follow_from_time_and_control_rate(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    fleet.look(0, "e", 0.0)  # answered 50 ms later
    fleet.look(1, "e", 0.05 + 3 / 20)
    written = exported(fleet.close(), tmp_path / "fleet", kind="steps")
    assert [row["action"][0] for row in rows_of(tmp_path / "fleet")] == [*chunk_of(0)[:3, 0], chunk_of(1)[0, 0]]
    assert written.assumed == 1
    assert "executed actions assumed, not reported: of 1 chunks" in written.text()


def test_after_an_answer_that_is_left_out_nothing_is_taken_for_executed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "recordings")
    fleet.look(0, "e", 0.0)
    fleet.look(1, "e", 0.2, actions=np.full((4, 2), np.nan, np.float32))
    fleet.look(2, "e", 0.4, executed=4)  # of the chunk that is left out
    exported(fleet.close(), tmp_path / "fleet", kind="steps")
    assert [row["action"][0] for row in rows_of(tmp_path / "fleet")] == [0.0, 2.0]


def test_steps_need_a_control_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = two_robots(tmp_path / "recordings", header={"embodiment": "bench-arm"})
    command = ["report", str(recording), "--frames", "steps", "--to-lerobot"]
    assert main([*command, str(tmp_path / "a")]) == 2
    assert "the recording does not say the control rate; give it with --fps" in capsys.readouterr().err
    assert list((tmp_path / "a").iterdir()) == []
    assert main([*command, str(tmp_path / "a"), "--fps", "10"]) == 0
    assert info_of(tmp_path / "a")["fps"] == 10


# -- what is no frame --------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(tmp_path / "recordings")
    for number in range(3):
        fleet.look(number, "e", number * 0.5)
    fleet.look(3, "e", 1.5, outcome="cancelled", actions=None)
    fleet.look(4, None, 2.0)
    fleet.look(5, "e", 2.5, state=[0.0, float("nan")])
    fleet.look(6, "e", 3.0, images={"top": b"no picture"})
    fleet.look(7, "e", 3.5, images={"top": png(picture(7, 24, 32))})
    whole = png(picture(8))
    fleet.look(8, "e", 4.0, images={"top": whole[: len(whole) // 2]})  # its header can be read, its pixels cannot
    target = tmp_path / "fleet"
    assert main(["report", str(fleet.close()), "--to-lerobot", str(target), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["left_out"] == {
        "unreadable picture": 2,
        "cancelled": 1,
        "no episode_id": 1,
        "numbers that are not finite": 1,
        "another shape (state 2, top 24×32, action 2)": 1,
    }
    assert (told["episodes"], told["frames"], told["requests"]) == (1, 3, 3)
    assert json.loads((target / "meta" / "reflex.json").read_text())["left_out"] == told["left_out"]
    assert [row["action"][0] for row in rows_of(target)] == [0.0, 1.0, 2.0]


def test_lines_that_somebody_changed_are_left_out(tmp_path: Path) -> None:
    lines = gzip.decompress(two_robots(tmp_path / "recordings").read_bytes()).decode().splitlines()
    changed = [json.loads(line) for line in lines]
    requests = [line for line in changed if line["kind"] == "request"]
    changed[0]["started_at"] = "yesterday"
    requests[0]["response"]["action_dim"] = 3
    requests[1]["request"]["state"] = ["left", "right"]
    requests[2]["request"]["image_b64"] = {"top": "not base64"}
    requests[3]["response"] |= {"actions": [], "num_actions": 0}
    (tmp_path / "changed.jsonl").write_text("\n".join(map(json.dumps, changed)))
    written = exported(tmp_path / "changed.jsonl", tmp_path / "fleet")
    assert written.left_out == {
        "numbers that cannot be read": 2, "unreadable picture": 1, "no actions": 1,
    }  # fmt: skip
    assert sorted(row["action"][0] for row in rows_of(tmp_path / "fleet")) == [4.0, 5.0, 6.0]


def test_only_one_episode(tmp_path: Path) -> None:
    recording = two_robots(tmp_path / "recordings")
    assert main(["report", str(recording), "--to-lerobot", str(tmp_path / "fleet"), "--episode", "e2"]) == 0
    assert [e["episode_id"] for e in episodes_of(tmp_path / "fleet")] == ["e2"]


@pytest.mark.parametrize("images", ["hash_only", "none"])
def test_without_the_pictures_it_says_how_to_record_them(
    tmp_path: Path, images: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = two_robots(tmp_path / "recordings", images=images)
    assert main(["report", str(recording), "--to-lerobot", str(tmp_path / "fleet")]) == 2
    assert "--record-images full" in capsys.readouterr().err
    assert list((tmp_path / "fleet").iterdir()) == []


def test_a_trace_has_nothing_to_learn_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = JournalWriter(tmp_path / "trace.jsonl")
    assert trace.close()
    assert main(["report", str(tmp_path / "trace.jsonl"), "--to-lerobot", str(tmp_path / "fleet")]) == 2
    assert "record with --record DIR --record-images full" in capsys.readouterr().err


def test_a_file_that_is_no_journal_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    assert main(["report", str(tmp_path / "x.jsonl"), "--to-lerobot", str(tmp_path / "fleet")]) == 1
    assert "x.jsonl, line 1" in capsys.readouterr().err


# -- the directory -----------------------------------------------------------------------------------------------------


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = two_robots(tmp_path / "recordings")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    assert main(["report", str(recording), "--to-lerobot", str(tmp_path / "mine")]) == 2
    assert "not empty; name a new directory" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert main(["report", str(recording), "--to-lerobot", str(tmp_path / "mine" / "thesis.txt")]) == 2


def test_a_new_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    recording = two_robots(tmp_path / "recordings")
    assert main(["report", str(recording), "--to-lerobot", str(tmp_path / "fleet")]) == 0
    assert (tmp_path / "fleet").stat().st_mode & 0o777 == 0o700
    assert sorted(file.name for file in (tmp_path / "fleet").iterdir()) == ["data", "meta", "videos"]


def test_what_was_interrupted_leaves_the_directory_empty(tmp_path: Path) -> None:
    recording = two_robots(tmp_path / "recordings")

    def interrupt(done: int, total: int) -> None:
        if done == 5:
            assert list((tmp_path / "fleet").rglob("*.mp4"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exported(recording, tmp_path / "fleet", advance=interrupt)
    assert list((tmp_path / "fleet").iterdir()) == []


def test_a_disk_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, told: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lerobot_dataset, "_write_json", full)
    with pytest.raises(ConfigError, match="fleet: cannot be written: No space left on device"):
        exported(two_robots(tmp_path / "recordings"), tmp_path / "fleet")
    assert list((tmp_path / "fleet").iterdir()) == []


@pytest.mark.parametrize("package", ["pyarrow", "av"])
def test_a_missing_package_names_the_extra(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    recording = two_robots(tmp_path / "recordings")
    assert main(["report", str(recording), "--to-lerobot", str(tmp_path / "fleet")]) == 2
    assert "pip install '.[datasets]'" in capsys.readouterr().err
    assert not (tmp_path / "fleet").exists()


@pytest.mark.parametrize("option", [["--frames", "steps"], ["--fps", "5"], ["--episode", "e1"]])
def test_options_of_datasets_alone_have_no_effect_and_say_so(
    tmp_path: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recording = two_robots(tmp_path / "recordings")
    assert main(["report", str(recording), *option]) == 2
    assert f"{option[0]}: has no effect without --to-lerobot" in capsys.readouterr().err


def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["report", str(two_robots(tmp_path / "recordings")), "--to-lerobot", str(tmp_path / "fleet")]
    for option, told in (
        (["--frames", "all"], "--frames=all: must be one of requests, steps"),
        (["--fps", "0"], "--fps=0"),
        (["--out", "x"], "--out: has no effect with --to-lerobot"),
    ):
        assert main([*command, *option]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "fleet").exists()


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_pictures_are_never_in_memory_all_at_once(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    fleet = Fleet(tmp_path / "recordings")
    for number in range(100):
        pixels = noise.integers(0, 256, (200, 240, 3), np.uint8)  # 144 kB that no PNG makes smaller
        fleet.look(number, f"e{number % 4}", number * 0.1, images={"top": png(pixels)})
    recording = fleet.close()
    (tmp_path / "fleet").mkdir()
    tracemalloc.start()
    try:
        with RecordedEpisodes([recording], tmp_path / "fleet") as found:
            write_lerobot(found, tmp_path / "fleet")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * 144_000 / 3


def test_videos_and_tables_go_on_in_another_file_at_an_episodes_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot_dataset, "DATA_MB", 0)
    monkeypatch.setattr(lerobot_video, "LONGEST_S", 1.0)  # e1 has 0.8 s, e2 0.6 s
    monkeypatch.setattr(lerobot_dataset, "CHUNKS_SIZE", 1)
    exported(two_robots(tmp_path / "recordings"), tmp_path / "fleet")
    first, second = episodes_of(tmp_path / "fleet")
    assert (first["data/chunk_index"], second["data/chunk_index"]) == (0, 1)
    assert (first[f"videos/{TOP}/chunk_index"], second[f"videos/{TOP}/chunk_index"]) == (0, 1)
    assert second[f"videos/{TOP}/from_timestamp"] == 0.0
    assert [e["meta/episodes/chunk_index"] for e in (first, second)] == [0, 0]
    for seen, number in zip(pictures_of(tmp_path / "fleet", second), [1, 3, 5], strict=True):
        assert differ(seen, picture(number)) < NEAR


def test_a_video_file_that_is_large_ends_with_its_episode(tmp_path: Path) -> None:
    videos = CameraVideos(tmp_path, 10, 48, 64, max_bytes=1, files_in_chunk=2)
    places = []
    for episode in range(3):
        videos.begin(80)  # more than the encoder keeps back
        for number in range(80):
            videos.add(picture(80 * episode + number))
        places.append(tuple(videos.place))
    videos.close()
    assert places == [(0, 0), (0, 1), (1, 0)]


def test_without_h264_pictures_become_av1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_video, "CODECS", {"libsvtav1": lerobot_video.CODECS["libsvtav1"]})
    exported(two_robots(tmp_path / "recordings"), tmp_path / "fleet")
    assert info_of(tmp_path / "fleet")["features"][TOP]["info"]["video.codec"] == "av1"
    first, _ = episodes_of(tmp_path / "fleet")
    for seen, number in zip(pictures_of(tmp_path / "fleet", first), [0, 2, 4, 6], strict=True):
        assert differ(seen, picture(number)) < NEAR


@pytest.mark.skipif(not hasattr(os, "SCHED_FIFO") or os.geteuid() != 0, reason="only root on Linux gets such threads")
def test_the_encoder_of_av1_makes_no_thread_realtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be for the rest of this process: with two cores, everything beside it stands still."""
    monkeypatch.setattr(lerobot_video, "CODECS", {"libsvtav1": lerobot_video.CODECS["libsvtav1"]})
    videos = lerobot_video.CameraVideos(tmp_path, 10, 48, 64, max_bytes=1 << 20, files_in_chunk=1)
    videos.begin(2)
    for number in range(2):
        videos.add(picture(number))
        assert set(lerobot_video._policies().values()) == {os.SCHED_OTHER}
    videos.close()
    assert set(lerobot_video._policies().values()) == {os.SCHED_OTHER}


def test_lines_of_many_episodes_are_written_together(tmp_path: Path) -> None:
    files = ParquetFiles(tmp_path, 1 << 20, 1000)
    for number in range(250):
        files.begin()
        files.write_line({"number": number, "success": None if number else True, "stats": [[0.5]]})
    files.close()
    found = pyarrow.parquet.ParquetFile(tmp_path / "chunk-000" / "file-000.parquet")
    assert found.metadata.num_row_groups == 3
    assert [row["number"] for row in found.read().to_pylist()] == list(range(250))


# -- statistics --------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_the_rows(tmp_path: Path) -> None:
    exported(two_robots(tmp_path / "recordings"), tmp_path / "fleet")
    stats = json.loads((tmp_path / "fleet" / "meta" / "stats.json").read_text())
    rows, episodes = rows_of(tmp_path / "fleet"), episodes_of(tmp_path / "fleet")
    for feature in ("observation.state", "action", "chunk", "timestamp", "executed"):
        values = np.array([row[feature] for row in rows], np.float64).reshape(7, -1)
        found = stats[feature]
        assert found["count"] == [7]
        for name, value in (("min", values.min(0)), ("max", values.max(0)), ("mean", values.mean(0))):
            assert found[name] == pytest.approx(value.tolist())
        assert found["std"] == pytest.approx(values.std(0).tolist())
        halves = [np.quantile(part, 0.5, axis=0, method="inverted_cdf") for part in (values[:4], values[4:])]
        assert found["q50"] == pytest.approx(((4 * halves[0] + 3 * halves[1]) / 7).tolist())
    assert "slot" not in stats
    pixels = np.stack([picture(number) for number in (1, 3, 5)]) / 255
    assert np.array(episodes[1][f"stats/{TOP}/mean"])[:, 0, 0] == pytest.approx(pixels.mean(axis=(0, 1, 2)))
    assert np.array(stats[TOP]["q99"]).shape == (3, 1, 1)
    assert stats[TOP]["count"] == [7]


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    values = np.random.default_rng(0).normal(5.0, 2.0, (3 * KEPT, 2)).astype(np.float32)
    column = ColumnStats()
    for start in range(0, len(values), 777):
        column.add(values[start : start + 777])
    found, wide = column.result(), values.astype(np.float64)
    assert np.allclose(found["mean"], wide.mean(0), rtol=1e-12)
    assert np.allclose(found["std"], wide.std(0), rtol=1e-12)
    assert np.array_equal(found["min"], wide.min(0))
    assert np.array_equal(found["max"], wide.max(0))
    assert np.allclose(found["q90"], np.quantile(wide, 0.9, axis=0), atol=0.1)  # of every fourth value
    assert found["count"].tolist() == [3 * KEPT]
    kept = np.concatenate(column._sample)
    assert np.array_equal(kept, wide[::4])


def test_statistics_of_pictures_are_those_of_their_pixels() -> None:
    shown = [picture(number) for number in range(3)]
    stats = PictureStats()
    for pixels in shown:
        stats.add(pixels)
    found, pixels = stats.result(), np.stack(shown).reshape(-1, 3) / 255
    assert found is not None
    for name in ("min", "max", "mean", "std"):
        assert np.allclose(found[name].reshape(3), getattr(pixels, name)(axis=0))
    for name, share in QUANTILES.items():
        assert np.allclose(found[name].reshape(3), np.quantile(pixels, share, axis=0, method="inverted_cdf"))
    large = PictureStats()
    large.add(picture(0, 600, 450))
    assert large._levels.sum() == 3 * 150 * 113  # every fourth pixel of a row and of a column


def test_of_long_episodes_a_sample_of_pictures_counts() -> None:
    assert sampled(0) == set()
    assert sampled(50) == set(range(50))
    assert len(sampled(1000)) == 177
    assert {0, 999} <= sampled(1000)


# -- progress, and the server's header ---------------------------------------------------------------------------------


def test_progress_is_told_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("reflex_runtime.cli.progress.time.monotonic", lambda: now[0])
    line = ProgressLine("requests")
    for done in range(1, 12):
        now[0] = float(done)
        line(done)
    line(12, 20)
    now[0] = 99.0
    line(13, 20)
    line(20, 20)
    assert capsys.readouterr().err == "5 requests\n10 requests\n13 of 20 requests\n"


def test_the_start_of_an_episode_is_known_to_the_wall_clock(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    with RecordedEpisodes([two_robots(tmp_path / "recordings")], tmp_path / "scratch") as found:
        assert found.journals
        first, second = found.episodes
        assert next(found.frames(first)).at == pytest.approx(BEGUN)
        assert next(found.frames(second)).at == pytest.approx(BEGUN + 0.1)
        assert found.control_rate == ROBOT["control_rate_hz"]
