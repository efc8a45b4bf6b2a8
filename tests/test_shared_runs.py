"""Runs that several ranks share are bit for bit what one process returns; tests/test_faults.py kills such ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SCRIPT = """
import os, sys
from contextlib import contextmanager
from pathlib import Path
import torch
from torch import nn
import metricopt_ext as mo
from metricopt_ext.methods.starts import batchnorm_line
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.methods.paper.recipe import Algorithm1
from metricopt_ext.methods.paper.recipe import Recipe
from metricopt_ext.methods.paper.joint import AlgorithmS1
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Setting, Settings
from metricopt_ext.tasks.task import FinetuneTask, OutputLoss
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.value.learning import NeuralLearner

torch.set_num_threads(1)
out = Path(sys.argv[1])
STRATEGIES = {
    "search": (None, 45),
    "assessed": (None, 45),
    "holdout": (None, 45),
    "settings": (None, 45),
    "lines": (None, 45),
    "outcomes": (None, 45),
    "recipe": (Recipe(steps=6, evals=3, rounds=2, folds=2, trials=1, learner=NeuralLearner(iterations=20)), 62),
    "paper": (Algorithm1(steps=6, evals=3), 40),
    "learned": (AlgorithmS1(steps=6, evals=3, tasks=2, pairs=2, hidden=4), 40),
    "cma_es": (CMAES(), 45),
    "guided_es": (GuidedES(), 45),
}

x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
y = torch.randint(3, (90,), generator=torch.Generator().manual_seed(1))
asked = shift = 0

@contextmanager
def apply(values):
    global shift
    shift = values["shift"]
    try:
        yield
    finally:
        shift = 0

def score(model):
    global asked
    asked += 1
    right = (model(x).argmax(1) == (y + shift) % 3).double() + 0.3 * model(x).softmax(1)[:, 0].double().sigmoid()
    return float(right.mean()), (float(right[::2].mean()), float(right[1::2].mean()))

def scores(model):
    global asked
    asked += 1
    own = model(x).softmax(1).gather(1, y[:, None])[:, 0].double()
    every = [{str(at): float(own[rows][y[rows] == at].mean()) for at in range(3)} for rows in (slice(None), ODD, EVEN)]
    return every[0], every[1:]

ODD, EVEN = slice(1, None, 2), slice(0, None, 2)
OF_CLASSES = {str(at): [(part, torch.full((len(part),), at)) for part in x[y == at].split(20)] for at in range(2)}

def aside(model):
    return float((model(x).argmax(1) == y)[::3].double().mean())

METRICS = {"outcomes": scores, "holdout": lambda model: score(model)[0]}  # without halves any gain is kept

def run(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    task = FinetuneTask(
        attach_film(model, "1", dim=6, seed=0),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=TensorBatches(x, y, batch_size=30),
        metric=Metric(
            METRICS.get(name, score), maximize=True, bounds=(0, 2), name="score",
            combine="worst" if name == "outcomes" else None,
        ),
        batches_of=OF_CLASSES if name == "outcomes" else None,
        population=3,
        settings=Settings([Setting("shift", values=(0, 1, 2), default=0)], apply) if name == "settings" else None,
    )
    strategy, queries = STRATEGIES[name]
    starts = None
    if name == "lines":  # of statistics, each on a model of its own, and of phi
        along = mo.StartLine(lambda t: mo.Start(t * torch.ones_like(task.origin())), -1.0, 1.0)
        starts = {"statistics": batchnorm_line(task, mo.batchnorm_start(task, [2 * x + 1])), "along": along}
    first = name == "assessed" and mo.assess(task, 11, seed=1, output_dir=out / name, callback=Callback())
    run = mo.optimize_metric(
        task, queries=queries, strategy=strategy, starts=starts, seed=1, output_dir=out / name, callback=Callback(),
        resume=bool(first),
        holdout=Metric(aside, maximize=True, name="aside") if name == "holdout" else None,
    )
    kept = {"phi": task.adapter.phi.detach(), "before": run.before, "after": run.after, "best": run.best,
            "queries": run.queries, "spent": task.metric.ledger.spent_on, "text": str(run), "aside": run.holdout,
            "settings": run.settings and (run.settings.changes, run.settings.tried),
            "advice": first and first.lines()[1], **{f"end {name}": end for name, end in run.ends.items()}}
    fit = getattr(run, "fit", None)
    if fit is not None:
        kept |= {f"f {name}": value for name, value in fit.f.state_dict().items()}
        kept |= {"quality": repr(fit.f.quality), "predicted": fit.predicted}
    if name == "learned":
        kept |= {"path": run.path, "rule": run.rule.weights.detach()}
    return kept

with errors_in_one_line(keeps=out), distributed.joined():
    ends = {name: run(name) for name in STRATEGIES}
    torch.save({"ends": ends, "asked": asked}, out / f"{os.environ['RANK']}.pt")
"""


def assert_same(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for name, value in a.items():
            assert_same(value, b[name], f"{where} {name}")
    else:
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, where


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_ranks(forked: Any, tmp_path: Path) -> None:
    def results(world: int) -> tuple[list[Any], dict[str, bytes]]:
        folder = tmp_path / str(world)
        folder.mkdir()
        forked(SCRIPT, world, str(folder))
        ends = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
        return ends, files

    (alone,), files = results(1)
    assert alone["ends"]["holdout"]["aside"].keys() == {"start", "search"}
    # Adapters, functions, the trajectories of recipe, paper and learned; the learned optimizer.
    assert len(files) == 11 + 9 + 16 + 12 + 10 + 1
    changed, tried = alone["ends"]["settings"]["settings"]
    assert changed.keys() == {"shift"}
    assert len(tried) == 3
    search, assessed = ({**alone["ends"][name], "advice": ""} for name in ("search", "assessed"))
    assert_same(search, assessed)
    for world in (2, 4):
        shared, same_files = results(world)
        for each in shared:
            assert_same(alone["ends"], each["ends"])
        assert same_files == files
        # They share the searches: each has its part, and all ask for a run's first value, which they compare; the first
        # one learns alone. The assessment is a run of its own.
        searches = len(alone["ends"]) + 1 - len({"recipe", "paper", "learned"})
        assert sum(each["asked"] for each in shared) == alone["asked"] + (world - 1) * searches
        assert min(each["asked"] for each in shared) > alone["asked"] / world / 2
