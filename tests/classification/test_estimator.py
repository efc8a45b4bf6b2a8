"""The classifier for tables under scikit-learn's own checks, and what it does with a scorer."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.impute import SimpleImputer
from sklearn.metrics import balanced_accuracy_score, f1_score, get_scorer
from sklearn.model_selection import GridSearchCV, cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.classification.estimator import CANNOT_PASS, CHUNK, MetricClassifier, Standardised
from metricopt_ext.data.label_parts import label_parts
from metricopt_ext.errors import AdapterError, BudgetError, MetricError
from metricopt_ext.methods.prior_starts import prior_offsets

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


@pytest.mark.slow
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
    names = ("nan", "150", "rare")
    assert_refused(lambda: classifier.fit(X, y), MetricError, *names)


def _rare_is_trained_on(y: Any, seed: int) -> bool:
    drawn = int(np.random.RandomState(seed).randint(2**31))
    return "rare" in y[train_test_split(np.arange(len(y)), test_size=0.3, random_state=drawn)[0]]


@pytest.mark.parametrize("scoring", ["neg_log_loss", "roc_auc_ovr"])
def test_a_scorer_that_fails_for_want_of_a_class_is_told_what_to_do(scoring: str) -> None:
    X, y = table()
    y = np.where(np.arange(len(y)) == 0, "rare", np.where(y == "c", "b", y))
    seeds = [seed for seed in range(9) if _rare_is_trained_on(y, seed)]
    assert_refused(
        lambda: MetricClassifier(scoring, queries=12, **{**SMALL, "epochs": 1, "random_state": seeds[0]}).fit(X, y),
        MetricError,
        "rare",
    )


def test_a_label_that_is_held_out_alone_is_named() -> None:
    X, _ = make_classification(60, 4, random_state=0)
    y = np.repeat(["rare", "usual"], [1, 59])
    seed = next(seed for seed in range(20) if not _rare_is_trained_on(y, seed))
    assert_warned(lambda: MetricClassifier(queries=0, **{**SMALL, "epochs": 1, "random_state": seed}).fit(X, y), "rare")


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
    assert_refused(
        lambda: MetricClassifier(queries=0, **SMALL).fit(
            X, np.array([1 if each == "a" else each for each in y], dtype=object)
        ),
        ValueError,
    )
    assert_refused(
        lambda: MetricClassifier(queries=0, **{**SMALL, "lr": 1e30}).fit(X, y), ValueError, "training", "lr=1e+30"
    )


def test_the_same_seed_gives_the_same_classifier() -> None:
    X, y = table()
    one, other = (MetricClassifier(queries=12, **SMALL).fit(X, y).predict_proba(X) for _ in range(2))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "rows", "error", "names"),
    [
        ({"queries": 3}, 300, BudgetError, ("3", "queries")),
        ({"queries": -2}, 300, ValueError, ("queries", "-2")),
        ({"queries": 12, "hidden": ()}, 300, AdapterError, ()),
        ({"queries": 12, "dim": 0}, 300, ValueError, ("dim", "0")),
        ({"scoring": "f2"}, 300, ValueError, ("f2",)),
        ({"validation_fraction": 1.5}, 300, ValueError, ("1.5",)),
        ({}, 1, ValueError, ()),
        ({"epochs": -1}, 300, ValueError, ("epochs", "-1", "0")),
        ({"batch_size": 0}, 300, ValueError, ("batch_size", "0", "1")),
        ({"hidden": 8}, 300, ValueError, ("hidden", "8")),
        ({"hidden": (8, 0)}, 300, ValueError, ("hidden", "0", "1")),
    ],
)
def test_bad_settings_are_refused_before_training(
    options: dict[str, Any], rows: int, error: type[Exception], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetricClassifier, "_train", lambda *_: pytest.fail("it was trained"))
    X, y = table()
    assert_refused(lambda: MetricClassifier(**{**SMALL, **options}).fit(X[:rows], y[:rows]), error, *names)


def test_missing_numbers_need_an_imputer() -> None:
    X, y = table()
    X[::7, 2] = np.nan
    assert_refused(lambda: MetricClassifier(queries=0, **SMALL).fit(X, y), ValueError, "NaN")
    assert make_pipeline(SimpleImputer(), MetricClassifier(queries=0, **SMALL)).fit(X, y).score(X, y) > 0.5


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


@pytest.mark.slow
def test_weights_reach_scikit_learns_scorers() -> None:
    """The tuned value is that of the weighted metric, on the rows that were held out."""
    X, y = table()
    weights = np.random.default_rng(0).random(300)
    held_out: list[Any] = []

    def keeping(estimator: Any, X: Any, y: Any, sample_weight: Any) -> float:
        held_out.append((X, y, sample_weight))
        return float(get_scorer("accuracy")(estimator, X, y, sample_weight=sample_weight))

    MetricClassifier(keeping, queries=12, **SMALL).fit(X, y, sample_weight=weights)
    tuned = MetricClassifier("accuracy", queries=12, **SMALL).fit(X, y, sample_weight=weights)
    X_val, y_val, w_val = held_out[0]
    right = tuned.predict(X_val) == y_val
    assert tuned.run_.after == pytest.approx(np.average(right, weights=w_val))
    assert tuned.run_.after != pytest.approx(right.mean())


@pytest.mark.slow
def test_what_a_scorer_does_not_take_is_said() -> None:
    X, y = table()

    def plain(estimator: Any, X: Any, y: Any) -> float:
        return float(balanced_accuracy_score(y, estimator.predict(X)))

    assert_warned(
        lambda: MetricClassifier(plain, queries=12, **SMALL).fit(X, y, sample_weight=np.ones(300)), "sample_weight"
    )
    assert_refused(
        lambda: MetricClassifier(queries=0, **SMALL).fit(X, y, sample_weight=[1, -2, *[1] * 298]),
        ValueError,
        "sample_weight",
        "-2",
        "1",
    )
    assert_refused(lambda: MetricClassifier(queries=0, **SMALL).fit(X, y, sample_weight=np.zeros(300)), ValueError)


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


@pytest.mark.slow
def test_thresholds_are_a_start_that_predicts_as_many_as_there_are() -> None:
    X, y = several()
    classifier = MetricClassifier("f1_macro", queries=20, **SMALL)
    seen: list[Any] = []

    def scorer(estimator: Any, X_val: Any, y_val: Any) -> float:
        seen.append(estimator.predict(X).mean(0))
        return float(f1_score(y_val, estimator.predict(X_val), average="macro"))

    classifier.set_params(scoring=scorer).fit(X, y)
    as_trained, at_thresholds = seen[0], seen[3]  # three calls for each query: all, and each half
    assert abs(at_thresholds - y.mean(0)).max() <= 0.03
    assert abs(as_trained - y.mean(0))[1] > abs(at_thresholds - y.mean(0))[1]  # the rare one


@pytest.mark.parametrize(
    ("y", "settings", "names"),
    [
        (np.full((40, 2), 3), {}, ("40 x 2", "0", "1", "3")),
        (np.ones((40, 2)), {"class_weight": "balanced"}, ("class_weight='balanced'", "2")),
    ],
)
def test_several_labels_that_are_none_are_refused(y: Any, settings: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(
        lambda: MetricClassifier(queries=0, **settings, **SMALL).fit(np.zeros((40, 1)), y), ValueError, *names
    )


def asked_of(X: Any, y: Any, **settings: Any) -> list[Tensor]:
    """Return each phi that a classifier's search asks of its scorer."""
    asked: list[Tensor] = []

    def scorer(estimator: Any, X_val: Any, y_val: Any) -> float:
        asked.append(Adapter(estimator.model_).phi.detach().clone())
        return float(f1_score(y_val, estimator.predict(X_val), average="macro"))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* (fewer than 10 examples|can't learn)")
        classifier = MetricClassifier(scorer, queries=12, **{**SMALL, **settings}).fit(X, y)
    per_query, rest = divmod(len(asked), sum(classifier.run_.queries.values()))  # of all rows, and of halves
    assert rest == 0
    return asked[::per_query]


def trained_on(y: Any) -> Any:
    """Return the targets of the rows that a classifier of `SMALL` is trained on."""
    seed = int(np.random.RandomState(0).randint(2**31))
    return y[train_test_split(np.arange(len(y)), test_size=0.3, stratify=y, random_state=seed)[0]]


def in_phi(offsets: Any) -> Tensor:
    """Return the phi of `SMALL` that adds these offsets to the logits."""
    return torch.cat([torch.zeros(SMALL["dim"]), torch.as_tensor(offsets, dtype=torch.float32)])


def test_the_line_of_the_priors_is_looked_along_first() -> None:
    """Half an adjustment by the shares of the training rows, half of its opposite, and two further strengths."""
    X, y = table()
    line = in_phi(prior_offsets(torch.tensor(np.unique(trained_on(y), return_counts=True)[1])))
    asked = asked_of(X, y)
    torch.testing.assert_close(torch.stack(asked[:3]), torch.tensor([[0.0], [0.5], [-0.5]]) * line, rtol=1e-6, atol=0)
    for phi in asked[3:5]:
        strength = phi @ line / (line @ line)
        torch.testing.assert_close(phi, strength * line, rtol=1e-5, atol=1e-6)
        assert abs(float(strength)) <= 2.5
    assert all(phi[: SMALL["dim"]].abs().min() > 0 for phi in asked[5:11])  # the design is of all coordinates


def test_the_threshold_of_two_classes_is_looked_along_though_both_are_as_frequent() -> None:
    X, _ = table()
    asked = asked_of(X, (X[:, 0] > np.median(X[:, 0])).astype(int))
    for phi, threshold in zip(asked[:3], (0, 0.5, -0.5), strict=True):
        assert phi.tolist() == [0, 0, -threshold / 2, threshold / 2]


def test_thresholds_are_looked_along_from_the_better_start() -> None:
    X, y = several()
    (seed,) = np.random.RandomState(0).randint(2**31, size=1)
    shares = torch.from_numpy(y[label_parts(torch.from_numpy(y), [280, 120], int(seed))[0]].mean(0))
    line, asked = in_phi(-shares.logit()), asked_of(X, y)
    starts, sides = asked[:2], asked[2:4]
    began = min(starts, key=lambda start: float((sum(sides) / 2 - start).norm()))
    torch.testing.assert_close(sides[0], began + line / 2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sides[1], began - line / 2, rtol=1e-5, atol=1e-6)


def test_classes_that_are_as_frequent_have_no_line() -> None:
    X, _ = table()
    asked = asked_of(X, np.arange(300) % 3)
    assert asked[0].tolist() == [0] * 5
    assert all(phi[: SMALL["dim"]].abs().min() > 0 for phi in asked[1:11])  # a design at once


def test_large_numbers_keep_their_differences() -> None:
    seconds, late = 1_700_000_064 + np.arange(400.0), np.arange(400) >= 200
    classifier = MetricClassifier(queries=0, **{**SMALL, "epochs": 60, "lr": 0.02}).fit(seconds[:, None], late)
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
