"""How pictures are fitted, against what LeRobot's own functions give; `pad` is compared with openpi's client in
tests/robots/wires/test_observations.py."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import Export, load_policy
from reflex_runtime.robots.policy.observation import decode_image, resize_image
from reflex_runtime.robots.policy.spec import FLOAT_LEVELS
from robots import means
from robots.tiny import run_alone


def pattern(height: int, width: int) -> Any:
    y, x, c = np.mgrid[0:height, 0:width, 0:3]
    return ((y * 53 + x * 31 + c * 17 + (x * y) % 7 * 20) % 256).astype(np.uint8)


# The green of LeRobot 0.6.1's `resize_with_pad_torch` (pi0, pi05) of a float picture, in levels of 255.
# (height, width) of the pattern and of the result.
GOLDEN = [
    (
        (6, 9), (4, 4),
        [[0, 0, 0, 0], [101.88, 216.63, 75.38, 50.13], [138.38, 152.12, 244.38, 135.62], [0, 0, 0, 0]],
    ),
    (
        (9, 6), (4, 5),
        [[0, 93.62, 64.12, 0, 0], [0, 33.88, 127.38, 0, 0], [0, 166.12, 13.12, 0, 0], [0, 190.38, 49.88, 0, 0]],
    ),
    (
        (3, 5), (6, 7),
        [
            [0, 0, 0, 0, 0, 0, 0],
            [17.0, 34.71, 56.86, 79.0, 101.14, 123.29, 141.0],
            [50.13, 74.98, 106.05, 137.12, 168.2, 130.7, 64.12],
            [89.88, 123.3, 137.66, 110.88, 152.66, 103.37, 15.38],
            [123.0, 163.57, 141.14, 9.0, 59.71, 50.43, 11.0],
            [0, 0, 0, 0, 0, 0, 0],
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("of", "to", "levels"), GOLDEN, ids=str)
def test_p29_pictures_are_fitted_as_lerobot_fits_them(of: Any, to: Any, levels: Any) -> None:
    rows, columns = (np.flatnonzero(np.array(levels).any(axis)) for axis in (1, 0))
    wanted = np.array(levels)[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    fitted = resize_image(pattern(*of), *to, "pad-smolvla-float")[..., 1]
    inner = fitted[-len(wanted) :, -wanted.shape[1] :]
    assert fitted.dtype == np.float32
    assert np.abs(inner - wanted).max() <= 0.01  # they stand here with two digits
    assert fitted.sum() == pytest.approx(inner.sum())  # `resize_with_pad` of SmolVLA: all black before


def test_p29_files_are_fitted_as_arrays_are_and_jpeg_is_decoded_whole() -> None:
    whole = np.asarray(PIL.Image.fromarray(pattern(16, 16)).resize((96, 64), PIL.Image.Resampling.BICUBIC))
    for kind in ("PNG", "JPEG"):
        file = io.BytesIO()
        PIL.Image.fromarray(whole).save(file, kind, quality=95)
        decoded = decode_image(file.getvalue())
        fitted = decode_image(file.getvalue(), "image", (8, 8), FLOAT_LEVELS)
        assert (fitted == resize_image(decoded, 8, 8, FLOAT_LEVELS)).all()
    grey = io.BytesIO()
    PIL.Image.fromarray(whole[..., 0]).save(grey, "PNG")
    assert decode_image(grey.getvalue(), "image", (8, 8), FLOAT_LEVELS).shape == (8, 8, 3)


def test_p29_an_export_says_how(tmp_path: Any) -> None:
    ports: Any = {"front": ("u", [4, 4, 3])}
    seen = {}
    for resize in ("stretch", "pad", "pad-smolvla-float"):
        if resize == "pad-smolvla-float":
            ports["front"] = ("f", [4, 4, 3])
        root = means.write_export(tmp_path / resize, ports, 1, images={"front": [4, 4]}, resize=resize)
        policy = load_policy(root)
        sent = policy.request(policy.prepare(images={"front": pattern(6, 9)}))
        seen[resize] = float(run_alone(policy, sent).actions[0, 0])
        assert seen[resize] == pytest.approx(resize_image(pattern(6, 9), 4, 4, resize).mean(), rel=1e-6)  # type: ignore[arg-type]
    assert len(set(seen.values())) == 3
    whole = policy.prepare(images={"front": pattern(4, 4)}).images["front"]
    assert (whole.dtype, (whole == pattern(4, 4)).all()) == (np.float32, True)
    with pytest.raises(ConfigError, match="float"):
        load_policy(
            means.write_export(
                tmp_path / "u", {"front": ("u", [4, 4, 3])}, 1, images={"front": [4, 4]}, resize="pad-smolvla-float"
            )
        )
    ports["front"] = ("u", [4, 4, 3])
    with pytest.raises(ConfigError, match="resize: found \"crop\", expected 'stretch' or 'pad' or 'pad-smolvla-float'"):
        Export.load(means.write_export(tmp_path / "x", ports, 1, images={"front": [4, 4]}, resize="crop"))
