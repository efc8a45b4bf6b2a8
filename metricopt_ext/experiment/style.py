"""How figures and tables look."""

import io
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from metricopt_ext.plain import MESSAGE, in_markdown, plain
from metricopt_ext.utils.files import write_atomically


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
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if text.get_text():  # all but the numbers at ticks, which are written later and may be powers of ten
            text.set_parse_math(False)  # a name may contain dollar signs
            text.set_text(plain(text.get_text(), lines=True))
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    write_atomically(path, image.getvalue())
    return Path(path)


def direction(maximize: bool) -> str:
    """Say which values of a metric are better."""
    return f"{'higher' if maximize else 'lower'} is better"


def over_seeds(count: int) -> str:
    """Say what a figure's lines and bands are, for this number of seeds."""
    return f"mean and standard deviation over {count} seeds" if count > 1 else "one seed"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, whatever its cells hold (see `in_markdown`)."""
    return ["| " + " | ".join(map(in_markdown, cells)) + " |" for cells in (header, ["---"] * len(header), *rows)]


def print_written(*files: str | Path) -> None:
    """Print which files were written."""
    print("wrote", *(plain(str(file)) for file in files), sep="\n  ")


def print_points(lines: Sequence[str]) -> None:
    """Print a list of sentences on the terminal, folded between words."""
    from rich.console import Console

    width = Console().width
    for line in lines:
        print(
            textwrap.fill(
                plain(line, MESSAGE), width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
            )
        )


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    left: int = 1,
    bold: Collection[int] = (),
) -> None:
    """Print a table on the terminal.

    Args:
        header: Titles of the columns.
        rows: Their cells.
        title: Stands above the table.
        left: Number of columns that are aligned left, the others being numbers.
        bold: Which rows are bold.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    header, *rows = ([plain(cell) for cell in row] for row in (header, *rows))
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for i, column in enumerate(header):
        words = i < left  # which are folded where there is no room for them; numbers are never
        table.add_column(Text(column), justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for i, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if i in bold else "")
    console = Console(highlight=False)
    numbers = sum(max(len(row[i]) for row in (header, *rows)) + 1 for i in range(left, len(header)))
    console.width = max(console.width, numbers + 12 * left)  # better lines that wrap than numbers cut off
    if title:
        console.print(Text(plain(title), "italic"))  # text, as brackets in a string would be read as markup
    console.print(table)
