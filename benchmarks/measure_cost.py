"""Measure what metricopt costs, as ratios of times taken side by side in one run.

    python benchmarks/measure_cost.py --output-dir out/cost

Three tables: a finetuning step with MetricOpt against one with a plain loss optimizer, a population of phi computed
together against one by one, and a fit of a guided search's f against gpytorch's. The sides take turns (A B A B ...), so
any other load on the machine affects all equally. Writes cost.json and cost.md. A missed target is a result, not an
error.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import quantile_test
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias
from metricopt_ext.classification.losses import classification_loss
from metricopt_ext.classification.models import build_model
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.style import markdown_table, print_table
from metricopt_ext.search.optimizer import MetricOpt
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.utils.files import write_atomically, write_json
from metricopt_ext.utils.machine import processor
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.utils.versions import versions
from metricopt_ext.value.fitting import fit_value_function
from metricopt_ext.value.gp import GPLearner, Spectrum
from metricopt_ext.value.learning import NeuralLearner
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import ValueFunction

FEWEST_REPEATS = 6  # fewer pairs have no 95% interval for a median
WARM_UP = 3  # also fills MetricOpt's history of loss gradients
HEADER = ["time of", "over time of", "ratio", "95% interval", "target", ""]


@dataclass(frozen=True)
class Ratio:
    """How many times as long one thing takes as another.

    Attributes:
        of: What is timed.
        over: What it is compared with.
        ratios: Quotient of the two times, one for each repeat, at least `FEWEST_REPEATS`.
        at_most: Target for the ratio, None for none.
        at_least: The same, from below.
    """

    of: str
    over: str
    ratios: list[float]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        """The median ratio."""
        return float(np.median(self.ratios))

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the median, from the ranks of the ratios (binomial; it assumes no distribution)."""
        low, high = quantile_test(self.ratios, q=self.median, p=0.5).confidence_interval()
        return float(low), float(high)

    @property
    def met(self) -> bool | None:
        """Whether the whole interval meets the target; None without a target."""
        low, high = self.interval
        if self.at_most is not None:
            return high <= self.at_most
        return None if self.at_least is None else low >= self.at_least

    def row(self) -> list[str]:
        """Return the cells under `HEADER`."""
        sign, target = ("<=", self.at_most) if self.at_most is not None else (">=", self.at_least)
        verdict = ["", ""] if target is None else [f"{sign} {target:.2f}", "met" if self.met else "missed"]
        return [self.of, self.over, f"{self.median:.3f}", "[{:.3f}, {:.3f}]".format(*self.interval), *verdict]

    def to_json(self) -> dict[str, Any]:
        """Return the ratio's entry in cost.json."""
        names = ("of", "over", "interval", "at_most", "at_least", "met")
        return {"ratio": self.median, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class Table:
    """Ratios measured together.

    Attributes:
        title: What was measured.
        note: What the sides are.
        seconds: Median time of each side, meaningless on another machine.
        rows: The ratios.
    """

    title: str
    note: str
    seconds: dict[str, float]
    rows: list[Ratio]

    def markdown(self) -> str:
        """Return the table between its title and its note."""
        lines = markdown_table(HEADER, [ratio.row() for ratio in self.rows])
        return "\n".join([f"## {self.title}", "", *lines, "", self.note, ""])

    def print(self) -> None:
        """Print the table, and the times below it."""
        print_table(HEADER, [ratio.row() for ratio in self.rows], title=self.title, left=2)
        print("; ".join(f"{side}: {1e3 * taken:.2f} ms" for side, taken in self.seconds.items()), end="\n\n")


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("--threads", type=int, default=1, help="torch's CPU threads (default: 1)")
    parser.add_argument("--repeats", type=int, default=100, help="turns of each side (default: 100)")
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"--threads is {arguments.threads}; it must be at least 1")
    if arguments.repeats < FEWEST_REPEATS:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least {FEWEST_REPEATS}")
    with errors_in_one_line(RuntimeError):
        run(arguments.output_dir, arguments.threads, arguments.repeats)


