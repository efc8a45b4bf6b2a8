"""A scikit-learn classifier for tables: a neural network, trained by its loss and then tuned for a scorer."""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import check_scoring
from sklearn.model_selection import train_test_split
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.classification.callable_metric import meaning_of
from metricopt_ext.classification.offsets import target_line
from metricopt_ext.classification.targets import Target, matching_offsets
from metricopt_ext.data.halves import Halves, stratified_halves
from metricopt_ext.data.label_parts import label_halves, label_parts
from metricopt_ext.data.precision import check_told_apart, mean_and_spread
from metricopt_ext.data.rare import rare_groups
from metricopt_ext.methods.starts import moved_by
from metricopt_ext.methods.tune import Attach, check_tuning, tune_model
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.combine import Combine
from metricopt_ext.tasks.direction import known_direction
from metricopt_ext.tasks.halved import with_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.named import name_of
from metricopt_ext.utils.seeding import seeded_streams
from metricopt_ext.utils.words import brief

CPU = torch.device("cpu")
CHUNK = 256  # rows that a prediction runs the network on
WEIGHTS = "sample_weight"
THRESHOLDS = "thresholds"  # the start at which as many are predicted as there are

# Those of scikit-learn's checks that an estimator which draws its rows can't pass, with the reason; for
# ``check_estimator(..., expected_failed_checks=CANNOT_PASS)``.
CANNOT_PASS = {
    "check_sample_weight_equivalence_on_dense_data": "a row is held out for the scorer or trained on, whole: one of"
    " weight 2 is on one side, where its two copies may be parted. Equal rows would have to be held out together: of"
    " few distinct rows, as of categories, all that have a label could be",
}


