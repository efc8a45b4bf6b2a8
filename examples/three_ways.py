"""The same job three ways: CMA-ES, Optuna and ours tune a trained model for balanced accuracy on long-tailed digits."""

import argparse
import copy
import time
from collections.abc import Callable
from statistics import mean, stdev

import cma
import numpy as np
import optuna
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import metricopt_ext as mo

HIDDEN, FILM, CLASSES = 64, 16, 10  # 16 numbers move the norm, 10 the logits


class Job:
    """A trained model, and what it is judged by on validation and on test."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        x, y = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
        x = x.float() / 16
        x, x_test, y, self.y_test = train_test_split(x, y, test_size=0.4, stratify=y, random_state=seed)
        x, x_val, y, self.y_val = train_test_split(x, y, test_size=0.4, stratify=y, random_state=seed)
        kept = torch.rand(len(y)) < 0.65**y  # a long tail: few nines, many zeros
        self.x_test, self.x_val, self.x, self.y, self.seed = x_test, x_val, x[kept], y[kept], seed
        self.model = nn.Sequential(nn.Linear(64, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.x), self.y).backward()
            optimizer.step()
        self.model.eval().requires_grad_(False)

    def validate(self, model: nn.Module) -> float:
        return float(balanced_accuracy_score(self.y_val, model(self.x_val).argmax(1)))

    def test(self, model: nn.Module) -> float:
        return float(balanced_accuracy_score(self.y_test, model(self.x_test).argmax(1)))

    def moved(self, z: np.ndarray) -> nn.Module:
        """Return a copy of the model, moved by 26 numbers along fixed random directions: for CMA-ES and Optuna."""
        rng = torch.Generator().manual_seed(self.seed)
        scale, shift = torch.randn(2, HIDDEN, FILM, generator=rng) / FILM**0.5
        film, offsets = torch.from_numpy(np.asarray(z)).float().split([FILM, CLASSES])
        model = copy.deepcopy(self.model)
        model[1].weight.mul_(1 + scale @ film)
        model[1].bias.mul_(1 + scale @ film).add_(shift @ film)
        model[3].bias.add_(offsets)
        return model


def by_cma(job: Job, queries: int) -> tuple[nn.Module, str]:
    options = {"seed": job.seed or 1, "maxfevals": queries, "verbose": -9}  # 0 would be the clock
    search = cma.CMAEvolutionStrategy(np.zeros(FILM + CLASSES), 0.3, options)
    best, z_best = job.validate(job.model), np.zeros(FILM + CLASSES)
    left = queries - 1
    while left > 0:
        points = search.ask()
        values = [job.validate(job.moved(z)) for z in points[:left]]
        left -= len(values)
        if len(values) == len(points):
            search.tell(points, [-value for value in values])
        if max(values) > best:
            best, z_best = max(values), points[int(np.argmax(values))]
    return job.moved(z_best), "-"


def by_tpe(job: Job, queries: int) -> tuple[nn.Module, str]:
    def objective(trial: optuna.Trial) -> float:
        return job.validate(job.moved([trial.suggest_float(f"z{i}", -1, 1) for i in range(FILM + CLASSES)]))

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=job.seed))
    study.enqueue_trial({f"z{i}": 0.0 for i in range(FILM + CLASSES)})  # the model as it is
    study.optimize(objective, n_trials=queries)
    return job.moved([study.best_params[f"z{i}"] for i in range(FILM + CLASSES)]), "-"


def by_search(job: Job, queries: int) -> tuple[nn.Module, str]:
    def score(model: nn.Module) -> tuple[float, list[float]]:
        found = model(job.x_val).argmax(1)
        halves = [balanced_accuracy_score(job.y_val[i::2], found[i::2]) for i in (0, 1)]
        return balanced_accuracy_score(job.y_val, found), halves

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    adapter = mo.attach_film(copy.deepcopy(job.model), dim=FILM, outputs=mo.Outputs())
    batches = mo.TensorBatches(job.x, job.y, batch_size=64)
    task = mo.FinetuneTask(adapter, loss=loss, batches=batches, metric=mo.Metric(score, maximize=True))
    result = mo.optimize_metric(task, queries=queries, seed=job.seed)
    adapter.merge()
    return adapter.model, f"kept {result.chosen}"


WAYS: dict[str, Callable[[Job, int], tuple[nn.Module, str]]] = {
    "CMA-ES": by_cma,
    "Optuna, TPE": by_tpe,
    "optimize_metric": by_search,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows: dict[str, list[tuple[float, float, float, str]]] = {}
    for job in map(Job, args.seeds):
        rows.setdefault("the trained model", []).append((0.0, job.validate(job.model), job.test(job.model), "-"))
        for name, way in WAYS.items():
            began = time.perf_counter()
            model, guard = way(job, args.queries)
            seconds = time.perf_counter() - began
            rows.setdefault(name, []).append((seconds, job.validate(model), job.test(model), guard))
    print("| way | queries | seconds | validation | test | test by seed | guard |\n|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        seconds, validation, test, guards = zip(*row, strict=True)
        spread = f" ± {stdev(test):.4f}" if len(test) > 1 else ""
        queries, by_seed = args.queries if name in WAYS else 0, ", ".join(f"{each:.3f}" for each in test)
        said = ", ".join(f"{each} {guards.count(each)} of {len(guards)}" for each in sorted({*guards} - {"-"})) or "-"
        print(f"| {name} | {queries} | {mean(seconds):.1f} | {mean(validation):.4f}", end="")
        print(f" | {mean(test):.4f}{spread} | {by_seed} | {said} |")