def run(folder: Path, threads: int, repeats: int) -> list[Table]:
    """Measure, print and write all tables; returns them."""
    print(f"{processor()}, --threads {threads}, --repeats {repeats}")
    with num_threads(threads):
        tables = [measure_step(repeats), measure_population(repeats), measure_fit(repeats)]
    for table in tables:
        table.print()
    written = write(tables, folder, threads, repeats)
    print("wrote", *written, sep="\n  ")
    return tables


def write(tables: list[Table], folder: Path, threads: int, repeats: int) -> list[Path]:
    """Write cost.json and cost.md, the latter without times; returns their paths."""
    paths = [folder / "cost.json", folder / "cost.md"]
    setting = {"processor": processor(), "threads": threads, "repeats": repeats, "versions": versions()}
    measured = [
        {"title": table.title, "seconds": table.seconds, "ratios": [ratio.to_json() for ratio in table.rows]}
        for table in tables
    ]
    write_json(paths[0], {**setting, "tables": measured})
    used = ", ".join(f"{package} {version}" for package, version in versions().items())
    text = [
        "# What metricopt costs\n",
        f"Made by `python benchmarks/measure_cost.py --output-dir FOLDER --threads {threads} --repeats {repeats}`:",
        f"medians of ratios of times, the sides taking turns, on {processor()} ({used}).",
        "A target is met if the whole interval meets it.\n",
        *(table.markdown() for table in tables),
    ]
    write_atomically(paths[1], ("\n".join(text).rstrip() + "\n").encode())
    return paths


