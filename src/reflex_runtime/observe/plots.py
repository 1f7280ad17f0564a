"""The one module that imports matplotlib (the extra `plots`): its classes, and how a picture looks and is saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

from reflex_runtime.core.errors import ConfigError, needed_by
from reflex_runtime.observe import journal_view
from reflex_runtime.observe.files import replace
from reflex_runtime.observe.journal_view import FAINT, INK, RULE

with needed_by("a picture"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MaxNLocator

__all__ = ["Axes", "Figure", "MaxNLocator", "Patch", "Rectangle", "drawn", "saved"]

_STYLE: Final[dict[str, Any]] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so every machine places text alike
    "font.size": 8.0,
    "text.parse_math": False,  # ids may hold dollar signs
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "reflex",
}


def saved(prefix: Path, draw: Callable[[], Figure], hint: str = "", flag: str = "--out") -> tuple[Path, Path]:
    """Draw in the common style and save as PREFIX.svg and PREFIX.png; the same figure gives the same bytes.

    Raises ConfigError, which names the flag and ends with the hint, when a file cannot be written.
    """
    svg, png = prefix.with_name(prefix.name + ".svg"), prefix.with_name(prefix.name + ".png")
    with matplotlib.rc_context(cast(Any, _STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # ids may be in any script
        figure = draw()
        try:
            replace(svg, drawn(figure, format="svg", metadata={"Date": None, "Creator": None}))
            replace(png, drawn(figure, format="png", dpi=journal_view.DPI, metadata={"Software": None}))
        except OSError as error:
            raise ConfigError(f"{flag}={prefix}: cannot be written: {error.strerror or error}{hint}") from error
    return svg, png


def drawn(figure: Figure, **options: Any) -> bytes:
    """A figure as the bytes of a file. options: of `Figure.savefig`."""
    file = BytesIO()
    figure.savefig(file, **options)
    return file.getvalue()
