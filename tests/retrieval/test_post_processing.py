"""What is done to embeddings: against scikit-learn and loops, each query new, merged into a model, and as a start."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn
from torch.nn.functional import normalize

from helpers.refusals import assert_refused
from helpers.tensors import rand

pytest.importorskip("faiss")

import metricopt_ext as mo
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.data.halves import class_draws
from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.retrieval.judged import Processing
from metricopt_ext.retrieval.left_out import LeftOut
from metricopt_ext.retrieval.merge_whitening import merge_whitening, whitened_layer, whitening_layer
from metricopt_ext.retrieval.models import Conv4, Embedder, unscaled
from metricopt_ext.retrieval.post_processing import (
    PostProcessing,
    Whitening,
    augmented,
    post_processed,
)
from metricopt_ext.retrieval.recall import nearest, recall_at_k, recalls_left_out
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.seeding import generator

PLAIN = PostProcessing()


def drawn(n: int, d: int = 5, seed: int = 0) -> Tensor:
    """Correlated embeddings away from 0."""
    rng = torch.Generator().manual_seed(seed)
    factors = torch.randn(d, d, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return 1 + torch.randn(n, d, generator=rng, dtype=torch.float64) @ factors


def naive_augmented(items: Any, k: int) -> np.ndarray:
    """The definition, one vector after the other."""
    items, found = np.asarray(items), []
    for i, vector in enumerate(items):
        cosine = [item @ vector / np.linalg.norm(item) / np.linalg.norm(vector) for item in items]
        near = sorted((j for j in range(len(items)) if j != i), key=lambda j, c=cosine: (-c[j], j))[:k]
        weights = {j: cosine[j] ** 3 if cosine[j] > 0 else 0.0 for j in near}
        total = vector + sum(weights[j] * items[j] for j in near)
        found.append(total / (1 + sum(weights.values())))
    return np.array(found)


# --- Whitening ---------------------------------------------------------------------------------------------------


def test_power_1_is_scikit_learn_s_whitening() -> None:
    fitted, x = drawn(60), drawn(20, seed=1)
    theirs = PCA(whiten=True).fit(fitted.numpy()).transform(x.numpy())
    whitening = Whitening.of(fitted)
    ours = whitening.applied(x, 1.0).numpy()
    assert ours.shape == (20, 5)
    np.testing.assert_allclose(ours * np.sign(ours[0]) * np.sign(theirs[0]), theirs, rtol=1e-10, atol=1e-10)
    for power in (0.0, 0.25, 1.0):  # half the power goes half the way, and none is a rotation
        variances = whitening.applied(fitted, power).var(0)
        torch.testing.assert_close(variances, whitening.variances ** (1 - power), rtol=1e-10, atol=0)


def test_within_classes_distances_are_those_of_scikit_learn_s_discriminant_analysis() -> None:
    rng = torch.Generator().manual_seed(5)
    labels = torch.randint(7, (90,), generator=rng) * 3  # seven classes, so that none of five dimensions is dropped
    spread = torch.randn(5, 5, generator=rng, dtype=torch.float64)
    x = torch.randn(90, 5, generator=rng, dtype=torch.float64) @ spread + labels[:, None].sqrt() * spread[0]
    whitening = Whitening.within((x, labels))
    assert whitening.rows == 90 - 7
    ours = whitening.applied(x, 1.0)
    theirs = torch.from_numpy(LinearDiscriminantAnalysis(solver="eigen").fit(x.numpy(), labels.numpy()).transform(x))
    ratio = torch.cdist(ours, ours)[0, 1:] / torch.cdist(theirs, theirs)[0, 1:]
    torch.testing.assert_close(ratio, ratio[:1].expand(89), rtol=1e-8, atol=0)
    torch.testing.assert_close(ours.mean(0), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-9)
    assert_refused(lambda: Whitening.within((x, labels[1:])), DataError, "90", "89")
    assert_refused(
        lambda: Whitening.within((x[:11], torch.arange(11) % 7)).applied(x, 1.0), DataError, "whitening", "4"
    )


@pytest.mark.parametrize("rows", [60, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_without_variance_are_left_out(rows: int, dtype: torch.dtype) -> None:
    """A hundredth of the largest spread is none of rounding; a sum of two others and a constant are."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)).to(dtype) * torch.tensor([1.0, 0.1, 0.01]).to(
        dtype
    )
    flat = torch.cat([x, x[:, :1] + x[:, 1:2], torch.ones(rows, 1, dtype=dtype)], 1) + 1
    whitening = Whitening.of(flat)
    assert len(whitening.variances) == 3
    found = whitening.applied(flat, 1.0)
    assert found.dtype == dtype
    torch.testing.assert_close(torch.cov(found.double().T), torch.eye(3).double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: Whitening.of(torch.ones(9, 5)), ("9",)),
        (lambda: Whitening.of(drawn(5)).projection(0.5), ("5",)),
        (lambda: Whitening.of(drawn(9)).applied(drawn(9, 4), 0.5), ("5", "4")),
        (lambda: augmented(torch.eye(9)[:, :5], 2), ("0",)),  # a zero has no cosine
        (lambda: post_processed(drawn(9), PostProcessing(whitening=0.5)), ()),
        (lambda: PostProcessing(whitening=1.5), ("whitening", "1.5", "0")),
    ],
)
def test_what_can_t_be_done_is_refused(call: Any, names: tuple[str, ...]) -> None:
    assert_refused(call, ValueError, *names)


