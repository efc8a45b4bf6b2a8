"""Pictures of a run: methods side by side, the metric along finetuning, predicted against true metric."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.report import Report
from metricopt_ext.experiment.seeds import paired_interval
from metricopt_ext.experiment.style import direction, new_figure, over_seeds, save_figure
from metricopt_ext.utils.words import counted

FEW_DOTS = 400  # queries that can be told apart in a picture
NAMED = 60  # outcomes whose names can be read in a picture
WIDEST = 30  # characters of a name
STRETCH = 3.0  # a method that alone makes the axis this many times as long is drawn as an arrow at its end


def plot_methods(report: Report, path: str | Path) -> Path:
    """Draw each method's test metric: a dot for each seed, a vertical line at the mean, a bar for its 95% interval.

    A single method so much worse that the others would merge becomes an arrow at the axis' end, with its mean. The axis
    is that of the dots: intervals of few seeds can be many times as long, and the plot says that they are cut.
    """
    values = {name: report.values(name, "test") for name in reversed(report.methods)}
    low, high = _bulk(list(values.values()), report.maximize)
    margin = 0.05 * (high - low) or 0.01
    cut = False
    figure, ((axes,),) = new_figure(6.4, 1.1 + 0.36 * len(values))
    for row, (name, dots) in enumerate(values.items()):
        colour, (mean, *interval) = METHODS[name].colour, paired_interval(dots)
        if len(dots) > 1:
            axes.hlines(row, *interval, color=colour, linewidth=7, alpha=0.2)
            cut = cut or interval[0] < low - margin or interval[1] > high + margin
        axes.plot(dots, [row] * len(dots), "o", color=colour, markersize=5, alpha=0.6, markeredgewidth=0)
        axes.plot([mean] * 2, [row - 0.33, row + 0.33], color=colour, linewidth=2.5)
        if min(dots) < low:
            _point_beyond(axes, low - margin, row, 20, f"mean {mean:.4f}", colour)
        if max(dots) > high:
            _point_beyond(axes, high + margin, row, -20, f"mean {mean:.4f}", colour)
    axes.set_xlim(low - margin, high + margin)
    axes.set_yticks(range(len(values)), [report.title(name) for name in values])
    axes.grid(axis="x", alpha=0.25)
    several = len(report.records) > 1
    bar = "bar: its 95% interval, cut off at the axis" if cut else "bar: its 95% interval"
    key = f"dots: seeds; vertical line: mean; {bar}" if several else "one seed, so no intervals"
    arrow = "; arrow: beyond the axis" if axes.texts else ""
    axes.set_xlabel(f"test {report.metric} ({direction(report.maximize)})")
    figure.suptitle(f"{key}{arrow}", fontsize=9)
    return save_figure(figure, path)


def _bulk(values: list[list[float]], maximize: bool) -> tuple[float, float]:
    """Return the ends of the methods' values, less those of a worse method that alone would stretch them."""
    low, high = min(map(min, values)), max(map(max, values))
    worst = (min if maximize else max)(range(len(values)), key=lambda i: np.mean(values[i]))
    others = values[:worst] + values[worst + 1 :]
    if len(others) > 1 and 0 < STRETCH * (max(map(max, others)) - min(map(min, others))) < high - low:
        return _bulk(others, maximize)
    return low, high


def _point_beyond(axes: Any, edge: float, row: int, inwards: float, text: str, colour: str) -> None:
    """Write a text ``inwards`` points from the edge, with an arrow from there to the edge."""
    axes.annotate(
        text,
        (edge, row),
        (inwards, 0),
        textcoords="offset points",
        fontsize=8,
        color=colour,
        ha="left" if inwards > 0 else "right",
        va="center",
        arrowprops={"arrowstyle": "->", "color": colour},
    )


def plot_outcomes(report: Report, path: str | Path) -> Path:
    """Draw each outcome of the metric on validation before and after, the worst before at the top; means over seeds.

    A line from a ring to a dot is a change: in colour if it is for the better, else grey.
    """

    def means(when: str) -> dict[str, float]:
        known = {name: [value for value in each[when] if value is not None] for name, each in report.outcomes().items()}
        return {name: float(np.mean(values)) for name, values in known.items() if values}

    before, after = means("before"), means("after")
    names = sorted(before, key=lambda name: before[name], reverse=report.maximize)
    few = len(names) <= NAMED
    figure, ((axes,),) = new_figure(6.4, 1.3 + min(0.2 * len(names), 10.0))
    ours, theirs = METHODS["metricopt"].colour, METHODS["pretrained"].colour
    size = 5.5 if few else 3.0
    for row, name in enumerate(names):
        axes.plot(before[name], row, "o", color=theirs, markerfacecolor="white", markersize=size + 1)
        if name in after:
            look = ours if (after[name] > before[name]) == report.maximize else theirs
            axes.plot([before[name], after[name]], [row, row], color=look, alpha=0.6, linewidth=1.5, zorder=1)
            axes.plot(after[name], row, "o", color=ours, markersize=size, markeredgewidth=0)
    worst = min if report.maximize else max
    for values, colour in ((before, theirs), (after, ours)):
        if values:
            axes.axvline(worst(values.values()), color=colour, linewidth=0.8, linestyle="--", zorder=0)
    shown = [name if len(name) <= WIDEST else f"{name[: WIDEST - 3]}..." for name in names] if few else []
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    axes.set_ylim(-0.8, len(names) - 0.2)
    axes.grid(axis="x", alpha=0.25)
    axes.set_xlabel(f"outcomes of {report.metric} on validation\n({direction(report.maximize)})")
    over = f"; means over {len(report.records)} seeds" if len(report.records) > 1 else ""
    figure.suptitle(f"ring: before; dot: after; dashed: the worst of each{over}", fontsize=9)
    return save_figure(figure, path)


