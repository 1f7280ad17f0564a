"""A recorded episode in the Rerun viewer: pictures, state, answered actions and latency over time.

    pip install rerun-sdk
    reflex serve ./my-export --record ./recordings --record-images full
    python examples/rerun_episode.py ./recordings/FILE EPISODE_ID episode.rrd && rerun episode.rrd
"""

import sys

from reflex_runtime.observe.journal import JournalError, JournalReader, RequestLine


def write(recording: str, episode: str, file: str) -> None:
    there: set[str] = set()
    lines: list[RequestLine] = []
    try:
        reader = JournalReader(recording)
        for line in reader:
            if isinstance(line, RequestLine):
                there.update([line.request.episode_id] if line.request.episode_id else [])
                lines += [line] if line.request.episode_id == episode else []
    except JournalError as error:
        raise SystemExit(error.message) from None
    if not lines:
        raise SystemExit(f"{recording}: no request of episode {episode}, only of {', '.join(sorted(there)) or 'none'}")
    import rerun

    rerun.set_strict_mode(True)  # errors are raised, not logged
    stream = rerun.RecordingStream("reflex", recording_id=episode)
    stream.save(file)
    step = 1.0 / (reader.header.control_rate_hz or 20.0)
    for line in sorted(lines, key=lambda line: line.arrival):
        stream.set_time("time", duration=line.arrival)
        for name, data in line.request.images().items():
            kind = "image/png" if data.startswith(b"\x89PNG") else "image/jpeg"
            stream.log(f"cameras/{name}", rerun.EncodedImage(contents=data, media_type=kind))
        for n, value in enumerate(line.request.state or ()):
            stream.log(f"state/{n}", rerun.Scalars([float(value)]))
        stream.log("latency_ms", rerun.Scalars([line.latency.total_ms]))
        stream.log("task", rerun.TextLog(line.request.instruction or ""))
        if line.response is None or line.response.actions is None:
            continue
        for later, action in enumerate(line.response.array()):
            stream.set_time("time", duration=line.arrival + line.latency.total_ms / 1e3 + later * step)
            for n, number in enumerate(action):
                stream.log(f"action/{n}", rerun.Scalars([float(number)]))
    stream.disconnect()
    print(f"wrote {file}; look at it with: rerun {file}")


if __name__ == "__main__":
    write(*sys.argv[1:4]) if len(sys.argv) > 3 else print(__doc__)