# --- Neighbours --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 29, 50])
def test_augmentation_is_that_of_the_definition(k: int) -> None:
    x = drawn(30)
    np.testing.assert_allclose(augmented(x, k), naive_augmented(x, k), rtol=1e-12, atol=1e-13)


# --- All of it ---------------------------------------------------------------------------------------------------


def test_what_is_done_comes_in_order() -> None:
    x, mask = drawn(40), torch.arange(40) % 4 == 0
    assert post_processed(x, PLAIN, queries=mask) is x  # by default nothing is done
    before = x.clone()
    fitted = Whitening.of(drawn(60, seed=2))
    found = post_processed(x, PostProcessing(whitening=0.5, augmentation=3), fitted, mask)
    unit = fitted.applied(x, 0.5).numpy()
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    gallery = naive_augmented(unit[~mask], 3)
    gallery /= np.linalg.norm(gallery, axis=1, keepdims=True)
    np.testing.assert_allclose(found[~mask], gallery, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found[mask], unit[mask], rtol=1e-11, atol=1e-12)
    assert torch.equal(x, before)


FEW_KS = (1, 2, 4)


def nearby(n: int = 36, d: int = 6, classes: int = 9) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    y = torch.arange(n) % classes
    x = torch.randn(classes, d, generator=rng, dtype=torch.float64)[y]
    return x + 0.8 * torch.randn(n, d, generator=rng, dtype=torch.float64), y


def one_by_one(x: Tensor, k: int, distance: str) -> list[tuple[Tensor, Tensor]]:
    """For each query, the others from the nearest on, and their distances: of a gallery that never had the query."""
    found = []
    for i in range(len(x)):
        others = torch.tensor([j for j in range(len(x)) if j != i])
        gallery, query = normalize(augmented(x[others], k)), x[i : i + 1]
        if distance == "cosine":
            query = normalize(query)
        far = -(gallery @ query[0]) if distance == "ip" else (gallery - query).square().sum(1)
        order = far.argsort(stable=True)
        found.append((others[order], far[order]))
    return found


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("k", [3, 35, 80])
def test_each_query_is_new(k: int, distance: Any) -> None:
    x, _ = nearby()
    expected = one_by_one(x, k, distance)
    rows = np.arange(3, 36)
    parts = list(LeftOut(x, k, distance).keys(rows))
    keys = np.concatenate([each for _, each in parts])
    for i, key in zip(rows, keys, strict=True):
        assert key[i] == math.inf
        assert np.argsort(key, kind="stable")[:-1].tolist() == expected[i][0].tolist()


def test_recall_and_neighbours_are_of_new_queries() -> None:
    x, y = nearby()
    y = torch.where(torch.arange(36) == 7, 77, y)  # without a match
    expected = one_by_one(x, 4, "l2")
    assert nearest(x, 5, augmentation=4).tolist() == [order[:5].tolist() for order, *_ in expected]
    found = recall_at_k(x, y, FEW_KS, augmentation=4)
    rows = [row for row in range(36) if row != 7]
    places = [[bool(y[j] == y[i]) for j in expected[i][0].tolist()].index(True) for i in rows]
    assert (found.rows.tolist(), found.places.tolist(), found.without_match) == (rows, places, 1)
    assert found.at == {k: float(np.mean(np.array(places) < k)) for k in FEW_KS}
    assert found.at != recall_at_k(x, y, FEW_KS).at
    with pytest.raises(DataError, match="gallery"):
        recall_at_k(x, y, FEW_KS, gallery=(x, y), augmentation=4)


