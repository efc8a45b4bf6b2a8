"""Pictures of a run: methods side by side, the metric along finetuning, predicted against true metric."""

from pathlib import Path

import numpy as np

from metricopt_ext.evidence.method import METHODS
from metricopt_ext.evidence.report import Report
from metricopt_ext.evidence.style import new_figure, save_figure


def plot_methods(report: Report, path: str | Path) -> Path:
    """Draw each method's test metric: a dot for each seed and a stroke at the mean."""
    names = report.methods
    figure, ((axes,),) = new_figure(6.4, 0.9 + 0.36 * len(names))
    for row, name in enumerate(reversed(names)):
        values, colour = report.values(name, "test"), METHODS[name].colour
        axes.plot(values, [row] * len(values), "o", color=colour, markersize=5, alpha=0.6, markeredgewidth=0)
        axes.plot([np.mean(values)] * 2, [row - 0.33, row + 0.33], color=colour, linewidth=2.5)
    axes.set_yticks(range(len(names)), [report.title(name) for name in reversed(names)])
    axes.grid(axis="x", alpha=0.25)
    direction = "higher" if report.maximize else "lower"
    axes.set_xlabel(f"test {report.metric} ({direction} is better)\ndots: seeds, stroke: mean")
    return save_figure(figure, path)


def plot_finetuning(report: Report, path: str | Path) -> Path:
    """Draw the validation metric along finetuning, mean and standard deviation over seeds."""
    figure, ((axes,),) = new_figure(6.4, 4.0)
    for name in report.methods:
        values = np.array([record.curves[name] for record in report.records if name in record.curves])
        if not len(values):
            continue
        mean, std = values.mean(0), values.std(0)
        steps = np.arange(values.shape[1])
        axes.plot(steps, mean, color=METHODS[name].colour, label=report.title(name))
        axes.fill_between(steps, mean - std, mean + std, color=METHODS[name].colour, alpha=0.15, linewidth=0)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("finetuning step")
    axes.set_ylabel(f"validation {report.metric}")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"mean and standard deviation over {len(report.records)} seeds", fontsize=9)
    return save_figure(figure, path)


def plot_value_function(report: Report, path: str | Path) -> Path:
    """Draw predicted against true metric where f is used, on trajectories that it was not fitted to."""
    figure, ((axes,),) = new_figure(4.8, 4.6)
    for record in report.records:
        axes.plot(record.true, record.predicted, ".", markersize=4, alpha=0.5, label=f"seed {record.seed}")
    true = [value for record in report.records for value in record.true]
    axes.plot([min(true), max(true)], [min(true), max(true)], color="black", linewidth=0.8)
    axes.set_xlabel(f"true {report.metric}")
    axes.set_ylabel(f"predicted {report.metric}")
    spearman = np.mean([quality.spearman for quality in report.quality])
    axes.set_title(f"value function on held-out trajectories, Spearman {spearman:.2f}", fontsize=9)
    axes.legend(frameon=False, markerscale=2, fontsize=8)
    return save_figure(figure, path)
