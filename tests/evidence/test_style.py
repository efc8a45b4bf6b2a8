"""How figures look, and that making them leaves matplotlib's global state alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from metricopt_ext.evidence.style import new_figure, save_figure


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_panels_come_as_a_grid_without_frames(rows: int, columns: int) -> None:
    figure, panels = new_figure(6.0, 4.0, rows, columns)
    assert panels.shape == (rows, columns)
    assert list(figure.axes) == list(panels.flat)
    for axes in panels.flat:
        assert {name: spine.get_visible() for name, spine in axes.spines.items()} == {
            "left": True,
            "bottom": True,
            "top": False,
            "right": False,
        }


def test_panels_may_share_their_axes() -> None:
    _, ((left, right),) = new_figure(4.0, 2.0, 1, 2, sharey=True)
    left.set_ylim(-3, 7)
    assert right.get_ylim() == (-3, 7)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_saved_figure_has_150_pixels_to_the_inch(tmp_path: Path, kind: type) -> None:
    figure, _ = new_figure(2.0, 1.0)
    path = save_figure(figure, kind(tmp_path / "figure.png"))
    assert path == tmp_path / "figure.png"
    assert isinstance(path, Path)
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (300, 150))


def test_no_window_system_is_asked_for(tmp_path: Path) -> None:
    code = (
        "import json, sys; from metricopt_ext.evidence.style import new_figure, save_figure;"
        "save_figure(new_figure(1, 1)[0], sys.argv[1]); print(json.dumps('matplotlib.pyplot' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.png"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is False