@pytest.mark.parametrize("subset", [None, 20])
def test_recalls_are_of_the_queries_and_halves_of_what_is_in_them(subset: int | None) -> None:
    x, y = nearby()
    y = torch.where(torch.arange(36) == 7, 77, y)  # without a match
    draws = class_draws(y, 0)
    assert not isinstance(draws, str)
    told = recalls_left_out(x, y, FEW_KS, draws, 4, "l2", subset, 5)
    rows = [i for i in range(36) if i != 7]
    if subset:
        # The same queries as those of the plain recall with the seed: those that it can be told by.
        chosen = torch.randperm(35, generator=generator(5, "recall queries"))[:subset]
        rows = sorted(rows[i] for i in chosen.tolist())
    expected = one_by_one(x, 4, "l2")

    def mean(members: set[int]) -> float:
        own = [i for i in rows if i in members]
        places = []
        for i in own:
            near = [j for j in expected[i][0].tolist() if j in members]
            places.append([bool(y[j] == y[i]) for j in near].index(True))
        return float(np.mean([np.mean([place < k for place in places]) for k in FEW_KS]))

    assert told == pytest.approx(mean(set(range(36))), abs=1e-12)
    assert told.halves is not None
    assert len(told.halves) == len(draws)
    for halves, pair in zip(draws, told.halves, strict=True):
        assert pair == pytest.approx([mean(set(half.tolist())) for half in halves], abs=1e-12)
    assert 0.2 < told < 0.98
    with pytest.raises(DataError):
        recalls_left_out(torch.zeros_like(x), y, FEW_KS, [], 4, "l2")


HALF = PostProcessing(whitening=0.5)


def linear_network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 5, bias=bias), nn.Identity()
    ).double()


def embedded(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [True, False])
def test_the_model_alone_gives_whitened_embeddings(bias: bool) -> None:
    model, x = linear_network(bias), rand(12, 6, seed=1)
    whitening = Whitening.of(embedded(model, rand(60, 6, seed=0)))
    expected = whitening.applied(embedded(model, x), 0.75)
    modes = [module.training for module in model.train().modules()]
    (left,) = merge_whitening(model, whitening, PostProcessing(whitening=0.75), x[:2])
    assert "torch.nn.functional.normalize" in left  # a layer can't make lengths 1
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(embedded(model, x), expected, rtol=1e-12, atol=1e-12)
    assert model[3].out_features == 5
    assert model[3].weight.requires_grad
    assert model(x).dtype == torch.float64
    assert not model[3]._forward_hooks


def test_appended_it_gives_the_same() -> None:
    torch.manual_seed(0)
    model, x = Embedder(Conv4(1, 8, 6, 4)).double().eval(), torch.rand(40, 1, 8, 8, dtype=torch.float64)
    whitening = Whitening.of(embedded(model, x))
    assert_refused(lambda: merge_whitening(model, whitening, HALF, x[:2]), AdapterError, "1", "nn.Sequential")
    appended = nn.Sequential(model, whitening_layer(whitening, 0.5))
    expected = whitening.applied(embedded(model, x), 0.5)
    torch.testing.assert_close(embedded(appended, x), expected, rtol=1e-11, atol=1e-11)
    # Once more, into what was appended.
    post = PostProcessing(whitening=0.5, augmentation=8)
    _, augmentation = merge_whitening(appended, Whitening.of(expected), post, x[:2])
    assert "augmented(gallery, 8)" in augmentation


