"""A report as one HTML file that needs no other: texts, tables, pictures and code, whatever they are about."""

import base64
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from metricopt_ext.plain import plain
from metricopt_ext.utils.files import content_of, write_atomically

TEMPLATE = "page.html"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    kind: ClassVar[str] = "points"
    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows.

    Attributes:
        caption: What it shows.
        header: Titles of the columns.
        rows: Their cells.
        best: Cells that are marked, each a row and a column.
        ours: Rows whose name is bold.
        words: Columns that are aligned left, the others being numbers.
    """

    kind: ClassVar[str] = "table"
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Collection[tuple[int, int]] = ()
    ours: Collection[int] = ()
    words: Collection[int] = (0,)


@dataclass(frozen=True)
class Figure:
    """A picture, embedded.

    Attributes:
        path: The PNG file.
        alt: What is to be seen there, for those who don't see it.
        caption: What it shows and how it is read.
    """

    kind: ClassVar[str] = "figure"
    path: Path
    alt: str
    caption: str

    @property
    def source(self) -> str:
        """The file's content as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self._content()).decode()}"

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as shown, in pixels; figures are written with 3 for every 2, for sharper screens."""
        width, height = struct.unpack(">II", self._content()[16:24])
        return round(width / 1.5), round(height / 1.5)

    def _content(self) -> bytes:
        with content_of(self.path, "picture"):
            content = self.path.read_bytes()
            if not content.startswith(b"\x89PNG\r\n\x1a\n") or len(content) < 24:
                raise ValueError("it is no PNG")
        return content


@dataclass(frozen=True)
class Code:
    """Lines to copy, as they are.

    Attributes:
        label: What they are.
        text: The lines.
    """

    kind: ClassVar[str] = "code"
    label: str
    text: str


@dataclass(frozen=True)
class Folded:
    """Parts that are shown on request."""

    kind: ClassVar[str] = "folded"
    summary: str
    parts: "Sequence[Part]"


Part = Text | Points | Table | Figure | Code | Folded


@dataclass(frozen=True)
class Section:
    """Parts under a heading."""

    heading: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A report; every text in it is plain and is escaped.

    Attributes:
        title: What it is about.
        verdict: What came out, in one sentence.
        sections: All else.
    """

    title: str
    verdict: str
    sections: Sequence[Section]

    def html(self) -> str:
        """Return the whole file: no script, and nothing that is loaded from elsewhere."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

        def shown(value: Any) -> Any:
            return plain(value, lines=True) if isinstance(value, str) and not isinstance(value, Markup) else value

        templates = Environment(
            loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, finalize=shown
        )
        return templates.get_template(TEMPLATE).render(page=self) + "\n"

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        write_atomically(path, self.html().encode())
        return path
