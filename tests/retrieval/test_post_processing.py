"""What is done to embeddings, beside scikit-learn's PCA and loops over their definitions."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from helpers.refusals import assert_refused

pytest.importorskip("faiss")

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.post_processing import (
    PostProcessing,
    Whitening,
    augmented,
    post_processed,
)

PLAIN = PostProcessing()


def drawn(n: int, d: int = 5, seed: int = 0) -> Tensor:
    """Correlated embeddings away from 0."""
    rng = torch.Generator().manual_seed(seed)
    factors = torch.randn(d, d, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return 1 + torch.randn(n, d, generator=rng, dtype=torch.float64) @ factors


def distances(x: Tensor) -> Tensor:
    return (x[:, None] - x).square().sum(-1)


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
    ours = Whitening.of(fitted).applied(x, 1.0).numpy()
    assert ours.shape == (20, 5)
    np.testing.assert_allclose(ours * np.sign(ours[0]) * np.sign(theirs[0]), theirs, rtol=1e-10, atol=1e-10)


def test_within_classes_distances_are_those_of_scikit_learn_s_discriminant_analysis() -> None:
    rng = torch.Generator().manual_seed(5)
    labels = torch.randint(7, (90,), generator=rng) * 3  # seven classes, so that none of five dimensions is dropped
    spread = torch.randn(5, 5, generator=rng, dtype=torch.float64)
    x = torch.randn(90, 5, generator=rng, dtype=torch.float64) @ spread + labels[:, None].sqrt() * spread[0]
    whitening = Whitening.within(x, labels)
    assert whitening.rows == 90 - 7
    ours = whitening.applied(x, 1.0)
    theirs = torch.from_numpy(LinearDiscriminantAnalysis(solver="eigen").fit(x.numpy(), labels.numpy()).transform(x))
    ratio = torch.cdist(ours, ours)[0, 1:] / torch.cdist(theirs, theirs)[0, 1:]
    torch.testing.assert_close(ratio, ratio[:1].expand(89), rtol=1e-8, atol=0)
    torch.testing.assert_close(ours.mean(0), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-9)
    assert_refused(lambda: Whitening.within(x, labels[1:]), DataError, "90", "89")
    assert_refused(lambda: Whitening.within(x[:11], torch.arange(11) % 7).applied(x, 1.0), DataError, "whitening", "4")


def test_power_0_is_a_rotation_and_half_the_power_half_the_way() -> None:
    fitted, x = drawn(60), drawn(20, seed=1)
    whitening = Whitening.of(fitted)
    torch.testing.assert_close(distances(whitening.applied(x, 0.0)), distances(x), rtol=1e-10, atol=1e-10)
    for power in (0.25, 0.5, 1.0):
        variances = whitening.applied(fitted, power).var(0)
        torch.testing.assert_close(variances, whitening.variances ** (1 - power), rtol=1e-10, atol=0)
    # The symmetric matrix C^(-p/2) gives the same distances as components scaled by their deviations.
    values, vectors = np.linalg.eigh(np.cov(fitted.numpy().T))
    symmetric = torch.from_numpy(vectors * values**-0.25 @ vectors.T)
    torch.testing.assert_close(distances(whitening.applied(x, 0.5)), distances(x @ symmetric), rtol=1e-9, atol=1e-9)


def test_directions_without_variance_are_left_out() -> None:
    flat = torch.cat([drawn(60), 2 * drawn(60)[:, :1], torch.ones(60, 1, dtype=torch.float64)], 1)
    whitening = Whitening.of(flat)
    assert len(whitening.variances) == 5
    x = torch.cat([drawn(9, seed=1), 2 * drawn(9, seed=1)[:, :1], torch.ones(9, 1, dtype=torch.float64)], 1)
    # 1 + 4 times the variance along the doubled axis: the same as of the first five, scaled by sqrt(5) there.
    scaled = torch.cat([5**0.5 * drawn(60)[:, :1], drawn(60)[:, 1:]], 1)
    expected = Whitening.of(scaled).applied(
        torch.cat([5**0.5 * drawn(9, seed=1)[:, :1], drawn(9, seed=1)[:, 1:]], 1), 1
    )
    torch.testing.assert_close(distances(whitening.applied(x, 1.0)), distances(expected), rtol=1e-9, atol=1e-9)
    single = Whitening.of(flat.float())
    assert len(single.variances) == 5
    assert single.applied(x.float(), 0.5).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: Whitening.of(drawn(1)), ("2", "(1, 5)")),
        (lambda: Whitening.of(torch.ones(9, 5)), ("9",)),
        (lambda: Whitening.of(torch.full((9, 5), torch.nan)), ("NaN",)),
        (
            lambda: Whitening.of(drawn(5)).projection(0.5),
            ("5",),
        ),
        (
            lambda: Whitening.of(drawn(9)).applied(drawn(9, 4), 0.5),
            ("5", "4"),
        ),
    ],
)
def test_what_can_t_be_whitened_is_refused(call: Any, names: tuple[str, ...]) -> None:
    assert_refused(call, DataError, *names)


# --- Neighbours --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 29, 50])
def test_augmentation_is_that_of_the_definition(k: int) -> None:
    x = drawn(30)
    np.testing.assert_allclose(augmented(x, k), naive_augmented(x, k), rtol=1e-12, atol=1e-13)


def test_a_zero_has_no_cosine() -> None:
    x = drawn(9)
    x[3] = 0
    assert_refused(lambda: augmented(x, 2), DataError, "0")


# --- All of it ---------------------------------------------------------------------------------------------------


def test_by_default_nothing_is_done() -> None:
    x = drawn(9)
    assert post_processed(x, PLAIN) is x
    assert post_processed(x, PLAIN, queries=torch.arange(9) < 3) is x


def test_what_is_done_comes_in_order() -> None:
    x, mask = drawn(40), torch.arange(40) % 4 == 0
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


def test_what_is_missing_is_said() -> None:
    assert_refused(lambda: post_processed(drawn(9), PostProcessing(whitening=0.5)), ValueError)
    assert_refused(lambda: post_processed(drawn(9), PostProcessing(augmentation=2)), ValueError)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"whitening": 1.5}, ("whitening", "1.5", "0")),
        ({"whitening": -0.5}, ("whitening", "-0.5")),
        ({"augmentation": -1}, ("augmentation", "-1", "0")),
    ],
)
def test_what_can_t_be_done_is_refused(arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: PostProcessing(**arguments), ValueError, *names)


@pytest.mark.parametrize("rows", [1000, 100_000])
def test_the_rank_does_not_hang_on_how_many_embeddings_there_are(rows: int) -> None:
    """A direction of a hundredth of the largest spread is none of rounding, a sum of two others is."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.1, 0.01])
    x = torch.cat([x, x[:, :1] + x[:, 1:2]], 1) + 1  # the fourth column is the sum of two, but for rounding
    whitening = Whitening.of(x)
    assert len(whitening.variances) == 3
