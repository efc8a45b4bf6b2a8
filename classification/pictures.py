"""Example images with the classifier's predictions before and after."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from metricopt_ext.data.labelled import Split
from metricopt_ext.utils.seeding import generator

ROWS, COLUMNS = 3, 8
RIGHT, WRONG = "#2e7d4f", "#c02942"


def plot_examples(
    part: Split, before: Tensor, after: Tensor, class_names: tuple[str, ...], path: Path, seed: int
) -> Path:
    """Draw a random sample of the images on which the classifier changed its mind.

    Args:
        part: Images, ``n x c x h x w`` in [0, 1], and labels.
        before: Predicted classes before finetuning, ``n``.
        after: Predicted classes after finetuning, ``n``.
        class_names: A name for each class.
        path: The PNG file.
        seed: Seed of the sample.
    """
    x, y, before, after = part.x.cpu(), part.y.cpu(), before.cpu(), after.cpu()
    changed = (before != after).nonzero().squeeze(1)
    order = torch.randperm(len(changed), generator=generator(seed, "examples"))
    shown = changed[order[: ROWS * COLUMNS]].tolist()
    mended, broken = int(((before != y) & (after == y)).sum()), int(((before == y) & (after != y)).sum())
    figure = Figure(figsize=(COLUMNS * 1.1, ROWS * 1.45 + 0.5), layout="constrained")
    figure.suptitle(f"{len(y)} test images: {mended} corrected, {broken} broken by finetuning", fontsize=11)
    for place, axes in enumerate(figure.subplots(ROWS, COLUMNS).flat):
        axes.set_axis_off()
        if place >= len(shown):
            continue
        i = shown[place]
        axes.imshow(x[i].movedim(0, -1).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set_title(
            f"{class_names[before[i]]} → {class_names[after[i]]}",
            fontsize=9,
            color=RIGHT if after[i] == y[i] else WRONG,
        )
        axes.text(0.5, -0.05, f"is {class_names[y[i]]}", fontsize=7, ha="center", va="top", transform=axes.transAxes)
    figure.savefig(path, dpi=150)
    return path
