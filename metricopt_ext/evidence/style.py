"""How figures look."""

from pathlib import Path
from typing import Any


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any) -> tuple[Any, Any]:
    """Return a figure of this size in inches and its panels, ``rows x columns``; no global state is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write a figure as PNG and return its path."""
    figure.savefig(path, dpi=150)
    return Path(path)
