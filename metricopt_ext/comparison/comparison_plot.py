"""The picture of a comparison: the test metric against queries and against seconds."""

from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.comparison.claims import OURS, entry_of
from metricopt_ext.comparison.comparison_content import known
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.seeds import standard_error
from metricopt_ext.experiment.style import direction, new_figure, save_figure
from metricopt_ext.utils.words import counted

PICTURE = "comparison.png"


def plot(content: dict[str, Any], path: Path) -> Path:
    """Draw the test metric against queries and against seconds, mean and standard error over seeds."""
    figure, ((by_queries, by_seconds),) = new_figure(10.4, 5.0, columns=2, sharey=True)
    low, high = _axis(content)
    for name in content["starts"]:
        entry, height = entry_of(name), float(np.mean(known(content["starts"][name]["test"])))
        beyond = "" if low <= height <= high else f" ({height:.4f}, beyond the axis)"
        by_queries.axhline(height, color=entry.colour, linestyle="--", linewidth=1.2, label=entry.title + beyond)
    by_queries.set_ylim(low, high)
    best = content["best_start"]
    dot = {"fmt": "s", "color": METHODS["best_start"].colour, "capsize": 3, "zorder": 5}
    error = standard_error(known(best["test"]))
    mean = np.mean(known(best["test"]))
    by_queries.errorbar(best["queries"], mean, error, label=METHODS["best_start"].title, **dot)
    by_seconds.errorbar(max(float(np.mean(best["seconds"])), 1e-3), mean, error, **dot)
    zero, free = min(best["queries"], *content["budgets"]) / 2, False  # 0 has no place on a logarithmic axis
    for name, method in content["methods"].items():
        cells = [cell for cell in method["cells"].values() if known(cell["test"])]
        if not cells:
            continue
        entry = METHODS[name]
        means = np.array([np.mean(known(cell["test"])) for cell in cells])
        errors = np.array([standard_error(known(cell["test"])) for cell in cells])
        free = free or any(np.mean(known(cell["queries"])) < zero for cell in cells)
        for axes, column, least in ((by_queries, "queries", zero), (by_seconds, "seconds", 1e-3)):
            x = [max(float(np.mean(known(cell[column]))), least) for cell in cells]
            width = 2.4 if name == OURS else 1.4
            label = entry.title if axes is by_queries else None
            axes.plot(x, means, "o-", color=entry.colour, linewidth=width, markersize=4, label=label)
            axes.fill_between(x, means - errors, means + errors, color=entry.colour, alpha=0.15, linewidth=0)
    metric = content["metric"]
    by_queries.set_ylabel(f"test {metric['name']}\n({direction(metric['maximize'])})")
    for axes, label in ((by_queries, "metric queries"), (by_seconds, "seconds")):
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    ticks = ({zero: 0} if free else {}) | {budget: budget for budget in content["budgets"]}
    by_queries.set_xticks(list(ticks), list(ticks.values()))
    by_queries.minorticks_off()
    _label_seconds(by_seconds)
    figure.suptitle(
        f"{content['title']}, {counted(len(content['seeds']), 'seed')}; bands: standard error over seeds;"
        " dashed: free starts",
        fontsize=9,
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return save_figure(figure, path)


def _label_seconds(axes: Any) -> None:
    """Put as many ticks on a logarithmic axis as have room, with plain numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = axes.get_xlim()
    several = LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))
    axes.xaxis.set_major_locator(MaxNLocator(5) if high < 3 * low else several)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _axis(content: dict[str, Any]) -> tuple[float, float]:
    """Return the ends of the metric's axis: of all searches, and of free starts unless they would double it."""
    cells = [cell["test"] for method in content["methods"].values() for cell in method["cells"].values()]
    columns = [known(values) for values in (content["best_start"]["test"], *cells) if known(values)]
    low = min(float(np.mean(each)) - standard_error(each) for each in columns)
    high = max(float(np.mean(each)) + standard_error(each) for each in columns)
    span = high - low or 0.01
    free = [float(np.mean(known(start["test"]))) for start in content["starts"].values()]
    near = [height for height in free if low - span <= height <= high + span]
    return min([low, *near]) - span / 20, max([high, *near]) + span / 20
