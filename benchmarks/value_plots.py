"""Draw a value function: the labels it learns from, what it made of them, and the path of finetuning on it.

    python benchmarks/value_plots.py --task classification --config-file configs/classification/digits.yaml \
        --output-dir out/pictures method.name=recipe

Runs the config's first seed, and evaluates the metric another 169 times for the landscape.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.experiment.baselines import loss_path
from metricopt_ext.experiment.cli import RUNS_CODE, TASKS, experiment_of
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.style import new_figure, print_written, save_figure
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.methods.result import Result
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.utils.config import load_config
from metricopt_ext.value.interpolation import GaussianProcess
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import NeuralValueFunction, ValueFunction


def main() -> None:
    """Parse the command line, run, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, required=True, help="whose config the next option names")
    parser.add_argument("--config-file", required=True, help="YAML file of a finetune tool")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. method.name=recipe")
    arguments = parser.parse_intermixed_args()
    with errors_in_one_line(ValueError):
        kind, folder = experiment_of(arguments.task), arguments.output_dir
        config = load_config(kind.config_type, arguments.config_file, arguments.overrides)
        config.check()
        task = kind(config, folder, config.seed).task
        result = optimize_metric(
            task, queries=config.queries, strategy=config.build_strategy(), seed=config.seed, output_dir=folder
        )
        paths = {"loss_finetune": loss_path(task, config.finetune, config.seed)}
        print_written(*draw_value_function(task.judged_by(task.metric.with_settings()), result, paths, folder))


