"""One recorded episode as a file for the Rerun viewer, read back with rerun-sdk where that is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from policies.records.fleet import Fleet, chunk_of, picture, png, two_robots
from reflex_runtime.cli import main

SCALARS, TEXT, BLOB = "Scalars:scalars", "TextLog:text", "EncodedImage:blob"

Points = list[tuple[float, Any]]


def points_of(file: Path) -> dict[str, Points]:
    """By entity and component: (seconds, value)."""
    try:
        from rerun.chunk import RrdReader
    except ImportError:
        return _of_view(file)
    found: dict[str, Points] = {}
    for chunk in RrdReader(str(file)).stream():
        batch = chunk.to_record_batch()
        if "time" in batch.schema.names:
            _add(found, str(chunk.entity_path), batch["time"], dict(zip(batch.schema.names, batch, strict=True)))
    return {path: sorted(points, key=lambda point: point[0]) for path, points in found.items()}


def _of_view(file: Path) -> dict[str, Points]:
    """With rerun-sdk before 0.30 or so."""
    import rerun

    view = rerun.dataframe.load_recording(str(file)).view(index="time", contents="/**")
    found: dict[str, Points] = {}
    table = view.select().read_all()
    for name in table.column_names:
        path, _, component = name.partition(":")
        _add(found, path, table["time"], {component: table[name]})
    return found


def _add(found: dict[str, Points], path: str, times: Any, columns: dict[str, Any]) -> None:
    seconds = [nanoseconds / 1e9 for nanoseconds in times.cast("int64").to_pylist()]
    for component in (SCALARS, TEXT, BLOB):
        values = columns[component].to_pylist() if component in columns else []
        for at, value in zip(seconds, values, strict=bool(values)):
            if value is not None:
                found.setdefault(path, []).append((at, value[0]))


def blob(value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(value)


# -- with rerun-sdk ----------------------------------------------------------------------------------------------------


def test_an_episode_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rerun")
    recording, file = two_robots(tmp_path / "recordings"), tmp_path / "e1.rrd"
    assert main(["report", str(recording), "--rerun", str(file)]) == 0
    told = "episode e1, 4 requests in 0.6 s, 10 actions; 3 requests are of others (--episode ID)"
    assert told in capsys.readouterr().out
    assert file.stat().st_mode & 0o777 == 0o600
    verified = subprocess.run([sys.executable, "-m", "rerun", "rrd", "verify", str(file)], capture_output=True)
    assert verified.returncode == 0, verified.stderr

    points = points_of(file)
    assert [(round(at, 6), value) for at, value in points["/state/elbow"]] == [
        (0.0, 0.0), (0.2, -0.5), (0.4, -1.0), (0.6, -1.5),
    ]  # fmt: skip
    assert [value for _, value in points["/latency_ms"]] == pytest.approx([50.0] * 4)
    assert [blob(value) for _, value in points["/cameras/top"]] == [png(picture(n)) for n in (0, 2, 4, 6)]
    # Three actions of each chunk from its answer on, one twentieth of a second apart; of the last chunk the first.
    at = [0.2 * n + 0.05 + step / 20 for n in range(3) for step in range(3)] + [0.65]
    value = [chunk_of(number)[step, 1] for number in (0, 2, 4) for step in range(3)] + [chunk_of(6)[0, 1]]
    assert [point[0] for point in points["/action/elbow"]] == pytest.approx(at, abs=1e-6)
    assert [point[1] for point in points["/action/elbow"]] == pytest.approx(value)
    assert [value for _, value in points["/task"]] == ["open the door"]
    assert [(round(at, 6), value) for at, value in points["/outcome"]] == [(0.6, "success")]


def test_an_episode_is_chosen_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rerun")
    recording, file = two_robots(tmp_path / "recordings"), tmp_path / "e2.rrd"
    command = ["report", str(recording), "--rerun", str(file), "--format", "json"]
    assert main([*command, "--episode", "e2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["episode"], told["requests"], told["others"]) == ("e2", 3, 4)
    assert "/outcome" not in points_of(file)
    assert main([*command[:3], str(tmp_path / "x.rrd"), "--episode", "e9"]) == 2
    assert "no answered request that belongs to an episode (7 another episode)" in capsys.readouterr().err
    assert not (tmp_path / "x.rrd").exists()


def test_without_a_control_rate_the_first_action_of_each_chunk_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("rerun")
    fleet = Fleet(tmp_path / "recordings", header={"embodiment": "?"})
    for number in range(3):
        fleet.look(number, "e", number * 0.5, state=None, images={}, executed=2)
    assert main(["report", str(fleet.close()), "--rerun", str(tmp_path / "e.rrd")]) == 0
    points = points_of(tmp_path / "e.rrd")
    assert [value for _, value in points["/action/action_0"]] == [0.0, 1.0, 2.0]
    assert not any(path.startswith(("/state", "/cameras")) for path in points)


def test_a_file_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rerun")
    recording, file = two_robots(tmp_path / "recordings"), tmp_path / "e.rrd"
    file.write_text("mine")
    assert main(["report", str(recording), "--rerun", str(file)]) == 2
    assert "e.rrd: exists; name a new file" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main(["report", str(recording), "--rerun", str(tmp_path / "no" / "e.rrd")]) == 2
    assert f"no directory {tmp_path / 'no'}" in capsys.readouterr().err


# -- without -----------------------------------------------------------------------------------------------------------


def test_a_missing_rerun_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    assert main(["report", str(two_robots(tmp_path / "recordings")), "--rerun", str(tmp_path / "e.rrd")]) == 2
    assert "pip install '.[rerun]'" in capsys.readouterr().err
    assert not (tmp_path / "e.rrd").exists()


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--to-lerobot", "fleet"], "--to-lerobot and --rerun: give one of them"),
        (["--fps", "5"], "--fps: has no effect with --rerun"),
        (["--frames", "steps"], "--frames: has no effect with --rerun"),
        (["--out", "x"], "--out: has no effect with --rerun"),
    ],
)
def test_options_that_do_not_go_with_rerun_are_refused(
    tmp_path: Path, option: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = two_robots(tmp_path / "recordings")
    assert main(["report", str(recording), "--rerun", str(tmp_path / "e.rrd"), *option]) == 2
    assert told in capsys.readouterr().err
