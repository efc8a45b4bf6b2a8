"""A retrieval experiment's test error, on digits whose test part has half of the classes."""

import math
import statistics
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn
from torch.nn.functional import normalize

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from helpers.refusals import assert_refused
from metricopt_ext.adapters.start import Start
from metricopt_ext.data.labelled import Split
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.experiment import WHITENINGS, RetrievalExperiment
from metricopt_ext.retrieval.few_classes import FewClasses, error_over_classes
from metricopt_ext.retrieval.named_metric import embed_with
from metricopt_ext.retrieval.recall import hits_at_k, recall_metric
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.config import load_config

DIGITS = Path(__file__).parents[2] / "configs" / "retrieval" / "digits.yaml"
TINY = ["model.epochs=1", "model.width=4", "model.embedding=6", "adapter.dim=3", "device=cpu", "metric.ks=[1]"]


def test_the_error_of_a_recalls_difference_is_that_of_whole_classes(tmp_path: Path) -> None:
    """The classes being about equal in size, it is that of the mean of their differences."""
    config = load_config(RetrievalConfig, DIGITS, [*TINY, "data.fractions=[0.3,0.2,0.5]"])
    experiment = RetrievalExperiment(config, tmp_path, 3)
    task, part = experiment.task, experiment.splits.test
    before, after = (Start(phi) for phi in (task.origin(), task.starts(1.0, 0, [0])[0]))
    hits = [
        hits_at_k(normalize(embed_with(task.adapter, each.phi, part.x)), part.y, (1,))[1][:, 0]
        for each in (before, after)
    ]
    change = hits[1].astype(float) - hits[0]
    means = [float(change[(part.y == label).numpy()].mean()) for label in part.y.unique()]
    assert len(means) == 5
    expected = statistics.stdev(means) / math.sqrt(5)
    assert expected > 0.001
    assert experiment.test_error(before, after) == pytest.approx(expected, rel=0.2)  # 200 resamples: ± 5%
    assert experiment.test_error(before, before) == 0
    some = [*range(8), int((part.y != part.y[0]).nonzero()[0])]
    labels = torch.tensor([0] * 8 + [1])  # the single image of a class is no query
    experiment.splits = replace(experiment.splits, test=Split(part.x[some], labels))
    assert experiment.test_error(before, after) is None


def test_the_error_of_another_metric_is_that_of_classes_left_out(tmp_path: Path) -> None:
    """Each of five classes is a group; the metric is the mean of the first coordinate, weighed by nothing."""
    (tmp_path / "own_first_coordinate.py").write_text(
        "def mean(embeddings, labels):\n    return embeddings[:, 0].mean()\n"
    )
    own = ["metric.name=own_first_coordinate:mean", f"metric.folder={tmp_path}", "metric.bounds=[-100,100]"]
    config = load_config(RetrievalConfig, DIGITS, [*TINY, *own, "data.fractions=[0.3,0.2,0.5]"])
    experiment = RetrievalExperiment(config, tmp_path, 3)
    task, part = experiment.task, experiment.splits.test
    before, after = (Start(phi) for phi in (task.origin(), task.starts(1.0, 0, [0])[0]))
    first = [normalize(embed_with(task.adapter, each.phi, part.x))[:, 0].double() for each in (before, after)]
    change = first[1] - first[0]
    rest = [float(change[part.y != label].mean()) for label in part.y.unique()]
    expected = math.sqrt(4 / 5 * sum((each - statistics.mean(rest)) ** 2 for each in rest))
    assert expected > 0.001
    assert experiment.test_error(before, after) == pytest.approx(expected, rel=1e-3)
    assert experiment.test_error(before, before) == 0
    experiment.splits = replace(experiment.splits, test=Split(part.x[:4], torch.tensor([0, 0, 1, 1])))
    assert experiment.test_error(before, after) is None


def test_a_whitening_is_left_out_where_validation_images_are_too_few(tmp_path: Path) -> None:
    lines: list[str] = []

    class Saying(Callback):
        def say(self, line: str) -> None:
            lines.append(line)

    def tuned(*overrides: str) -> tuple[str, ...]:
        tiny = [*TINY, "data.fractions=[0.3,0.2,0.5]", "seed=3", *overrides]
        config = load_config(RetrievalConfig, DIGITS, tiny)
        return RetrievalExperiment(config, tmp_path / str(len(lines)), 3, Saying()).settings.alone

    assert "whitening" in tuned()
    assert not any("whitening" in line for line in lines)
    assert tuned("model.embedding=400") == ("augmentation",)
    assert [line for line in lines if "whitening" in line and "too few for 400 dimensions" in line]


