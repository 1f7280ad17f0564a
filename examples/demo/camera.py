"""A camera without a renderer: the scene as shaded boxes, drawn with OpenCV from the simulator's state.

Offscreen OpenGL is what a bare machine lacks, and a picture takes milliseconds there. The policies of the demo need to
see where things are, not how they shine: so every collision geometry becomes its bounding box in two parallel
projections, from above (upper half of the picture) and from the front, tilted (lower half), far faces first. The same
state gives the same picture, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

try:
    import cv2
except ImportError as error:
    raise ImportError("the demo camera draws with OpenCV: in a clone, pip install '.[demo]'") from error

SIZE: Final = 64
"""Height and width of the picture in pixels."""

_COLLISION_GROUP = 4
"""Meta-World puts the simple shapes that physics uses in this geometry group; meshes, for the eye only, in others."""

_TABLE = (196, 190, 180)
_FLOOR = (150, 150, 156)
_FIXED = (86, 108, 148)
_MOVING = (236, 132, 36)
_RIGHT_FINGER = (250, 250, 250)
_LEFT_FINGER = (40, 200, 120)
_HAND = (60, 40, 70)

_FRACTION_BITS = 5
"""OpenCV takes corners in 1/32 pixel, so that an edge that moves by a millimetre changes the picture."""

# The eight corners of a unit box, and its faces as (corners in order around the face, outward axis, sign).
_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
_FACES = np.array([[0, 1, 3, 2], [4, 5, 7, 6], [0, 1, 5, 4], [2, 3, 7, 6], [0, 2, 6, 4], [1, 3, 7, 5]])
_FACE_AXIS = np.array([0, 0, 1, 1, 2, 2])
_FACE_SIGN = np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
_LIGHT = np.array([-0.35, -0.55, 0.76])


@dataclass(frozen=True, slots=True)
class _View:
    """A parallel projection: pixel = scale · world + offset, and the direction from the scene towards the eye."""

    scale: NDArray[np.float64]  # [2, 3]
    offset: NDArray[np.float64]  # [2]
    towards_eye: NDArray[np.float64]  # [3], unit length
    near: float  # depth along towards_eye drawn at full brightness
    far: float  # … and at 60 %
    ground: tuple[int, int, int]


def _from_above() -> _View:
    """0.9 m of table from left to right and 0.68 m from the robot's side (bottom) to the back edge (top)."""
    right, down = SIZE / 0.9, -(SIZE / 2) / 0.68
    scale = np.array([[right, 0.0, 0.0], [0.0, down, 0.0]])
    offset = np.array([SIZE / 2, -down * 1.02])
    return _View(scale, offset, np.array([0.0, 0.0, 1.0]), near=0.4, far=0.0, ground=_TABLE)


def _from_front() -> _View:
    """Seen from the robot's side, tilted by 25°, so that what is farther away also stands higher in the picture."""
    tilt = np.deg2rad(25.0)
    right, down = SIZE / 0.9, -(SIZE / 2) / 0.62
    up = np.array([0.0, np.sin(tilt), np.cos(tilt)])
    scale = np.stack([np.array([right, 0.0, 0.0]), down * up])
    offset = np.array([SIZE / 2, SIZE + down * -0.13])
    eye = np.array([0.0, -np.cos(tilt), np.sin(tilt)])
    return _View(scale, offset, eye, near=-0.3, far=-1.0, ground=_FLOOR)


class SchematicCamera:
    """Draws one MuJoCo scene. `picture` takes well under a millisecond and keeps no state between calls.

    `model` is read once, so a camera belongs to one scene. Bodies moved by changing the model (Meta-World places its
    furniture so) are followed all the same, because positions come from `data`.
    """

    def __init__(self, model: Any) -> None:
        geoms = [g for g in range(model.ngeom) if _is_drawn(model, g)]
        self._geoms = np.array(geoms)
        box = np.asarray(model.geom_aabb)[self._geoms]
        self._local = box[:, None, :3] + _CORNERS[None] * box[:, None, 3:]  # [n, 8, 3]
        self._colour = np.array([_colour(model, g) for g in geoms], np.float64)  # [n, 3]
        self._views = (_from_above(), _from_front())

    def picture(self, data: Any) -> NDArray[np.uint8]:
        """The scene now: uint8 [64, 64, 3], red green blue, row 0 at the top.

        `data` must be up to date (`mj_forward` after a reset). The array is the caller's own.
        """
        position = np.asarray(data.geom_xpos)[self._geoms]
        turn = np.asarray(data.geom_xmat)[self._geoms].reshape(-1, 3, 3)
        corners = position[:, None, :] + self._local @ turn.transpose(0, 2, 1)  # [n, 8, 3]
        normals = turn.transpose(0, 2, 1)[:, _FACE_AXIS] * _FACE_SIGN[:, None]  # [n, 6, 3]
        light = 0.62 + 0.38 * np.clip(normals @ _LIGHT, 0.0, 1.0)
        image = np.empty((SIZE, SIZE, 3), np.uint8)
        half = SIZE // 2
        for view, rows in zip(self._views, (slice(0, half), slice(half, SIZE)), strict=True):
            tile = image[rows]
            tile[:] = view.ground
            self._draw(tile, view, corners, normals, light, top=rows.start)
        return image

    def _draw(
        self,
        tile: NDArray[np.uint8],
        view: _View,
        corners: NDArray[np.float64],
        normals: NDArray[np.float64],
        light: NDArray[np.float64],
        top: int,
    ) -> None:
        pixels = corners @ view.scale.T + (view.offset - (0.5, 0.5 + top))
        depth = corners @ view.towards_eye
        face_depth = depth[:, _FACES].mean(-1)  # [n, 6]
        visible = np.argwhere(normals @ view.towards_eye > 0.02)
        order = visible[np.argsort(face_depth[visible[:, 0], visible[:, 1]], kind="stable")]
        fade = 0.6 + 0.4 * np.clip((face_depth - view.far) / (view.near - view.far), 0.0, 1.0)
        tint = (self._colour[:, None] * (light * fade)[..., None]).round().astype(int).tolist()
        polygons = np.ascontiguousarray((pixels[:, _FACES] * (1 << _FRACTION_BITS)).round(), np.int32)
        for geom, face in order.tolist():
            cv2.fillConvexPoly(tile, polygons[geom, face], tint[geom][face], cv2.LINE_AA, _FRACTION_BITS)


def _is_drawn(model: Any, geom: int) -> bool:
    """Furniture and the gripper. Table, walls and the arm would only hide what matters."""
    body = model.body(model.geom_bodyid[geom])
    if _is_robot(model, body.id):
        return body.name in {"rightclaw", "leftclaw", "hand"}
    return bool(model.geom_group[geom] == _COLLISION_GROUP and body.name != "tablelink")


def _is_robot(model: Any, body: int) -> bool:
    return bool(model.body(model.body_rootid[body]).name == "base")


def _colour(model: Any, geom: int) -> tuple[int, int, int]:
    """By role, not by material: what a robot can move stands out from what is fixed to the table."""
    body = int(model.geom_bodyid[geom])
    if _is_robot(model, body):
        return {"rightclaw": _RIGHT_FINGER, "leftclaw": _LEFT_FINGER}.get(model.body(body).name, _HAND)
    while body:
        if model.body_jntnum[body]:
            return _MOVING
        body = int(model.body_parentid[body])
    return _FIXED
