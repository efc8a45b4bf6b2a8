"""Pictures of examples: what stands above and below each image."""

from pathlib import Path
from typing import Any

import pytest
import torch

from metricopt_ext.classification import pictures
from metricopt_ext.data.labelled import Split


def test_examples_show_names_that_fit_and_what_became_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: saved.append(figure) or path)
    part = Split(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 1, 0]))
    before, after = torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1, 0])
    names = ("golden_retriever", "cat")
    path = tmp_path / "examples.png"
    assert pictures.plot_examples(part, before, after, names, path, seed=0) == path
    (figure,) = saved
    shown = sorted((axes.get_title(), axes.texts[0].get_text()) for axes in figure.axes if axes.get_title())
    assert shown == [
        ("cat\n→ golden_retr…", "is cat"),
        ("cat\n→ golden_retr…", "is golden_retr…"),
        ("golden_retr…\n→ cat", "is cat"),
    ]
    assert figure.get_suptitle().startswith("4 test images: 2 corrected, 1 broken by finetuning\n")