SPLIT = "data.fractions=[0.3,0.2,0.5]"
WITHIN = {"whitening": 0.75, "covariance": "within"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"whitening": {"whitening": 0.5}, "whitening+batchnorm": {"whitening": 0.5}}),
        (["starts=[batchnorm]"], {"batchnorm": {}}),
        (["starts=[]"], {}),
        (["starts=[batchnorm,lda_whitening]"], {"lda_whitening": WITHIN, "lda_whitening+batchnorm": WITHIN}),
        (["model.embedding=400"], {"batchnorm": {}}),  # too few images to whiten
    ],
)
def test_what_a_search_begins_with(overrides: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    """A whitening is presumed; what else there is has it too."""
    made = RetrievalExperiment(load_config(RetrievalConfig, DIGITS, [*TINY, SPLIT, *overrides]), tmp_path, 3)
    starts = made.starts()
    assert {name: dict(each.settings) for name, each in starts.items() if isinstance(each, Start)} == expected
    assert [name for name, each in starts.items() if each.presumed] == [name for name in starts if name in WHITENINGS]
    for name, each in starts.items():
        assert bool(each.tensors) == name.endswith("batchnorm")
        assert not each.phi.any()


@pytest.mark.parametrize("part", ["validation", "test"])
def test_a_whitening_is_of_validation_images_before_the_embedder_scales_them(part: str, tmp_path: Path) -> None:
    """Against scikit-learn: components over the root of their deviation, of what the trunk gives, at any phi."""
    made = RetrievalExperiment(load_config(RetrievalConfig, DIGITS, [*TINY, SPLIT]), tmp_path, 3)
    task = made.task if part == "validation" else made.task.judged_by(made.test_metric)
    phi = task.starts(1.0, 0, [0])[0]
    start, of = replace(made.starts()["whitening"], phi=phi), getattr(made.splits, part)
    pca = PCA().fit(embed_with(task.adapter, phi, made.splits.validation.x).double().numpy())
    whitened = pca.transform(embed_with(task.adapter, phi, of.x).double().numpy()) / pca.explained_variance_**0.25
    expected = hits_at_k(torch.from_numpy(whitened / np.linalg.norm(whitened, axis=1)[:, None]), of.y, (1,))[1].mean()
    assert task.evaluate(start, "test").value == pytest.approx(expected, abs=2 / len(of))  # what is near in float32
    assert abs(task.evaluate(Start(phi), "test").value - expected) > 4 / len(of)


def test_a_holdout_that_the_settings_do_not_reach_is_refused(tmp_path: Path) -> None:
    made = RetrievalExperiment(load_config(RetrievalConfig, DIGITS, [*TINY, SPLIT]), tmp_path, 3)
    holdout = recall_metric([(made.splits.test.x, made.splits.test.y)], ks=(1,))
    assert_refused(lambda: optimize_metric(made.task, queries=20, holdout=holdout), ValueError, "holdout", "settings")


def divided(values: torch.Tensor) -> list[tuple[float, float]]:
    """A mean over classes on each division of them into halves."""
    count = len(values)
    halves = [set(first) for first in combinations(range(count), count // 2) if 0 in first]
    return [(float(values[list(a)].mean()), float(values[list(set(range(count)) - a)].mean())) for a in halves]


def test_over_all_divisions_it_is_the_standard_error_of_the_mean_over_classes() -> None:
    values = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = Evaluation(float(values.mean()), pairs=tuple(divided(values)))
    assert error_over_classes(start) == pytest.approx(float(values.std()) / 8**0.5, rel=1e-12)
    assert error_over_classes(Evaluation(0.5, pairs=((0.4, 0.6),))) == pytest.approx(0.1)
    assert error_over_classes(Evaluation(0.5)) is None


def test_it_is_said_at_the_first_query_alone_in_the_metrics_units() -> None:
    values = 50 + torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lines: list[str] = []
    answers = lambda: (float(values.mean()), divided(values))  # noqa: E731
    metric = Metric(answers, maximize=True, bounds=(0, 100), name="recall", new_classes=True)
    metric.callbacks.append(FewClasses(metric, lambda: 8, lines.append, confidence=0.9))
    for _ in range(2):
        metric.evaluate(nn.Identity(), "x")
    error, needed = float(values.std()) / 8**0.5, NormalDist().inv_cdf(0.9)
    (line,) = lines
    assert all(each in line for each in (f"{float(values.mean()):.4f}", f"{error:.4f}", "8", f"{needed * error:.4f}"))