def draw_value_function(
    task: FinetuneTask,
    result: Result,
    paths: Mapping[str, Tensor],
    folder: Path,
    *,
    grid: int = 13,
) -> list[Path]:
    """Draw all pictures of a run's value function into a folder; returns their paths, none if there is no f.

    Args:
        task: Its metric is evaluated ``grid * grid`` times, for the landscape; give it its own ledger.
        result: What `optimize_metric` returned.
        paths: Visited phi by method, ``(T + 1) x d`` each; the run's own path is added.
        folder: Where the PNG files go.
        grid: Points along each side of the landscape.
    """
    if result.fit is None:
        return []
    f = result.fit.f
    shown = {**paths, "metricopt": result.path}
    with task.adapter.applied(result.candidates[result.started_at]):
        landscape = plot_landscape(task, f, shown, folder / "landscape.png", grid=grid)
    if not (trajectories := result.trajectories):
        return [landscape]
    some = trajectories[:: max(1, len(trajectories) // 6)][:6]
    posterior = GaussianProcess(trajectories).posterior(some)
    drawn = [plot_interpolation(some, posterior, task.metric, folder / "interpolation.png"), landscape]
    if isinstance(f, NeuralValueFunction):
        drawn.append(plot_embedding(f, Observations.of(trajectories), task.metric, folder / "embedding.png"))
    return drawn


def plot_interpolation(
    trajectories: Sequence[Trajectory],
    posterior: Sequence[tuple[Tensor, Tensor]],
    metric: Any,
    path: str | Path,
) -> Path:
    """Draw the metric observed along trajectories and the band in between (paper, Fig. 2b).

    Args:
        trajectories: The trajectories, one panel each.
        posterior: For each, mean and standard deviation of the cost at all steps, ``T + 1`` each.
        metric: The `Metric`, for its name and units.
        path: The PNG file.
    """
    n = len(trajectories)
    columns = min(n, 3)
    rows = -(-n // columns)
    figure, panels = new_figure(3.1 * columns, 2.3 * rows + 0.3, rows, columns, sharex=True, sharey=True)
    for axes, trajectory, (mean, std) in zip(panels.flat, trajectories, posterior, strict=False):
        steps = np.arange(len(mean))
        middle, low, high = (_values(metric, cost) for cost in (mean, mean - 2 * std, mean + 2 * std))
        axes.fill_between(steps, low, high, color="#4f8f8b", alpha=0.2, linewidth=0)
        axes.plot(steps, middle, color="#4f8f8b", linewidth=1.2)
        axes.plot(trajectory.observed, _values(metric, trajectory.cost), "o", color="black", markersize=4)
        kind = "loss only" if trajectory.round == 0 else f"on policy, round {trajectory.round + 1}"
        axes.set_title(f"task {trajectory.index}, {kind}", fontsize=8)
    for axes in panels.flat[n:]:
        axes.set_visible(False)
    for axes in panels.flat[n - columns : n]:  # the lowest of each column
        axes.set_xlabel("finetuning step")
        axes.tick_params(labelbottom=True)
    for axes in panels[:, 0]:
        axes.set_ylabel(metric.name)
    key = "dots: observed; line and band: interpolated by a Gaussian process, ± 2 standard deviations"
    figure.suptitle(key, fontsize=9)
    return save_figure(figure, path)


def plot_embedding(f: NeuralValueFunction, data: Observations, metric: Any, path: str | Path) -> Path:
    """Draw the first member's embedding of the observed points, two principal components, by metric (Fig. 2c)."""
    with torch.no_grad():
        points = data.phi.to(f.radius)[:, None].expand(-1, f.members_count, -1)
        features = f.features(points)[:, 0].double().cpu()
    centred = features - features.mean(0)
    _, s, directions = torch.linalg.svd(centred, full_matrices=False)
    flat = centred @ directions[:2].T
    explained = float(s[:2].square().sum() / s.square().sum().clamp(min=1e-300))
    figure, panels = new_figure(5.0, 4.2)
    dots = panels[0, 0].scatter(flat[:, 0], flat[:, 1], c=_values(metric, data.cost), s=10, cmap="viridis")
    figure.colorbar(dots, ax=panels[0, 0], label=metric.name)
    panels[0, 0].set_title(f"value function's embedding; shown: {explained:.0%} of its variance", fontsize=9)
    panels[0, 0].set_xlabel("first principal component")
    panels[0, 0].set_ylabel("second principal component")
    panels[0, 0].set_xticks([])
    panels[0, 0].set_yticks([])
    return save_figure(figure, path)


def plot_landscape(
    task: FinetuneTask, f: ValueFunction, paths: Mapping[str, Tensor], path: str | Path, *, grid: int = 13
) -> Path:
    """Draw f and the true metric on the plane that best fits the paths (paper, Fig. 1 and S2).

    Args:
        task: Its metric is evaluated ``grid * grid`` times; give it its own ledger (`FinetuneTask.judged_by`).
        f: The value function.
        paths: Visited phi by method, ``(T + 1) x d`` each.
        path: The PNG file.
        grid: Points along each side.
    """
    visited = torch.cat(list(paths.values()))
    plane = torch.linalg.svd(visited.double(), full_matrices=False)[2][:2].to(visited)
    flat = {name: (points @ plane.T).cpu() for name, points in paths.items()}
    everything = torch.cat(list(flat.values()))
    low, high = everything.amin(0), everything.amax(0)
    margin = 0.25 * float((high - low).max()) or 0.1
    axis = [torch.linspace(float(low[i]) - margin, float(high[i]) + margin, grid) for i in range(2)]
    mesh = torch.stack(torch.meshgrid(*axis, indexing="xy"), -1)
    points = mesh.to(visited) @ plane
    with torch.no_grad():
        predicted = _values(task.metric, f(points).cpu())
    costs = [task.evaluate(phi, "picture").cost for phi in points.flatten(0, 1)]
    true = _values(task.metric, torch.tensor(costs, dtype=torch.float64).view(grid, grid))
    figure, panels = new_figure(9.4, 4.0, 1, 2, sharex=True, sharey=True)
    for axes, values, title in zip(panels.flat, (predicted, true), ("value function", "true metric"), strict=True):
        filled = axes.contourf(axis[0], axis[1], values, levels=14, cmap="viridis")
        figure.colorbar(filled, ax=axes, label=task.metric.name)
        for name, line in flat.items():
            axes.plot(line[:, 0], line[:, 1], color="white", linewidth=3.2)
            axes.plot(line[:, 0], line[:, 1], color=METHODS[name].colour, linewidth=1.8, label=METHODS[name].title)
            axes.plot(line[-1, 0], line[-1, 1], "o", color=METHODS[name].colour, markeredgecolor="white", markersize=7)
        axes.plot(0, 0, "s", color="white", markeredgecolor="black", markersize=6)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("first direction of the paths")
    panels[0, 0].set_ylabel("second direction")
    panels[0, 0].legend(fontsize=8, loc="best")
    key = "square: phi = 0; dots: ends of the paths; each panel has its own colours"
    figure.suptitle(f"plane in phi that best fits the paths; {key}", fontsize=9)
    return save_figure(figure, path)


def _values(metric: Any, costs: Tensor) -> Any:
    return metric.sign * costs.double().numpy()


if __name__ == "__main__":
    main()
