"""What the estimators share: rows standardised in float64, and predictions that do not depend on each other."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import make_classification
from sklearn.preprocessing import StandardScaler

from helpers.refusals import assert_refused
from metricopt_ext.classification.estimator import MetricClassifier
from metricopt_ext.classification.tuned_network import CHUNK, Standardised
from metricopt_ext.errors import MetricError

SMALL: dict[str, Any] = {"dim": 2, "hidden": (8,), "epochs": 30, "batch_size": 16, "lr": 0.02, "random_state": 0}


def table() -> tuple[Any, Any]:
    X, y = make_classification(300, 6, n_informative=4, n_classes=3, class_sep=0.7, random_state=0)
    return X, np.array(["a", "b", "c"])[y]


def test_large_numbers_keep_their_differences() -> None:
    seconds, late = 1_700_000_064 + np.arange(400.0), np.arange(400) >= 200
    classifier = MetricClassifier(queries=0, **{**SMALL, "epochs": 60}).fit(seconds[:, None], late)
    assert classifier.score(seconds[:, None], late) >= 0.97
    with torch.no_grad():
        scaled = classifier.model_[0](torch.from_numpy(seconds[:, None]))
    assert scaled.dtype == torch.float32
    assert len(scaled.unique()) == 400


def test_features_are_standardised_as_by_scikit_learn() -> None:
    X = np.column_stack([table()[0], np.full(300, 7.0), 1e-9 * table()[0][:, 0]])
    scaled = Standardised(torch.from_numpy(X))(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(scaled, StandardScaler().fit_transform(X), rtol=1e-6, atol=1e-6)


def test_what_float32_cannot_hold_is_refused() -> None:
    X, y = table()
    assert_refused(
        lambda: MetricClassifier(queries=0, **SMALL).fit(np.vstack([X, np.full((1, 6), 1e30)]), [*y, "a"]),
        ValueError,
        "1",
    )
    classifier = MetricClassifier(queries=0, **SMALL).fit(X, y)
    assert_refused(lambda: classifier.predict(np.vstack([X[0], np.full(6, 1e300)])), ValueError, "1")


def test_a_rows_prediction_is_its_own() -> None:
    X, y = table()
    classifier = MetricClassifier(queries=0, **SMALL).fit(X, y)
    whole = classifier.decision_function(X)
    assert len(X) > CHUNK
    for rows in (1, 2, 17, 255):  # the kernels see as many, whatever comes after them
        np.testing.assert_array_equal(classifier.decision_function(X[:rows]), whole[:rows])
    one_by_one = np.concatenate([classifier.decision_function(row[None]) for row in X])
    np.testing.assert_allclose(one_by_one, whole, rtol=0, atol=1e-5)  # sums in another order, in single precision
    np.testing.assert_allclose(classifier.model_(torch.from_numpy(X)).detach().numpy(), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scoring", [["f1_macro", "accuracy"], ("accuracy",), {"a": "accuracy"}])
def test_several_scorers_are_refused_before_training(scoring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricClassifier, "_train", lambda *_: pytest.fail("it was trained"))
    assert_refused(lambda: MetricClassifier(scoring, queries=12, **SMALL).fit(*table()), ValueError, "scoring")


def test_a_scorer_that_returns_several_numbers_is_named() -> None:
    def both(estimator: Any, X: Any, y: Any) -> dict[str, float]:
        return {"f1": 0.5, "accuracy": 0.6}

    assert_refused(
        lambda: MetricClassifier(both, queries=12, **{**SMALL, "epochs": 1}).fit(*table()), MetricError, "both", "f1"
    )