def plot_finetuning(report: Report, path: str | Path) -> Path:
    """Draw the validation metric along finetuning, mean and standard deviation over seeds, and what the guard kept."""
    figure, ((axes,),) = new_figure(6.4, 4.4)
    for name in report.methods:
        records = [record for record in report.records if name in record.curves]
        if not records:
            continue
        values = np.array([record.curves[name] for record in records])
        mean, std, steps = values.mean(0), values.std(0), np.arange(values.shape[1])
        colour, label = METHODS[name].colour, report.title(name)
        if name == "metricopt":
            times, seeds = sum(record.kept == name for record in records), len(records)
            often = {0: "not kept", seeds: "kept"}.get(times, f"kept in {times} of {seeds} seeds")
            label = f"{label}'s path, {often}"
            kept = [record.validation(name) for record in records]
            look: dict[str, Any] = {"fmt": "D", "color": colour, "markeredgecolor": "black", "capsize": 3, "zorder": 5}
            axes.errorbar(steps[-1], np.mean(kept), np.std(kept), label="what the guard kept", **look)
        axes.plot(steps, mean, color=colour, label=label)
        axes.fill_between(steps, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("finetuning step")
    axes.set_ylabel(f"validation {report.metric}\n({direction(report.maximize)})")
    axes.set_title(over_seeds(len(report.records)), fontsize=9)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return save_figure(figure, path)


def plot_search(report: Report, path: str | Path) -> Path:
    """Draw the validation metric at each query of a search, and the best so far."""
    figure, ((axes,),) = new_figure(6.4, 4.0)
    colour, best_of = METHODS["metricopt"].colour, np.maximum if report.maximize else np.minimum
    searched = [record.searched for record in report.records]
    shortest = min(map(len, searched))
    best = np.array([best_of.accumulate(values)[:shortest] for values in searched])
    size, alpha = (7, 0.5) if sum(map(len, searched)) <= FEW_DOTS else (3, 0.25)
    for values in searched:
        queries = np.arange(1, len(values) + 1)
        axes.plot(queries, values, ".", color=colour, alpha=alpha, markersize=size, markeredgewidth=0)
    axes.plot([], [], ".", color=colour, alpha=0.5, label="queries")
    steps, mean, error = np.arange(1, shortest + 1), best.mean(0), best.std(0) / math.sqrt(max(1, len(best) - 1))
    axes.plot(steps, mean, color=colour, label="best so far, mean over seeds" if len(best) > 1 else "best so far")
    if len(best) > 1:
        axes.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
    start = np.mean(report.values("pretrained", "validation"))
    axes.axhline(start, color=METHODS["pretrained"].colour, linewidth=1, label=METHODS["pretrained"].title)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("metric queries of the search (the first is its start)")
    axes.set_ylabel(f"validation {report.metric}\n({direction(report.maximize)})")
    title = counted(len(best), "seed")
    axes.set_title(f"{title}; band: ± standard error of the mean" if len(best) > 1 else title, fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return save_figure(figure, path)


def plot_value_function(report: Report, path: str | Path) -> Path:
    """Draw predicted against true metric where f is used, on trajectories that it was not fitted to."""
    figure, ((axes,),) = new_figure(5.8, 4.6)
    for record in report.records:
        axes.plot(record.true, record.predicted, ".", markersize=4, alpha=0.5, label=f"seed {record.seed}")
    true = [value for record in report.records for value in record.true]
    ends = [min(true, default=0.0), max(true, default=1.0)]
    axes.plot(ends, ends, color="black", linewidth=0.8, label="predicted = true")
    axes.set_xlabel(f"true {report.metric}")
    axes.set_ylabel(f"predicted {report.metric}")
    spearman = np.mean([quality.spearman for quality in report.quality] or [0.0])
    where = "before each query" if report.searched else "on held-out trajectories"
    axes.set_title(f"value function, tested {where}: Spearman {spearman:.2f}", fontsize=9)
    figure.legend(loc="outside right upper", frameon=False, markerscale=2, fontsize=8)
    return save_figure(figure, path)
