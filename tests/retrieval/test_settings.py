"""Settings of retrieval: what they do to what is judged, that nothing is left of them, and what is kept meanwhile."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning import losses, testers, trainers
from sklearn.decomposition import PCA

import metricopt_ext as mo
from helpers.networks import Counted
from helpers.refusals import assert_refused
from metricopt_ext.data.halves import class_draws
from metricopt_ext.data.labelled import Split
from metricopt_ext.retrieval.accuracy import RecallCalculator
from metricopt_ext.retrieval.config import MetricConfig
from metricopt_ext.retrieval.merge_whitening import merge_whitening
from metricopt_ext.retrieval.named_metric import build_metric
from metricopt_ext.retrieval.post_processing import PostProcessing, Whitening, augmented, post_processed
from metricopt_ext.retrieval.recall import recall_at_k, recall_metric, recalls_left_out, recalls_on_halves
from metricopt_ext.retrieval.search import trainer_task
from metricopt_ext.retrieval.settings import retrieval_settings
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric

N, CLASSES, KS = 96, 12, (1, 2, 4)


class Embedder(Counted):
    """Counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return self.layers(x)  # type: ignore[no-any-return]


def examples(seed: int, n: int = N) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % CLASSES
    centres = torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(9))
    loud = torch.tensor([1.0, 1.0, 1.0, 1.0, 4.0, 4.0])
    return centres[y] + 0.7 * loud * torch.randn(n, 6, generator=torch.Generator().manual_seed(seed)), y


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    x, y = examples(seed)
    return list(zip(x.split(40), y.split(40), strict=True))


def embeddings(model: nn.Module, seed: int) -> Tensor:
    with torch.no_grad():
        return model.eval()(examples(seed)[0])  # type: ignore[no-any-return]


def task_metric(**options: Any) -> Metric:
    return recall_metric(batches(0), ks=KS, **options)


def value(metric: Metric, model: nn.Module) -> float:
    return metric.evaluate(model, "test").value


# --- What is judged ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_a_whitening_is_fitted_on_what_it_is_given(power: float) -> None:
    model, metric = Embedder(), task_metric()
    x, y = embeddings(model, 0), examples(0)[1]
    before = metric.evaluate(model, "test")
    settings = retrieval_settings(metric, whiten_on=batches(1))
    with settings.applied({"whitening": power}):
        found = metric.evaluate(model, "test")
    pca = PCA().fit(embeddings(model, 1).double().numpy())
    white = pca.transform(x.double().numpy()) / pca.explained_variance_ ** (power / 2)
    white = white / np.linalg.norm(white, axis=1, keepdims=True)
    expected, pairs = recalls_on_halves(white, y, KS, class_draws(y, 0))  # type: ignore[arg-type]
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert len(found.pairs) == 8
    np.testing.assert_allclose(np.array(found.pairs), np.array(pairs), rtol=0, atol=1e-12)
    assert found.cost != before.cost
    assert metric.evaluate(model, "test") == before


def test_augmentation_makes_every_query_new() -> None:
    model, metric = Embedder(), task_metric()
    x, y = embeddings(model, 0), examples(0)[1]
    settings = retrieval_settings(metric, whiten_on=examples(1)[0])
    with settings.applied({"augmentation": 4}):
        found = metric.evaluate(model, "test")
    told = recalls_left_out(x, y, KS, class_draws(y, 0), 4, "l2")
    assert found == Evaluation(told, pairs=told.halves, sign=metric.sign)  # type: ignore[arg-type]
    values = settings.complete({"whitening": 1.0, **settings.presets["augmentation_8"]})
    assert values == {"whitening": 1.0, "covariance": "all", "augmentation": 8}


def test_of_a_gallery_alone() -> None:
    model = Embedder()
    metric = recall_metric(batches(0), ks=KS, gallery=batches(1), distance="cosine")
    plain = metric.evaluate(model, "test")
    settings = retrieval_settings(metric, whiten_on=batches(2))
    with settings.applied({"whitening": 0.5, "augmentation": 4}):
        found = value(metric, model)
    fitted, post = Whitening.of(embeddings(model, 2)), PostProcessing(whitening=0.5)
    queries, gallery = (post_processed(embeddings(model, seed), post, fitted) for seed in (0, 1))
    items = augmented(gallery, 4), examples(1)[1]
    assert found == pytest.approx(recall_at_k(queries, examples(0)[1], KS, gallery=items, distance="cosine").mean)
    assert metric.evaluate(model, "test") == plain


def test_what_a_metric_can_t_be_judged_by_is_refused() -> None:
    x, y = examples(0)
    metric = build_metric(MetricConfig("r_precision"), Split(x, y))
    assert retrieval_settings(metric, whiten_on=x).names == ("whitening", "covariance")
    queries = build_metric(MetricConfig("r_precision"), Split(x, y), queries=torch.arange(N) < 40)
    assert retrieval_settings(queries, whiten_on=x).presets == {
        "augmentation_4": {"augmentation": 4},
        "augmentation_8": {"augmentation": 8},
    }
    assert_refused(
        lambda: retrieval_settings(mo.Metric(lambda model: 0.5, maximize=True), whiten_on=x),
        ValueError,
        "recall_metric",
    )
    assert_refused(lambda: retrieval_settings(whiten_on=x), ValueError)