class Standardised(nn.Module):
    """Shifts and scales features in float64, as float32 may not tell large ones apart, and returns them as float32.

    As by scikit-learn's ``StandardScaler``, constant features are only shifted.

    Args:
        x: The rows that the network is trained on, ``n x features``, float64.

    Raises:
        DataError: Float32 can't tell the values of a feature apart even then.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        mean, std = mean_and_spread(x)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        check_told_apart(x, self(x), remedy="leave out the feature, or the rows that are far from all others")

    def forward(self, x: Tensor) -> Tensor:
        """Standardise rows, ``n x features``."""
        return ((x.double() - self.mean) / self.std).float()


class MetricClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A network that is trained by cross-entropy and then tuned for a scorer, as a black box, by a guided search.

    A part of the training rows is held out for the scorer; the guard leaves the network as it was trained unless the
    gain on them exceeds chance. What chance is, halves of these rows tell if each class has two of them; else a warning
    says so, and any gain is kept. Clones, pipelines, cross-validation and grid searches work as with any classifier.

    Several labels for each row (multi-label) have a logit and a threshold each. The search then also tries, as a start
    that costs one query, the thresholds at which as many are predicted as there are.

    The search looks first, by four queries, along the offsets that adjust the logits by the classes' shares of the
    training rows, of two classes along a threshold. There is no such line if three or more are about as frequent, or
    one is in no training row.

    Args:
        scoring: What to tune: a scorer's name (``sklearn.metrics.get_scorer_names()``), or
            ``scorer(estimator, X, y) -> float``, where higher is better, which may take ``sample_weight`` too. None:
            ``balanced_accuracy``, or ``f1_macro`` for several labels. With ``combine`` the scorer returns a dict,
            ``{name: value}``, such as each class's recall.
        queries: How often the scorer may be asked, at least `GuidedTrustRegion().least_queries` of all of phi; 0 for
            the network as it was trained.
        dim: How many numbers modulate the hidden layers, at least 1; an offset for each logit comes with them.
        hidden: Widths of the hidden layers.
        epochs: Passes through the training rows.
        lr: AdamW's learning rate.
        batch_size: Rows in a batch.
        validation_fraction: Share of the rows that the scorer is asked on, between 0 and 1.
        random_state: Seed of all draws, as scikit-learn has it.
        class_weight: Weight of each class in the loss, as in scikit-learn: a dict, or ``"balanced"``; the scorer is not
            told. For one label a row.
        combine: How the values that the scorer returns by name make what is tuned, as of `Metric`, e.g. ``"worst"``.

    Attributes:
        classes_: The labels, ``c``; of several labels, their numbers, ``k``.
        model_: The network, on ``n x features`` as they come, float64; an ordinary torch module, whose first layer
            standardises in float64.
        run_: What the search did (`Result`); None without queries.

    Raises:
        ValueError: From ``fit``, before training: there are fewer than two classes or too few rows, a number is out of
            range, there is no such scorer or there are several, or it is of what its function does not mean (classes in
            place of scores, higher where lower is better), or X has missing numbers (put an imputer before it in a
            pipeline) or a feature whose values float32 can't tell apart.
        AdapterError: From ``fit``, before training: there are ``queries``, but no hidden layer to modulate.
        BudgetError: From ``fit``, before training: ``queries`` are too few for a search.
        MetricError: From ``fit``: the scorer fails on the rows held out for it, or is not defined on them.

    Examples:
        >>> X, y = np.random.default_rng(0).normal(size=(90, 3)), np.arange(90) % 2
        >>> MetricClassifier(queries=0, epochs=1, random_state=0).fit(X, y).predict(X).shape
        (90,)
    """

    model_: nn.Sequential
    run_: Any

    def __init__(
        self,
        scoring: str | Callable[..., Any] | None = None,
        *,
        queries: int = 100,
        dim: int = 16,
        hidden: Sequence[int] = (64, 32),
        epochs: int = 30,
        lr: float = 3e-3,
        batch_size: int = 64,
        validation_fraction: float = 0.3,
        random_state: Any = None,
        class_weight: Any = None,
        combine: Combine | None = None,
    ) -> None:
        self.scoring = scoring
        self.queries = queries
        self.dim = dim
        self.hidden = hidden
        self.epochs = epochs
        self.lr = lr
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.class_weight = class_weight
        self.combine = combine

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "MetricClassifier":
        """Train the network on rows ``n x features``, then tune it; returns itself.

        After an error, or Ctrl-C, it is what it was: fitted as before, or not at all.

        Args:
            X: The rows.
            y: Their labels, ``n``, or ``n x k`` of 0 and 1 for several labels each.
            sample_weight: Weights of the rows, ``n``, not negative. They count in the loss, and the scorer is handed
                them if it takes them; rows of weight 0 are left out.
        """
        before = dict(vars(self))
        try:
            return self._fitted(X, y, sample_weight)
        except BaseException:
            self.__dict__ = before
            raise

    def predict_proba(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the probability of each class, ``n x c``, or of each label, ``n x k``, for rows ``n x features``."""
        outputs = self._outputs(X)
        probabilities: np.ndarray[Any, Any] = self._kind.probabilities(outputs).numpy()
        return probabilities

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the label of each row, ``n``, or all labels as 0 and 1, ``n x k``, for rows ``n x features``."""
        outputs = self._outputs(X)
        decided = self._kind.decide(outputs).numpy()
        predicted: np.ndarray[Any, Any] = decided if self._kind.kind == "multilabel" else self.classes_[decided]
        return predicted

    def decision_function(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the logits, ``n x c``, of two classes their difference, ``n``, for rows ``n x features``."""
        logits = self._outputs(X).numpy()
        two = self._kind.kind == "classes" and logits.shape[1] == 2
        decided: np.ndarray[Any, Any] = logits[:, 1] - logits[:, 0] if two else logits
        return decided

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags: it takes several labels for each row."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _fitted(self, X: Any, y: Any, sample_weight: Any) -> "MetricClassifier":
        scored_by_weights = sample_weight is not None and self._takes_weights()
        rows = X  # as they came: a scorer may need the columns' names
        X, y = self._read(X, y)
        weights = _weights(sample_weight, X)
        if not weights.all():  # as if these rows were not there
            kept = np.flatnonzero(weights)
            rows, X, y, weights = _safe_indexing(rows, kept), X[kept], y[kept], weights[kept]
        self._check_settings()
        target, y_loss = self._target(y)
        seed = int(check_random_state(self.random_state).randint(2**31))
        train, held_out = self._split(y_loss, seed)
        x_train, y_train = torch.from_numpy(X[train]), y_loss[torch.from_numpy(train)]
        w_loss = self._loss_weights(y, weights)[train]
        w_train = torch.from_numpy(w_loss / w_loss.mean()).float()
        with seeded_streams(seed, CPU):
            self.model_ = self._network(x_train, target.count)
            if self.queries:
                self._check_search(seed, target)
            self._train(x_train, y_train, w_train, target)
        self.run_ = None
        if self.queries:
            y_val = y_loss[torch.from_numpy(held_out)]
            halves = label_halves(y_val, seed) if target.kind == "multilabel" else stratified_halves(y_val, seed)
            X_val = _safe_indexing(rows, held_out) if hasattr(rows, "columns") else X[held_out]
            judged = self._scorer(X_val, y[held_out], weights[held_out] if scored_by_weights else None)
            self.run_ = self._tuned(x_train, y_train, w_train, target, judged, halves, seed)
        return self

    def _read(self, X: Any, y: Any) -> tuple[Any, Any]:
        y = y.toarray() if scipy.sparse.issparse(y) else y
        shape = getattr(y, "shape", None) or np.shape(np.asarray(y, dtype=object))
        several = len(shape) == 2 and shape[1] > 1
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=several)
        if several:
            self._read_labels(y)
            return X, y.astype(np.int64)
        try:
            self.classes_ = np.unique(y)
        except TypeError as error:  # they can't be sorted
            kinds = sorted({type(label).__name__ for label in y.tolist()})
            raise ValueError(f"y has labels of the types {', '.join(kinds)}; make them all of one") from error
        check_classification_targets(y)
        return X, y

    def _read_labels(self, y: Any) -> None:
        if not np.isin(y, (0, 1)).all():
            wrong = y[~np.isin(y, (0, 1))][0]
            raise ValueError(f"y is {y.shape[0]} x {y.shape[1]}, so it must hold 0 and 1 for each label, got {wrong}")
        if self.class_weight is not None:
            raise ValueError(f"class_weight={self.class_weight!r} is for one label a row, but y has {y.shape[1]}")
        self.classes_ = np.arange(y.shape[1])

    def _target(self, y: Any) -> tuple[Target, Tensor]:
        if y.ndim == 2:
            self._kind = Target("multilabel", y.shape[1])
            return self._kind, torch.from_numpy(y)
        self.classes_, codes = np.unique(y, return_inverse=True)  # of the rows that count
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; a classifier needs at least two")
        self._kind = Target("classes", len(self.classes_))
        return self._kind, torch.from_numpy(codes)

    def _split(self, y: Tensor, seed: int) -> tuple[Any, Any]:
        """Return the rows to train on and those that are held out for the scorer."""
        if self._kind.kind == "multilabel":
            sizes = [len(part) for part in self._held_out(len(y), None, seed)]  # by its rules for sizes
            train, held_out = (part.numpy() for part in label_parts(y, sizes, seed))
        else:
            train, held_out = self._held_out(len(y), y.numpy() if y.bincount().min() > 1 else None, seed)
        self._warn_of_rare(y, train, held_out)
        return train, held_out

    def _held_out(self, count: int, stratify: Any, seed: int) -> tuple[Any, Any]:
        """Divide rows 0..count-1 into those to train on and those that are held out, by classes if some are given."""
        try:
            train, held_out = train_test_split(
                np.arange(count), test_size=self.validation_fraction, stratify=stratify, random_state=seed
            )
        except ValueError as error:
            raise ValueError(f"n_samples = {count} can't be split for the scorer: {error}") from error
        return train, held_out

    def _warn_of_rare(self, y: Tensor, train: Any, held_out: Any) -> None:
        """Warn of labels with few held-out rows, and of those that are held out alone."""
        several = self._kind.kind == "multilabel"
        counts, trained = (
            (
                y[torch.from_numpy(rows)].sum(0)
                if several
                else y[torch.from_numpy(rows)].bincount(minlength=self._kind.count)
            )
            for rows in (held_out, train)
        )
        named = dict(zip(map(str, self.classes_), counts.tolist(), strict=True))
        if self.queries and (rare := rare_groups("label" if several else "class", named)):
            warnings.warn(str(rare), stacklevel=5)
        if len(unseen := self.classes_[(trained == 0).numpy()]) and not several:
            warnings.warn(
                f"the network can't learn {brief(unseen.tolist())}: the single row of such a label is held out for the"
                " scorer; give more such rows, or another random_state",
                stacklevel=5,
            )

    def _check_settings(self) -> None:
        check_integer(0, epochs=self.epochs)
        check_integer(1, batch_size=self.batch_size)
        if not isinstance(self.hidden, Sequence | np.ndarray):
            raise ValueError(f"hidden is {self.hidden!r}; it must be a sequence of widths, such as (64, 32)")
        for width in self.hidden:
            check_integer(1, hidden=width)

    def _loss_weights(self, y: Any, weights: Any) -> Any:
        """Return the weight of each row in the loss, ``n``."""
        if self.class_weight is None:
            return weights
        codes = np.searchsorted(self.classes_, y)
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            of_classes = np.bincount(codes, weights=weights)
            return weights * (weights.sum() / (len(self.classes_) * of_classes))[codes]
        return weights * compute_class_weight(self.class_weight, classes=self.classes_, y=y)[codes]

    def _takes_weights(self) -> bool:
        """Whether the scorer, or the metric of one of scikit-learn's, has an argument for weights; a warning if not."""
        if not self.queries:
            return False
        scorer = self._checked_scorer()
        try:
            parameters = [*inspect.signature(getattr(scorer, "_score_func", scorer)).parameters.values()]
        except (TypeError, ValueError):  # a builtin may have none
            parameters = []
        taken = any(each.name == WEIGHTS or each.kind is each.VAR_KEYWORD for each in parameters)
        if not taken:
            warnings.warn(
                f"the weights count in the loss, but the scorer {self._name()} takes no {WEIGHTS}, so what is tuned"
                " does not have them",
                stacklevel=4,
            )
        return taken

    def _outputs(self, X: Any) -> Tensor:
        """Return the network's outputs, ``n x outputs`` float64, for rows ``n x features``."""
        check_is_fitted(self, "model_")
        x = torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))  # a copy: a frame's may be read-only
        with torch.no_grad():
            outputs = torch.cat([self._of_chunk(chunk) for chunk in x.split(CHUNK)])
        bad = (~outputs.isfinite()).any(1).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"row {bad[0]} of X has a value too large, beside those that the network was trained on")
        return outputs

    def _of_chunk(self, x: Tensor) -> Tensor:
        """Return the outputs, ``n x outputs`` float64, of up to `CHUNK` rows.

        The network always sees as many: kernels for fewer round otherwise, and a row's prediction is its own.
        """
        padded = torch.cat([x, x[:1].expand(CHUNK - len(x), -1)])
        outputs: Tensor = self.model_(padded)[: len(x)].double()
        return outputs

    def _network(self, x: Tensor, outputs: int) -> nn.Sequential:
        """Make the network, whose first layer standardises the features."""
        layers: list[nn.Module] = [Standardised(x)]
        for a, b in zip((x.shape[1], *self.hidden), self.hidden, strict=False):
            layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU()]
        width = self.hidden[-1] if len(self.hidden) else x.shape[1]
        return nn.Sequential(*layers, nn.Linear(width, outputs))

    def _train(self, x: Tensor, y: Tensor, w: Tensor, target: Target) -> None:
        optimizer = torch.optim.AdamW(self.model_.parameters(), lr=self.lr)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(x)).split(self.batch_size):
                optimizer.zero_grad()
                (w[rows] * target.losses(self.model_(x[rows]), y[rows])).mean().backward()
                optimizer.step()
        if not all(bool(parameter.isfinite().all()) for parameter in self.model_.parameters()):
            raise ValueError(f"training with lr={self.lr!r} ended in weights that are not finite; lower it")

    def _check_search(self, seed: int, target: Target) -> None:
        """Refuse before training what the search would refuse after it."""
        self._checked_scorer()
        several = target.kind == "multilabel"
        check_tuning(
            self.model_,
            metric=self._metric(dict),
            queries=self.queries,
            attach=self._attach(seed),
            starts=lambda task: {THRESHOLDS: Start(task.origin())} if several else {},
            seed=seed,
        )

    def _attach(self, seed: int) -> Attach:
        return partial(attach_film, dim=self.dim, seed=seed, outputs=Outputs())

    def _metric(self, function: Callable[..., Any]) -> Metric:
        return Metric(function, maximize=True, bounds=None, name=self._name(), combine=self.combine)

    def _scoring(self) -> Any:
        several = getattr(self, "_kind", None) is not None and self._kind.kind == "multilabel"
        return self.scoring if self.scoring is not None else "f1_macro" if several else "balanced_accuracy"

    def _checked_scorer(self) -> Any:
        """Return the scorer.

        Raises:
            ValueError: There is no such one, or there are several.
        """
        scoring = self._scoring()
        if self.combine is not None and not callable(scoring):
            raise ValueError(f"combine={brief(self.combine)} needs a scorer that returns a dict, not {brief(scoring)}")
        if isinstance(scoring, list | tuple | set | dict):
            raise ValueError(
                f"scoring is {brief(scoring)}, of several metrics, and the search tunes one; name one of them, or give"
                " a scorer(estimator, X, y) that makes one number of them"
            )
        scorer = check_scoring(self, scoring)
        function = getattr(scorer, "_score_func", scorer)  # what `make_scorer` was given
        name, meaning = name_of(function), meaning_of(function)
        lower = known_direction(name) is False
        method = {"probabilities": "predict_proba", "logits": "decision_function"}.get(meaning, "predict")
        if lower and function is scorer:
            raise ValueError(
                f"scoring is {name}, of which by its name lower is better, but of a scorer higher is; return its"
                f" negative by a function of another name, such as neg_{name}"
            )
        if function is not scorer and (
            (lower and scorer._sign > 0) or (method != "predict" and scorer._response_method == "predict")
        ):
            given = ", ".join([name, *(["greater_is_better=False"] if lower else []), f"response_method={method!r}"])
            raise ValueError(f"scoring is {brief(scorer)}, but by its name it is to be make_scorer({given})")
        return scorer

    def _name(self) -> str:
        """The scorer's name, without the address that a function's text has."""
        scoring = self._scoring()
        return str(getattr(scoring, "__name__", scoring))

    def _scorer(self, X_val: Any, y_val: Any, weights: Any) -> Callable[[Tensor | None], Any]:
        """Return the scorer on a half of the held-out rows, or on all of them for None."""
        scorer, lacking = self._checked_scorer(), self._lacking(y_val)

        def value_on(half: Tensor | None) -> Any:
            rows = np.arange(len(y_val)) if half is None else half.numpy()
            own = {} if weights is None else {WEIGHTS: weights[rows]}
            try:
                value = scorer(self, X_val if half is None else _safe_indexing(X_val, rows), y_val[rows], **own)
            except ValueError as error:
                if half is None and lacking:
                    raise ValueError(f"{brief(error)}; it is not defined {lacking}") from error
                raise
            if isinstance(value, Mapping) and self.combine is None:
                raise ValueError(
                    f"it returned a dict of {', '.join(map(str, value))}; it must return one number, such as one of"
                    " them, or give combine='worst'"
                )
            if half is None and lacking and isinstance(value, float) and math.isnan(value):
                raise ValueError(f"it is nan {lacking}")
            return value

        return value_on

    def _tuned(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        target: Target,
        judged: Callable[[Tensor | None], Any],
        halves: Halves,
        seed: int,
    ) -> Any:
        """Search phi for the scorer on the held-out rows and merge it; returns what the search did."""
        return tune_model(
            self.model_,
            loss=lambda model, batch: (batch[2] * target.losses(model(batch[0]), batch[1])).mean(),
            batches=TensorBatches(x, y, self.batch_size, more=[w]),
            metric=self._metric(lambda: with_halves(judged, halves)),
            queries=self.queries,
            attach=self._attach(seed),
            starts=lambda task: self._starts(task.adapter, x, y, target),
            together=False,
            seed=seed,
            callback=Callback(),
        )

    def _starts(self, adapter: Adapter, x: Tensor, y: Tensor, target: Target) -> dict[str, Start | StartLine]:
        """Return what the search may begin from besides the network as it was trained."""
        starts = dict[str, Start | StartLine]()
        if (line := target_line(adapter, target, y)) is not None:
            starts["prior_line"] = line
        if target.kind == "multilabel":
            with torch.no_grad():
                offsets = matching_offsets(self.model_(x), target.shares(y))
            starts[THRESHOLDS] = Start(moved_by(adapter, offsets))
        return starts

    def _lacking(self, y_val: Any) -> str:
        """Say which labels no held-out row has, and what to do; empty if all are there."""
        missing = self.classes_[:0] if y_val.ndim == 2 else np.setdiff1d(self.classes_, y_val)
        return (
            f"on the {len(y_val)} rows that are held out for it, as none has a label of {brief(missing.tolist())}; give"
            " more such rows, or raise validation_fraction"
            if len(missing)
            else ""
        )


def _weights(sample_weight: Any, X: Any) -> Any:
    """Return the weights of rows, ``n`` float64; of none, 1."""
    weights = np.array(_check_sample_weight(sample_weight, X, dtype=np.float64))
    if (weights < 0).any():
        raise ValueError(f"{WEIGHTS} must not be negative, got {weights.min():g} in row {int(weights.argmin())}")
    if not weights.any():
        raise ValueError(f"{WEIGHTS} is 0 in each row; at least two classes, or rows, must count")
    return weights
