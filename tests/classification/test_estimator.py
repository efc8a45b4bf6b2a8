"""The classifier for tables under scikit-learn's own checks, and what it does with a scorer."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.metrics import (
    balanced_accuracy_score,
    f1_score,
    get_scorer,
    get_scorer_names,
    hinge_loss,
    log_loss,
    make_scorer,
    roc_auc_score,
)
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from helpers.refusals import assert_refused
from metricopt_ext.classification.estimator import CANNOT_PASS, CHUNK, MetricClassifier, Standardised
from metricopt_ext.errors import AdapterError, BudgetError, MetricError

SMALL: dict[str, Any] = {"dim": 2, "hidden": (8,), "epochs": 10, "batch_size": 16, "lr": 0.05, "random_state": 0}
QUICK = {**SMALL, "epochs": 5, "lr": 0.1}  # for checks that fit it a hundred times


def table(seed: int = 0, rows: int = 300) -> tuple[Any, Any]:
    X, y = make_classification(
        rows, 6, n_informative=4, n_classes=3, weights=[0.7, 0.2], class_sep=0.7, random_state=seed
    )
    return X, np.array(["a", "b", "c"])[y]


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [MetricClassifier(queries=12, **QUICK)], expected_failed_checks=lambda estimator: CANNOT_PASS
)
@pytest.mark.slow
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_the_scorer_is_asked_of_the_held_out_rows_as_often_as_allowed() -> None:
    X, y = table()
    asked: list[Any] = []

    def scorer(estimator: Any, X: Any, y: Any) -> float:
        asked.append((len(y), estimator.predict_proba(X).shape[1]))
        return float(balanced_accuracy_score(y, estimator.predict(X)))

    classifier = MetricClassifier(scorer, queries=12, validation_fraction=0.25, **SMALL).fit(X, y)
    assert asked == [(rows, 3) for _ in range(12) for rows in (75, 38, 37)]
    assert sum(classifier.run_.queries.values()) == 12
    assert not [name for name in classifier.model_.state_dict() if "metricopt" in name]  # merged


def test_values_by_name_are_combined_to_what_is_tuned() -> None:
    X, y = table()
    asked: list[dict[str, float]] = []

    def recalls(estimator: Any, X: Any, y: Any) -> dict[str, float]:
        predicted = estimator.predict_proba(X)
        asked.append(
            {name: float(predicted[y == name, place].mean()) for place, name in ((1, "b"), (2, "c"), (0, "a"))}
        )
        return asked[-1]

    classifier = MetricClassifier(recalls, combine="worst", queries=12, **SMALL)
    run = clone(classifier).fit(X, y).run_
    assert run.guard == "halves"
    assert {name: before for name, (before, _) in run.made_of.items()} == asked[0]
    assert [*run.made_of] == ["b", "c", "a"]
    assert run.before == min(asked[0].values())
    never = {**SMALL, "queries": 12, "epochs": 10**7}
    for options, names in (({"combine": "best"}, ("'best'",)), ({"scoring": "f1"}, ("'f1'", "combine"))):
        given: dict[str, Any] = {"scoring": recalls, "combine": "worst", **never, **options}
        assert_refused(lambda given=given: MetricClassifier(**given).fit(X, y), ValueError, *names)
    uncombined = MetricClassifier(recalls, **{**never, "epochs": 1})
    assert_refused(lambda: uncombined.fit(X, y), MetricError, "b, c, a", "combine=")


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["balanced_accuracy", "neg_log_loss"])
def test_what_is_kept_is_what_the_result_says(scoring: str) -> None:
    """The network without queries is that before the search, and the one that was kept is in the estimator."""
    X, y = table()
    tuned = MetricClassifier(scoring, queries=20, **SMALL).fit(X, y)
    plain = clone(tuned).set_params(queries=0).fit(X, y)
    assert plain.run_ is None
    asked: list[float] = []

    def scorer(estimator: Any, X: Any, y: Any) -> float:
        asked.append(get_scorer(scoring)(tuned if asked else plain, X, y))
        return asked[-1]

    MetricClassifier(scorer, queries=12, **SMALL).fit(X, y)  # splits off the same rows
    assert asked[0] == pytest.approx(tuned.run_.before, abs=1e-6)
    assert asked[3] == pytest.approx(tuned.run_.after, abs=1e-6)


@pytest.mark.parametrize(("positives", "guard"), [(4, "none"), (7, "halves")])  # of 500 rows: 1 and 2 held out
@pytest.mark.parametrize("scoring", ["roc_auc", "average_precision", "f1"])
def test_few_positives_are_in_both_halves_or_there_are_none(scoring: str, positives: int, guard: str) -> None:
    X, _ = make_classification(500, 10, random_state=0)
    y = np.repeat([1, 0], [positives, 500 - positives])
    asked: list[Any] = []

    def scorer(estimator: Any, X: Any, y: Any) -> float:
        asked.append((len(y), int(y.sum())))
        return float(get_scorer(scoring)(estimator, X, y))

    classifier = MetricClassifier(scorer, queries=12, **{**SMALL, "epochs": 1})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        classifier.fit(X, y)
    assert asked[:3] == ([(150, 2), (75, 1), (75, 1)] if guard == "halves" else [(150, 1)] * 3)
    told = [str(each.message) for each in said if "reports no halves" in str(each.message)]
    assert len(told) == (guard == "none")
    assert all("as 1 of 2 classes has a single example, and both need one" in each for each in told)
    # At the line's end all rows are predicted to be positive: on either half f1 then moves as on the other.
    alike = any("always move alike" in str(each.message) for each in said)
    assert alike == (scoring == "f1" and guard == "halves")
    assert classifier.run_.guard == ("none" if alike else guard)


@pytest.mark.parametrize(
    ("options", "rows", "error", "names"),
    [
        ({"queries": 3}, 300, BudgetError, ("3", "queries")),
        ({"queries": 12, "hidden": ()}, 300, AdapterError, ()),
        ({"scoring": "f2"}, 300, ValueError, ("f2",)),
        ({"validation_fraction": 1.5}, 300, ValueError, ("1.5",)),
        ({}, 1, ValueError, ()),
        ({"epochs": -1}, 300, ValueError, ("epochs", "-1", "0")),
    ],
)
def test_bad_settings_are_refused_before_training(
    options: dict[str, Any], rows: int, error: type[Exception], names: tuple[str, ...]
) -> None:
    X, y = table()
    assert_refused(
        lambda: MetricClassifier(**{**SMALL, "epochs": 10**7, **options}).fit(X[:rows], y[:rows]), error, *names
    )


def val_loss(estimator: Any, X: Any, y: Any) -> float:
    return float(log_loss(y, estimator.predict_proba(X)))


def neg_val_loss(estimator: Any, X: Any, y: Any) -> float:
    return -val_loss(estimator, X, y)


@pytest.mark.parametrize(
    ("scoring", "named", "remedy"),
    [
        (
            make_scorer(log_loss, response_method="predict_proba"),
            ("log_loss", "greater_is_better=False", "response_method='predict_proba'"),
            make_scorer(log_loss, greater_is_better=False, response_method="predict_proba"),
        ),
        (
            make_scorer(roc_auc_score, multi_class="ovr"),
            ("roc_auc_score", "response_method='predict_proba'"),
            make_scorer(roc_auc_score, response_method="predict_proba", multi_class="ovr"),
        ),
        (
            make_scorer(hinge_loss),
            ("hinge_loss", "greater_is_better=False", "response_method='decision_function'"),
            make_scorer(hinge_loss, greater_is_better=False, response_method="decision_function"),
        ),
        (val_loss, ("val_loss", "neg_val_loss"), neg_val_loss),
    ],
)
def test_a_scorer_that_its_function_does_not_mean_is_refused(scoring: Any, named: tuple[str, ...], remedy: Any) -> None:
    X, y = table()
    never = {**SMALL, "queries": 12, "epochs": 10**7}
    assert_refused(lambda: MetricClassifier(scoring, **never).fit(X, y), ValueError, *named)
    assert MetricClassifier(remedy, **{**never, "epochs": 1}).fit(X, y).run_ is not None


def test_scikit_learns_own_scorers_mean_what_they_are() -> None:
    X, y = table()
    for name in get_scorer_names():
        with pytest.raises(BudgetError):  # which is told after scorers are looked at
            MetricClassifier(name, queries=1, **SMALL).fit(X, y)


def weighted(seed: int = 0) -> tuple[Any, Any, Any]:
    """Rows of two classes; two thirds of the upper class are labelled wrongly, and weigh nothing."""
    true = np.arange(300) % 2
    X = np.random.default_rng(seed).normal(size=(300, 1)) * 0.3 + true[:, None] * 4
    wrong = (true == 1) & (np.arange(300) // 2 % 3 > 0)
    return X, np.where(wrong, 0, true), np.where(wrong, 0.0, 1.0)


def test_rows_of_no_weight_are_as_if_they_were_not_there() -> None:
    X, y, w = weighted()
    weighed = MetricClassifier(queries=12, **SMALL).fit(X, y, sample_weight=w)
    without = MetricClassifier(queries=12, **SMALL).fit(X[w > 0], y[w > 0])
    np.testing.assert_array_equal(weighed.predict_proba(X), without.predict_proba(X))
    assert weighed.score(X, np.arange(300) % 2) == 1


@pytest.mark.slow
def test_weights_count_in_the_loss_in_proportion() -> None:
    X, y = np.zeros((400, 1)), np.arange(400) % 2
    settings = {**SMALL, "epochs": 60, "batch_size": 70}
    by_rows = MetricClassifier(queries=0, **settings).fit(X, y, sample_weight=np.where(y == 1, 900.0, 100))
    by_class = MetricClassifier(queries=0, class_weight={1: 9}, **settings).fit(X, y)
    for classifier in (by_rows, by_class):
        assert classifier.predict_proba(X[:1])[0, 1] == pytest.approx(0.9, abs=0.05)
    rare = np.arange(400) % 10 == 0
    balanced = MetricClassifier(queries=0, class_weight="balanced", **settings).fit(X, rare)
    assert balanced.predict_proba(X[:1])[0, 1] == pytest.approx(0.5, abs=0.1)
    both = MetricClassifier(queries=0, class_weight="balanced", **settings)
    both.fit(X, rare, sample_weight=np.where(rare, 9.0, 1.0))  # balanced already
    assert both.predict_proba(X[:1])[0, 1] == pytest.approx(0.5, abs=0.1)


def test_the_scorer_is_handed_weights_of_its_rows() -> None:
    X, y = table()
    asked: list[int] = []

    def weighed(estimator: Any, X: Any, y: Any, sample_weight: Any) -> float:
        assert (sample_weight == X[:, 0] + 10).all()
        asked.append(len(y))
        return float(np.average(estimator.predict(X) == y, weights=sample_weight))

    MetricClassifier(weighed, queries=12, **SMALL).fit(X, y, sample_weight=X[:, 0] + 10)
    assert asked[:3] == [90, 45, 45]


def several(rows: int = 400, seed: int = 0) -> tuple[Any, Any]:
    """Rows with three labels, of which the second is in a tenth of the rows."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 4))
    noise = rng.normal(size=(rows, 3))
    return X, (X[:, :3] + 0.7 * noise > [0, 1.6, 0.3]).astype(int)


@pytest.mark.slow
def test_several_labels_for_each_row() -> None:
    X, y = several()
    classifier = MetricClassifier(queries=20, **SMALL).fit(X[:300], y[:300])
    predicted, probabilities = classifier.predict(X), classifier.predict_proba(X)
    assert predicted.shape == probabilities.shape == classifier.decision_function(X).shape == (400, 3)
    np.testing.assert_array_equal(predicted, probabilities > 0.5)
    assert set(classifier.run_.candidates) - {"prior_line"} == {"start", "thresholds"}  # the best of a line may be none
    assert classifier.run_.metric == "f1_macro"
    assert f1_score(y[300:], predicted[300:], average="macro") > 0.6
    assert classifier.run_.guard == "halves"
    by_sparse = MetricClassifier(queries=20, **SMALL).fit(X[:300], csr_matrix(y[:300]))
    np.testing.assert_array_equal(by_sparse.predict(X), predicted)


def test_features_are_standardised_as_by_scikit_learn() -> None:
    X = np.column_stack([table()[0], np.full(300, 7.0), 1e-9 * table()[0][:, 0]])
    scaled = Standardised(torch.from_numpy(X))(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(scaled, StandardScaler().fit_transform(X), rtol=1e-6, atol=1e-6)


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