# --- What is kept ------------------------------------------------------------------------------------------------


def test_settings_alone_run_no_model_and_give_the_same_to_the_last_digit() -> None:
    model, metric = Embedder(), task_metric()
    settings = retrieval_settings(metric, whiten_on=batches(1))
    tried = [{}, {"whitening": 0.5}, {"whitening": 1.0, "augmentation": 8}]
    anew = []
    for values in tried:
        fresh = retrieval_settings(metric, whiten_on=batches(1))
        with fresh.applied(values):
            anew.append(metric.evaluate(Embedder(), "test"))
    assert len({each.cost for each in anew}) == len(tried)
    for values, expected in [*zip(tried, anew, strict=True)] * 2:
        with settings.applied(values):
            assert metric.evaluate(model, "test") == expected
    assert (settings.passes, model.runs) == (2, 6)  # over the metric's data and the whitening's, three batches each
    with torch.no_grad():
        model.layers[2].bias += 1.0
    with settings.applied({"whitening": 0.5}):
        metric.evaluate(model, "test")
    assert (settings.passes, model.runs) == (4, 12)
    metric.evaluate(model, "test")
    assert model.runs == 15  # nothing is kept where no settings are tuned


def test_what_values_do_goes_to_an_index_and_into_the_model() -> None:
    model, metric = Embedder().double(), task_metric()
    x = examples(0)[0].double()
    metric = recall_metric([(x, examples(0)[1])], ks=KS)
    settings = retrieval_settings(metric, whiten_on=examples(1)[0].double())
    plain = settings.processing(model, {})
    assert (plain.post, plain.whitening) == (PostProcessing(), None)
    assert settings.passes == 0
    processing = settings.processing(model.train(), {"whitening": 0.75})
    assert model.training
    with settings.applied({"whitening": 0.75}):
        tuned = metric.evaluate(model, "test")
    assert settings.passes == 2  # the first was over the whitening's inputs
    with torch.no_grad():
        own = processing.of(model.eval()(x))
    assert recall_at_k(own, examples(0)[1], KS).mean == pytest.approx(tuned.value, abs=1e-12)
    assert processing.whitening is not None
    assert settings.set_on(model, {}) == ""
    assert "settings.processing(model, {'whitening': 0.75})" in settings.set_on(model, {"whitening": 0.75})
    assert len(merge_whitening(model, processing.whitening, processing.post, x)) == 1  # lengths
    found = recall_metric([(x, examples(0)[1])], ks=KS, distance="cosine").evaluate(model, "test")
    assert found == tuned


def test_phi_and_starts_are_told_apart() -> None:
    model, metric = Embedder().eval(), task_metric()
    adapter = mo.attach_film(model, ["layers.1"], dim=4)
    settings, phis = retrieval_settings(metric, whiten_on=metric), [torch.zeros(4), torch.full((4,), 2.0)]
    found = []
    with settings.applied({"whitening": 0.5}):
        for phi in phis * 2:
            with adapter.using(phi):
                found.append(metric.evaluate(model, "test"))
        assert settings.passes == 2
        adapter.apply(mo.Start(phis[0], tensors={"layers.1.running_var": torch.full((8,), 3.0)}))
        metric.evaluate(model, "test")
    assert settings.passes == 3
    assert found[:2] == found[2:]
    assert found[0] != found[1]


# --- Under pytorch-metric-learning -------------------------------------------------------------------------------


@pytest.mark.parametrize("gallery", [False, True])
def test_a_tester_s_metric(gallery: bool) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    trainer = trainers.MetricLossOnly(
        models={"trunk": trunk, "embedder": nn.Linear(8, 5)},
        optimizers={},
        batch_size=24,
        loss_funcs={"metric_loss": losses.TripletMarginLoss()},
        dataset=list(zip(*examples(0), strict=True)),
        data_device=torch.device("cpu"),
    )
    tester = testers.GlobalEmbeddingSpaceTester(
        accuracy_calculator=RecallCalculator(ks=(1, 2)), dataloader_num_workers=0, data_device=torch.device("cpu")
    )
    data = {name: list(zip(*examples(seed), strict=True)) for seed, name in enumerate(("train", "val", "items"))}
    splits = [("val", ["items"])] if gallery else None
    task = trainer_task(
        trainer, tester, mo.attach_film(trunk, ["1"], dim=4), data, metric="recall_at_2", splits_to_eval=splits
    )
    plain = task.metric.evaluate(trunk, "test")
    settings = retrieval_settings(task.metric, whiten_on=data["train"])
    assert (settings.names, settings.presets) == (("whitening", "covariance"), {})
    for _ in range(2):
        with settings.applied({"whitening": 0.5}):
            found = task.metric.evaluate(trunk, "test")
    assert settings.passes == 2
    with torch.no_grad():
        x = [normalize(trainer.models["embedder"](trunk.eval()(examples(seed)[0]))) for seed in range(3)]
    post, fitted = PostProcessing(whitening=0.5), Whitening.of(x[0])
    items = (post_processed(x[2], post, fitted), examples(2)[1]) if gallery else None
    expected = recall_at_k(post_processed(x[1], post, fitted), examples(1)[1], (2,), gallery=items).mean
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert found != plain == task.metric.evaluate(trunk, "test")