def take_turns(sides: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, np.ndarray]:
    """Time each side in turn, A B A B ..., after `WARM_UP` turns that don't count.

    Args:
        sides: What to time; each is called with the number of the turn.
        repeats: Turns that count.

    Returns:
        Seconds that each side took, ``repeats``.
    """
    seconds = {name: np.zeros(WARM_UP + repeats) for name in sides}
    for turn in range(WARM_UP + repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side(turn)
            seconds[name][turn] = time.perf_counter() - start
    return {name: taken[WARM_UP:] for name, taken in seconds.items()}


def measure_step(
    repeats: int, *, model: str = "resnet18", pixels: int = 64, batch_size: int = 32, dim: int = 128
) -> Table:
    """Time a finetuning step of phi (forward, backward, optimizer step) with SGD and with MetricOpt.

    Raises:
        RuntimeError: MetricOpt did not follow f, so there would be nothing to measure.
    """
    adapter = attach_film(untrained(model, (3, pixels, pixels), 10), dim=dim)
    batches = random_batches((3, pixels, pixels), 10, batch_size)
    f = fitted_value_function(dim)
    plain, ours = torch.optim.SGD(adapter.parameters(), lr=0.1), MetricOpt(adapter.parameters(), f, lr=0.1)
    start = torch.zeros(dim)

    def loss_step(optimizer: torch.optim.Optimizer, turn: int) -> None:
        adapter.set_phi(start)
        optimizer.zero_grad()
        classification_loss(adapter.model, batches(0, 0, turn)).backward()
        optimizer.step()

    loss_step(plain, 0)
    check_followed(f, start, adapter.phi.grad)
    sgd, metricopt, alone = "step with SGD", "step with MetricOpt", "MetricOpt.step() alone"
    seconds = take_turns(
        {
            sgd: lambda turn: loss_step(plain, turn),
            alone: lambda turn: ours.step(),  # after SGD's: in a real loop too, the model has just emptied the caches
            metricopt: lambda turn: loss_step(ours, turn),
        },
        repeats,
    )
    return Table(
        f"Loss step of {model}, {batch_size} images of {pixels}x{pixels}, FiLM on its norms, d = {dim}",
        "A step is forward, backward to phi and the optimizer's own step. f is a `NeuralValueFunction` of"
        f" {f.members_count} members, fitted and trusted: MetricOpt follows it.",
        medians(seconds),
        [
            Ratio(metricopt, sgd, list(seconds[metricopt] / seconds[sgd]), at_most=1.1),
            Ratio(alone, sgd, list(seconds[alone] / seconds[sgd])),
        ],
    )


def measure_population(
    repeats: int, *, population: int = 32, features: int = 123, batch_size: int = 32, dim: int = 16
) -> Table:
    """Time losses and gradients of a population of phi of an MLP, together and one by one.

    One by one is measured in three ways: a loop over forward and backward, as written without metricopt, one call
    of `FinetuneTask.loss_and_gradient` for each phi, and one call for all with ``population=1``.

    Raises:
        RuntimeError: The sides computed different gradients.
    """
    adapter = attach_input_bias(untrained("tabular_mlp", (features,), 2), dim=dim)
    batches = random_batches((features,), 2, batch_size)
    tasks = list(range(population))

    def of_population(size: int) -> FinetuneTask:
        never_evaluated = Metric(lambda: 0.0, maximize=True)
        return FinetuneTask(adapter, loss=classification_loss, batches=batches, metric=never_evaluated, population=size)

    many, single = of_population(population), of_population(1)
    phi = many.starts(0.2, 0, tasks)

    def loop(turn: int) -> Tensor:
        return torch.stack([plain_gradient(adapter, phi[task], batches(0, task, turn)) for task in tasks])

    def calls(turn: int) -> Tensor:
        return torch.cat([many.loss_and_gradient(phi[task, None], 0, [task], turn)[1] for task in tasks])

    sides: dict[str, Callable[[int], Tensor]] = {
        "together": lambda turn: many.loss_and_gradient(phi, 0, tasks, turn)[1],
        "plain torch loop": loop,
        "one call for each phi": calls,
        "population=1": lambda turn: single.loss_and_gradient(phi, 0, tasks, turn)[1],
    }
    gradients = {name: side(0) for name, side in sides.items()}
    for name, gradient in gradients.items():
        if not torch.allclose(gradient, gradients["together"], rtol=1e-3, atol=1e-6):
            raise RuntimeError(f"{name} and together computed different gradients")
    seconds = take_turns(sides, repeats)
    together = seconds["together"]
    return Table(
        f"Losses and gradients of {population} phi, MLP on {features} inputs, {batch_size} examples each, d = {dim}",
        "Together: one call of `FinetuneTask.loss_and_gradient`, one forward by `torch.func.vmap`. One by one: a loop"
        " of forward and backward, as written without metricopt; one call of `loss_and_gradient` for each phi; one"
        " call for all with `population=1`. Every side draws the same batches and finds the same gradients.",
        medians(seconds),
        [Ratio(name, "together", list(seconds[name] / together), at_least=5) for name in sides if name != "together"],
    )


def measure_fit(repeats: int, *, points: int = 150, dim: int = 32) -> Table:
    """Time fits of a Gaussian process to the queries of a search, hyper-parameters included.

    Raises:
        RuntimeError: A side did not fit: it explains less than half of the costs' variance.
    """
    phi, cost = queried(points, dim)
    learner = GPLearner(1.0, Spectrum(2.0 ** -torch.arange(dim, dtype=torch.float64), torch.eye(dim).double()))
    sides: dict[str, Callable[[int], Callable[[Tensor], Tensor]]] = {
        "GPLearner": lambda turn: learner(phi, cost),
        "gpytorch": lambda turn: gpytorch_fit(phi, cost),
    }
    for name, side in sides.items():
        residual = cost - side(0)(phi).double()
        if not residual.var() < cost.var() / 2:
            raise RuntimeError(f"{name} explains only {1 - float(residual.var() / cost.var()):.0%} of the variance")
    seconds = take_turns(sides, repeats)
    return Table(
        f"Fit of f to {points} queries, d = {dim}",
        "GPLearner: the grid of hyper-parameters of a guided search, three strengths of the spectrum among them, and"
        " the fit itself. gpytorch: `ExactGP` with one length scale, by L-BFGS of at most 50 iterations from its"
        " defaults. A search chooses hyper-parameters anew whenever it has a quarter more queries.",
        medians(seconds),
        [Ratio("GPLearner", "gpytorch", list(seconds["GPLearner"] / seconds["gpytorch"]))],
    )


def queried(points: int, dim: int) -> tuple[Tensor, Tensor]:
    """Draw phi, ``n x d``, and smooth costs with noise of a twentieth of their spread, ``n``, float64."""
    rng = generator(0, "queries")
    phi = torch.randn(points, dim, generator=rng, dtype=torch.float64)
    weights = 2.0 ** -torch.arange(dim, dtype=torch.float64)
    cost = (phi * weights).sum(1).tanh() + (phi.square() * weights).sum(1) / 2
    return phi, cost + cost.std() / 20 * torch.randn(points, generator=rng, dtype=torch.float64)


def gpytorch_fit(phi: Tensor, cost: Tensor) -> Callable[[Tensor], Tensor]:
    """Fit gpytorch's exact Gaussian process to points, ``n x d``, and costs, ``n``; returns its posterior mean."""
    import gpytorch

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(phi, target, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    target = (cost - cost.mean()) / cost.std()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Model().double()
    likelihood_of = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = -likelihood_of(model(phi), target)
        loss.backward()
        return loss

    model.train()
    optimizer.step(closure)
    model.eval()

    @torch.no_grad()
    def mean(x: Tensor) -> Tensor:
        with gpytorch.settings.debug(False):  # warns where x are the points that it was fitted to
            predicted: Tensor = model(x).mean
        return cost.mean() + cost.std() * predicted

    return mean


def untrained(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a classifier with seeded random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_model(name, torch.Size(shape), classes)


def random_batches(shape: tuple[int, ...], classes: int, batch_size: int) -> TensorBatches:
    """Draw batches from 512 random examples."""
    rng = generator(0, "examples")
    return TensorBatches(
        torch.randn(512, *shape, generator=rng), torch.randint(classes, (512,), generator=rng), batch_size
    )


def fitted_value_function(dim: int) -> ValueFunction:
    """Fit the paper's MLP to the cost (1 + tanh phi_1 / s) / 2 along 60 random trajectories of length s."""
    rng = generator(0, "observations")
    trajectories = []
    for index in range(60):
        ends = torch.randn(2, dim, generator=rng)
        phi = torch.lerp(ends[0], ends[1], torch.linspace(0, 1, 8)[:, None])
        told = tuple(map(Evaluation, ((1 + phi[:, 0].tanh()) / 2).tolist()))
        trajectories.append(Trajectory(0, index, phi, torch.zeros(7), torch.arange(8), told))
    return fit_value_function(Observations.of(trajectories), NeuralLearner(iterations=200)).f


def check_followed(f: ValueFunction, start: Tensor, loss_gradient: Tensor | None) -> None:
    """Take one step of MetricOpt without a loss step: phi, ``d``, must move to where f is lower.

    Raises:
        RuntimeError: It does not.
    """
    phi = nn.Parameter(start.clone())
    phi.grad = loss_gradient
    MetricOpt([phi], f, lr=0.0).step()
    if not f(phi) < f(start):
        raise RuntimeError(f"MetricOpt did not follow f, whose quality is {f.quality}")


def plain_gradient(adapter: Adapter, phi: Tensor, batch: Any) -> Tensor:
    """Return the loss gradient at one phi, ``d``, by forward and backward."""
    adapter.set_phi(phi)
    adapter.phi.grad = None
    classification_loss(adapter.model, batch).backward()
    assert adapter.phi.grad is not None
    return adapter.phi.grad


def medians(seconds: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the median time of each side."""
    return {name: float(np.median(taken)) for name, taken in seconds.items()}


if __name__ == "__main__":
    main()
