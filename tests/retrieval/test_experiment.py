"""A retrieval experiment's test error, on digits whose test part has half of the classes."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from metricopt_ext.data.halves import class_draws
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.experiment import State
from metricopt_ext.experiment.method import Started
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.experiment import RetrievalExperiment
from metricopt_ext.retrieval.named_metric import embed_with
from metricopt_ext.retrieval.recall import hits_at_k, recall_at_k
from metricopt_ext.retrieval.whitening_start import whitened
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.utils.config import load_config

DIGITS = Path(__file__).parents[2] / "configs" / "retrieval" / "digits.yaml"
TINY = ["model.epochs=1", "model.width=4", "model.embedding=6", "adapter.dim=3", "device=cpu", "metric.ks=[1]"]


def test_the_error_of_a_recalls_difference_is_that_of_whole_classes(tmp_path: Path) -> None:
    """The classes being about equal in size, it is that of the mean of their differences."""
    config = load_config(RetrievalConfig, DIGITS, [*TINY, "data.fractions=[0.3,0.2,0.5]"])
    experiment = RetrievalExperiment(config, tmp_path, 3)
    task, part = experiment.task, experiment.splits.test
    before, after = (State(task, phi) for phi in (task.origin(), task.starts(1.0, 0, [0])[0]))
    hits = [hits_at_k(embed_with(task.adapter, phi, part.x), part.y, (1,))[1][:, 0] for _, phi in (before, after)]
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


def test_a_population_is_chosen_where_none_is_given(tmp_path: Path) -> None:
    def population(*overrides: str) -> Any:
        config = load_config(RetrievalConfig, DIGITS, [*TINY, *overrides])
        config.check()
        return RetrievalExperiment(config, tmp_path, 3).task.population

    assert population() == 1
    assert population("population=null") == 32


def test_it_says_how_many_classes_there_are_before_the_first_query_and_what_they_can_tell_at_it(tmp_path: Path) -> None:
    lines: list[str] = []

    class Saying(Callback):
        def say(self, line: str) -> None:
            lines.append(line)

    config = load_config(RetrievalConfig, DIGITS, [*TINY, "data.fractions=[0.3,0.4,0.3]", "seed=3"])
    experiment = RetrievalExperiment(config, tmp_path, 3, Saying())
    task = experiment.task
    assert task.metric.new_classes
    assert not experiment.test_metric.new_classes
    assert "validation has 4 classes; test has other classes" in lines
    assert task.metric.ledger.spent == 0
    said = len(lines)
    start = task.evaluate(task.origin(), "test")
    assert len(start.pairs) == 3  # of four classes there are no more
    part, z = experiment.splits.validation, embed_with(task.adapter, task.origin(), experiment.splits.validation.x)
    for costs, halves in zip(start.pairs, class_draws(part.y, 3), strict=True):
        assert costs == tuple(1 - recall_at_k(z[half], part.y[half], (1,)).mean for half in halves)  # type: ignore[index]
    task.evaluate(task.origin(), "test")
    (line,) = lines[said:]
    assert line.startswith(f"Recall@1 is {1 - start.cost:.4f} at first, with a standard error of ")
    assert " over 4 classes; " in line


def test_the_error_of_another_metric_is_that_of_classes_left_out(tmp_path: Path) -> None:
    """Each of five classes is a group; the metric is the mean of the first coordinate, weighed by nothing."""
    (tmp_path / "own_first_coordinate.py").write_text(
        "def mean(embeddings, labels):\n    return embeddings[:, 0].mean()\n"
    )
    own = ["metric.name=own_first_coordinate:mean", f"metric.folder={tmp_path}", "metric.bounds=[-100,100]"]
    config = load_config(RetrievalConfig, DIGITS, [*TINY, *own, "data.fractions=[0.3,0.2,0.5]"])
    experiment = RetrievalExperiment(config, tmp_path, 3)
    task, part = experiment.task, experiment.splits.test
    before, after = (State(task, phi) for phi in (task.origin(), task.starts(1.0, 0, [0])[0]))
    first = [embed_with(task.adapter, phi, part.x)[:, 0].double() for _, phi in (before, after)]
    change = first[1] - first[0]
    rest = [float(change[part.y != label].mean()) for label in part.y.unique()]
    expected = math.sqrt(4 / 5 * sum((each - statistics.mean(rest)) ** 2 for each in rest))
    assert expected > 0.001
    assert experiment.test_error(before, after) == pytest.approx(expected, rel=1e-3)
    assert experiment.test_error(before, before) == 0
    experiment.splits = replace(experiment.splits, test=Split(part.x[:4], torch.tensor([0, 0, 1, 1])))
    assert experiment.test_error(before, after) is None


def test_a_k_beyond_the_images_is_refused_before_training(tmp_path: Path) -> None:
    config = load_config(RetrievalConfig, DIGITS, [*TINY, "metric.ks=[1,5000]"])
    assert_refused(lambda: RetrievalExperiment(config, tmp_path, 3).task, ConfigError, "metric.ks=[1, 5000]")
    assert not list(tmp_path.iterdir())


def test_a_soup_is_a_start_where_it_is_asked_for(tmp_path: Path) -> None:
    config = load_config(RetrievalConfig, DIGITS, [*TINY, "starts=[soup,soup_batchnorm]"])
    config.check()
    experiment = RetrievalExperiment(config, tmp_path, 3)
    starts = experiment.starts()
    assert list(starts) == ["soup", "soup_batchnorm"]
    assert len(list((tmp_path / "soup").glob("finetune-?.safetensors"))) == 6
    assert all(parameters for parameters in (each.parameters for each in starts.values()))
    training, part = experiment.training(), experiment.splits.train
    assert training.rebalanced is None
    assert training.augment is not None
    batches = experiment.task.batches
    assert training.steps == max(1, len(part) // (batches.classes * batches.samples))


def test_a_whitening_is_left_out_where_validation_images_are_too_few(tmp_path: Path) -> None:
    lines: list[str] = []

    class Saying(Callback):
        def say(self, line: str) -> None:
            lines.append(line)

    def names(*overrides: str) -> tuple[str, ...]:
        tiny = [*TINY, "data.fractions=[0.3,0.2,0.5]", "seed=3", *overrides]
        config = load_config(RetrievalConfig, DIGITS, tiny)
        return RetrievalExperiment(config, tmp_path / str(len(lines)), 3, Saying()).settings.names

    assert "whitening" in names()
    assert not any("whitening" in line for line in lines)
    assert names("model.embedding=400") == ("augmentation",)
    assert [line for line in lines if "whitening" in line and "too few for 400 dimensions" in line]


def test_labels_are_held_out_by_class_or_within_few_and_whitenings_end_a_comparisons_rows(tmp_path: Path) -> None:
    config = load_config(RetrievalConfig, DIGITS, [*TINY, "data.fractions=[0.2,0.3,0.5]"])
    experiment = RetrievalExperiment(config, tmp_path, 3)
    few = experiment.label_parts()
    own = experiment.splits.validation.y.unique().tolist()
    assert few.fit(3, 0, 0)[1].unique().tolist() == own
    y = torch.arange(9).repeat_interleave(10)
    part = Split(torch.rand(90, *experiment.splits.validation.x.shape[1:]), y)
    experiment.splits = replace(experiment.splits, validation=part)
    many = experiment.label_parts()
    fitted, whole = (
        torch.cat([batches(3, 0, step)[1] for step in range(20)]).unique() for batches in (many.fit, many.whole)
    )
    assert (len(fitted), len(whole)) == (6, 9)
    baselines = experiment.baselines(config, experiment)
    for name, labels in (("whitening", None), ("lda_whitening", y)):
        (reached, _) = baselines[name].run(experiment.task, Started.at(experiment.task.origin()), [5, 9], 3)
        expected = whitened(experiment.task, experiment.validation()[0], labels)
        assert torch.equal(reached.end(part.x), expected(part.x))
        assert reached.queries == 0
