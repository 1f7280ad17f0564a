"""Makes docs/images/feeds.png: one frame of each of four feeds, as `reflex feeds --annotate` wrote them.

python tools/feeds_picture.py [OUT.png]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageOps

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "feeds.png"
FEEDS = {"door": (2, 3), "yard": (5, 4), "gate": (7, 4), "roof": (13, 3)}  # seed and shapes of each scene
SIZE, FRAME, BITS = (400, 300), 30, 6


def main() -> None:
    """Run the command, take a frame of each video, and put them together."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    size = f"{SIZE[0]}x{SIZE[1]}"
    feeds = [f"{name}=shapes:seed={seed},count={n},seconds=3,size={size}" for name, (seed, n) in FEEDS.items()]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "reflex_runtime", "feeds", *feeds, "--onnx", "shapes", "--annotate", folder]
        subprocess.run(command, check=True)
        frames = [frame_of(Path(folder, f"{name}.mp4")) for name in FEEDS]
    rows = [np.hstack(frames[:2]), np.hstack(frames[2:])]
    # Fewer bits for each colour: the noise of the scenes would make the file three times as large.
    ImageOps.posterize(Image.fromarray(np.vstack(rows)), BITS).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size / 1024:.0f} kB")


def frame_of(video: Path) -> np.ndarray:
    """A frame from the middle of a video."""
    with av.open(str(video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return frames[min(FRAME, len(frames) - 1)]


if __name__ == "__main__":
    main()
