"""Example images with the classifier's predictions before and after."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from metricopt_ext.data.labelled import Split
from metricopt_ext.data.streamed import is_streamed
from metricopt_ext.experiment.style import new_figure, save_figure
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted

ROWS, COLUMNS = 3, 8
LONGEST = 12  # characters of a class's name that fit over an image
RIGHT, WRONG = "#2e7d4f", "#c02942"


def plot_examples(
    part: Split, before: Tensor, after: Tensor, class_names: tuple[str, ...], path: Path, seed: int
) -> Path:
    """Draw a random sample of the images on which the classifier changed its mind.

    Args:
        part: Images, ``n x c x h x w`` in [0, 1] or normalised, and labels.
        before: Predicted classes before finetuning, ``n``.
        after: Predicted classes after finetuning, ``n``.
        class_names: A name for each class.
        path: The PNG file.
        seed: Seed of the sample.
    """
    y, before, after = part.y.cpu(), before.cpu(), after.cpu()
    changed = (before != after).nonzero().squeeze(1)
    order = torch.randperm(len(changed), generator=generator(seed, "examples"))
    shown = changed[order[: ROWS * COLUMNS]].tolist()
    pictures = _in_unit_range(part.x, shown)
    mended, broken = int(((before != y) & (after == y)).sum()), int(((before == y) & (after != y)).sum())
    figure, panels = new_figure(COLUMNS * 1.1, ROWS * 1.6 + 0.6, ROWS, COLUMNS)
    figure.suptitle(
        f"{counted(len(y), 'test image')}: {mended} corrected, {broken} broken by finetuning\n"
        "predicted before → after finetuning; green: now right, red: now wrong",
        fontsize=9,
    )
    names = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in class_names]
    for place, axes in enumerate(panels.flat):
        axes.set_axis_off()
        if place >= len(shown):
            continue
        i = shown[place]
        axes.imshow(pictures[place].movedim(0, -1).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set_title(
            f"{names[before[i]]}\n→ {names[after[i]]}",
            fontsize=8,
            color=RIGHT if after[i] == y[i] else WRONG,
        )
        axes.text(0.5, -0.05, f"is {names[y[i]]}", fontsize=7, ha="center", va="top", transform=axes.transAxes)
    return save_figure(figure, path)


def _in_unit_range(x: Tensor, shown: Sequence[int]) -> Tensor:
    """Some images, those that were normalised by the least and the largest value of all; of those on disk, of some."""
    some = (x[list(shown)] if shown else x[:0]).cpu()
    whole = some if is_streamed(x) else x
    if len(whole) and (whole.min() < 0 or whole.max() > 1):
        least, largest = whole.min().cpu(), whole.max().cpu()
        some = (some - least) / (largest - least)
    return some
