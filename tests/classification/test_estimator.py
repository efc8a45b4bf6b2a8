"""The classifier for tables under scikit-learn's own checks, and what it does with a scorer."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.impute import SimpleImputer
from sklearn.metrics import balanced_accuracy_score, get_scorer
from sklearn.model_selection import GridSearchCV, cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from metricopt_ext.classification.estimator import MetricClassifier, Standardised
from metricopt_ext.errors import AdapterError, BudgetError, MetricError

SMALL: dict[str, Any] = {"dim": 2, "hidden": (8,), "epochs": 30, "batch_size": 16, "lr": 0.02, "random_state": 0}


def table(seed: int = 0, rows: int = 300) -> tuple[Any, Any]:
    X, y = make_classification(
        rows, 6, n_informative=4, n_classes=3, weights=[0.7, 0.2], class_sep=0.7, random_state=seed
    )
    return X, np.array(["a", "b", "c"])[y]


@parametrize_with_checks([MetricClassifier(queries=12, **SMALL)])  # type: ignore[untyped-decorator]
@pytest.mark.slow
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_in_a_pipeline_under_cross_validation_and_in_a_grid() -> None:
    X, y = table()
    pipeline = make_pipeline(StandardScaler(), MetricClassifier("f1_macro", queries=12, **SMALL))
    predicted = cross_val_predict(pipeline, X, y, cv=2)
    assert set(predicted) <= {"a", "b", "c"}
    grid = GridSearchCV(MetricClassifier(queries=0, **SMALL), {"hidden": [(4,), ()]}, cv=2).fit(X, y)
    assert grid.best_params_["hidden"] in [(4,), ()]


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
    assert classifier.run_.guard == guard


def test_halves_hold_the_same_share_of_each_class() -> None:
    X, y = table()
    asked: list[Any] = []

    def scorer(estimator: Any, X: Any, y: Any) -> float:
        asked.append(np.unique(y, return_counts=True)[1])
        return float(balanced_accuracy_score(y, estimator.predict(X)))

    MetricClassifier(scorer, queries=12, **SMALL).fit(X, y)
    whole, first, second = asked[:3]
    assert (whole == first + second).all()
    assert (abs(first - second) <= 1).all()


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_a_scorer_that_needs_a_class_which_is_not_held_out_is_refused_with_its_name() -> None:
    X, _ = make_classification(500, 10, random_state=0)
    y = np.repeat(["rare", "usual"], [1, 499])
    seeds = [seed for seed in range(4) if _rare_is_trained_on(y, seed)]
    classifier = MetricClassifier("roc_auc", queries=12, **{**SMALL, "epochs": 1, "random_state": seeds[0]})
    message = r"it is nan on the 150 rows that are held out for it, as none has a label of \['rare'\]; give more such"
    with pytest.raises(MetricError, match=message):
        classifier.fit(X, y)


def _rare_is_trained_on(y: Any, seed: int) -> bool:
    drawn = int(np.random.RandomState(seed).randint(2**31))
    return "rare" in y[train_test_split(np.arange(len(y)), test_size=0.3, random_state=drawn)[0]]


@pytest.mark.parametrize("scoring", ["neg_log_loss", "roc_auc_ovr"])
def test_a_scorer_that_fails_for_want_of_a_class_is_told_what_to_do(scoring: str) -> None:
    X, y = table()
    y = np.where(np.arange(len(y)) == 0, "rare", np.where(y == "c", "b", y))
    seeds = [seed for seed in range(9) if _rare_is_trained_on(y, seed)]
    with pytest.raises(MetricError, match=r"as none has a label of \['rare'\]; give more such rows, or raise"):
        MetricClassifier(scoring, queries=12, **{**SMALL, "epochs": 1, "random_state": seeds[0]}).fit(X, y)


def test_a_label_that_is_held_out_alone_is_named() -> None:
    X, _ = make_classification(60, 4, random_state=0)
    y = np.repeat(["rare", "usual"], [1, 59])
    seed = next(seed for seed in range(20) if not _rare_is_trained_on(y, seed))
    with pytest.warns(UserWarning, match=r"can't learn \['rare'\]: the single row of such a label is held out"):
        MetricClassifier(queries=0, **{**SMALL, "epochs": 1, "random_state": seed}).fit(X, y)


def test_a_frame_reaches_the_scorer_with_its_names() -> None:
    pandas = pytest.importorskip("pandas")
    X, y = table()
    frame, asked = pandas.DataFrame(X, columns=list("uvwxyz")), list[Any]()

    def scorer(estimator: Any, X: Any, y: Any) -> float:
        asked.append((list(X.columns), len(X)))
        return float(balanced_accuracy_score(y, estimator.predict(X)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="1 of 3 classes has fewer than 10 examples")
        framed = MetricClassifier(scorer, queries=12, **SMALL).fit(frame, y)
    assert asked[:3] == [(list("uvwxyz"), rows) for rows in (90, 45, 45)]
    plain = MetricClassifier(lambda e, X, y: balanced_accuracy_score(y, e.predict(X)), queries=12, **SMALL).fit(X, y)
    np.testing.assert_allclose(framed.predict_proba(frame), plain.predict_proba(X), atol=1e-5)  # frames are by column


def test_labels_of_two_types_and_a_training_that_diverges_are_refused() -> None:
    X, y = table()
    with pytest.raises(ValueError, match=r"y has labels of the types int, str_?; make them all of one"):
        MetricClassifier(queries=0, **SMALL).fit(X, np.array([1 if each == "a" else each for each in y], dtype=object))
    with pytest.raises(ValueError, match=r"training with lr=1e\+30 ended in weights that are not finite; lower it"):
        MetricClassifier(queries=0, **{**SMALL, "lr": 1e30}).fit(X, y)


def test_the_same_seed_gives_the_same_classifier() -> None:
    X, y = table()
    one, other = (MetricClassifier(queries=12, **SMALL).fit(X, y).predict_proba(X) for _ in range(2))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "rows", "error", "message"),
    [
        ({"queries": 3}, 300, BudgetError, "3 queries are too few"),
        ({"queries": -2}, 300, ValueError, "queries is -2"),
        ({"queries": 12, "hidden": ()}, 300, AdapterError, "no normalisation layer"),
        ({"queries": 12, "dim": 0}, 300, ValueError, "dim is 0"),
        ({"scoring": "f2"}, 300, ValueError, "f2"),
        ({"validation_fraction": 1.5}, 300, ValueError, "1.5"),
        ({}, 1, ValueError, "one class|n_samples"),
        ({"epochs": -1}, 300, ValueError, "epochs is -1; it must be at least 0"),
        ({"batch_size": 0}, 300, ValueError, "batch_size is 0; it must be at least 1"),
        ({"hidden": 8}, 300, ValueError, "hidden is 8; it must be a sequence of widths"),
        ({"hidden": (8, 0)}, 300, ValueError, "hidden is 0; it must be at least 1"),
    ],
)
def test_bad_settings_are_refused_before_training(
    options: dict[str, Any], rows: int, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetricClassifier, "_train", lambda *_: pytest.fail("it was trained"))
    X, y = table()
    with pytest.raises(error, match=message):
        MetricClassifier(**{**SMALL, **options}).fit(X[:rows], y[:rows])


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
    with pytest.raises(ValueError, match="can't tell the values of column 1 apart"):
        MetricClassifier(queries=0, **SMALL).fit(np.vstack([X, np.full((1, 6), 1e30)]), [*y, "a"])
    classifier = MetricClassifier(queries=0, **SMALL).fit(X, y)
    with pytest.raises(ValueError, match="row 1 of X has a value too large"):
        classifier.predict(np.vstack([X[0], np.full(6, 1e300)]))


def test_missing_numbers_need_an_imputer() -> None:
    X, y = table()
    X[::7, 2] = np.nan
    with pytest.raises(ValueError, match=r"contains NaN.*SimpleImputer|contains NaN[\s\S]*imputer"):
        MetricClassifier(queries=0, **SMALL).fit(X, y)
    assert make_pipeline(SimpleImputer(), MetricClassifier(queries=0, **SMALL)).fit(X, y).score(X, y) > 0.5