def positive() -> nn.Module:
    """Ends with a ReLU that does nothing, until a whitening is before it."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).double()
    with torch.no_grad():
        model[0].bias += 100
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(6, 6).double() for _ in range(2))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Tied(), ("weights",)),
        (positive(), ("whitening",)),
        (nn.Sequential(linear_network(), nn.Tanh()), ()),
    ],
)
def test_what_can_t_be_merged_is_refused(model: nn.Module, names: tuple[str, ...]) -> None:
    x = rand(60, 6, seed=0)
    before = embedded(model, x)
    assert_refused(lambda: merge_whitening(model, Whitening.of(before), HALF, x[:4]), AdapterError, *names)
    assert torch.equal(embedded(model, x), before)


def test_an_adapter_is_merged_first() -> None:
    model, x = linear_network(), rand(60, 6, seed=0)
    whitening = Whitening.of(embedded(model, x))
    adapter: Any = mo.attach_film(model, ["3"], dim=3)
    assert_refused(lambda: merge_whitening(model, whitening, HALF, x), AdapterError, "phi")
    adapter.merge()
    wrong = Whitening.of(rand(60, 6, seed=5))
    assert_refused(lambda: merge_whitening(model, wrong, HALF, x), AdapterError, "whitening", "6", "outputs", "5")
    assert model[3].out_features == 5


def task_of(model: nn.Module) -> FinetuneTask:
    return FinetuneTask(attach_film(model, dim=3), metric=Metric(lambda model: 0.0, maximize=True))


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 5, bias=bias)).double().eval()


def embedder(bias: bool = True) -> Embedder:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 5, bias=bias))
    return Embedder(trunk).double().eval()


@torch.no_grad()
def test_an_embedder_whitens_by_its_last_layer_as_the_setting_does() -> None:
    """At any phi; what the start replaces is that layer alone, and the model stays as it is."""
    model, x = embedder(), rand(60, 1, 2, 3, seed=0)
    adapter = attach_film(model, dim=3)
    adapter.set_phi(rand(3, seed=1))
    before, plain = {name: value.clone() for name, value in model.state_dict().items()}, model(x)
    with unscaled(model):
        processing = Processing(HALF, Whitening.of(model(x)), unscaled=True)
        expected = processing.of(model(x))
    assert torch.equal(Processing(unscaled=True).of(model.trunk(x)), plain)
    tensors = whitened_layer(adapter, processing, x[:2])
    assert tensors.keys() == {"trunk.4.weight", "trunk.4.bias"}
    with adapter.applied(mo.Start(adapter.phi, tensors)) as whitening:
        torch.testing.assert_close(whitening(x), expected, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_where_no_layer_can_take_it_the_reason_is_said() -> None:
    x = rand(60, 1, 2, 3, seed=0)
    last = Embedder(nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.LayerNorm(5))).double().eval()
    refused = ((embedder(bias=False), None, "bias"), (last, None, "linear"), (embedder(), ["trunk.4"], "phi"))
    for model, layers, named in refused:
        adapter = attach_film(model, layers, dim=3)
        with unscaled(model), torch.no_grad():
            processing = Processing(HALF, Whitening.of(model(x)), unscaled=True)
        assert_refused(partial(whitened_layer, adapter, processing, x), AdapterError, named)


@torch.no_grad()
def test_one_within_classes_is_of_several_parts_on_average() -> None:
    """Each part's residuals from the means of its classes, by numpy; the mean is the last one's."""
    x, labels = rand(60, 5, seed=0).double(), torch.arange(60) % 4
    others, theirs = 2 * rand(40, 5, seed=1).double() + 7, torch.arange(40) % 8

    def covariance(of: Tensor, y: Tensor) -> np.ndarray:
        apart = np.concatenate([each - each.mean(0) for each in (of[y == label].numpy() for label in y.unique())])
        return apart.T @ apart / (len(of) - 1)

    found = Whitening.within((others, theirs), (x, labels))
    variances = np.linalg.eigvalsh((covariance(x, labels) + covariance(others, theirs)) / 2)[::-1]
    np.testing.assert_allclose(found.variances.numpy(), variances, rtol=1e-10)
    assert torch.equal(found.mean, x.mean(0))
    assert found.rows == 60 - 4 + 40 - 8
    alone = Whitening.within((x, labels)).applied(x, 1.0).numpy()
    np.testing.assert_allclose(covariance(torch.tensor(alone), labels), np.eye(5), atol=1e-10)
    assert_refused(lambda: Whitening.within((x, labels[1:])), DataError, "60", "59")


def test_what_is_searched_is_mixed_but_where_embeddings_search_each_other() -> None:
    x, mask = rand(12, 4).double(), torch.arange(12) < 4
    processing = Processing(PostProcessing(augmentation=3))
    found, augmentation = processing.searched(x, mask)
    assert torch.equal(found, processing.of(x, mask))
    assert augmentation == 0
    found, augmentation = processing.searched(x, None)
    assert torch.equal(found, processing.alone(x))
    assert augmentation == 3
