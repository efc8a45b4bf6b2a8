"""A picture of precision as a function of recall."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from metricopt_ext.experiment.style import new_figure, save_figure

NAMED = 5  # classes with a colour and a name, those of the least AP50
LETTERS = 40  # of such a name


def plot_precision_recall(curves: Mapping[str, Sequence[float]], path: str | Path) -> Path:
    """Draw the precision of each class and their mean; the classes of the least AP50 are named with it.

    Args:
        curves: The precision of each class, in [0, 1], at equal steps of recall from 0 to 1 (`coco_summary.Summary`).
        path: The PNG file.
    """
    figure, panels = new_figure(7, 4.5)
    axes = panels[0, 0]
    means = {name: float(np.mean(values)) for name, values in curves.items()}
    least = sorted(means, key=lambda name: means[name])
    mean = np.mean(list(curves.values()), axis=0)
    recall = np.linspace(0, 1, len(mean))
    for name in reversed(least[NAMED:]):
        axes.plot(recall, curves[name], color="#c7c7cc", linewidth=0.8, label="_others")
    for name in least[:NAMED]:
        axes.plot(recall, curves[name], linewidth=1.2, label=f"{means[name]:.3f} {name[:LETTERS]}")
    told = f"mean of {len(curves)} classes, AP50 {float(mean.mean()):.3f}"
    axes.plot(recall, mean, color="black", linewidth=2.2, label=told)
    axes.set(xlabel="recall", ylabel="precision at an IoU of 0.5", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, title="least AP50")
    return save_figure(figure, path)
