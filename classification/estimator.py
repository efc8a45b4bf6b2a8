"""A scikit-learn classifier for tables: a neural network, trained by its loss and then tuned for a scorer."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from metricopt_ext.classification.targets import Target
from metricopt_ext.classification.tuned_network import CANNOT_PASS, Standardised, TunedNetwork
from metricopt_ext.data.halves import Halves, stratified_halves
from metricopt_ext.data.label_parts import label_halves, label_parts
from metricopt_ext.data.rare import rare_groups
from metricopt_ext.utils.words import brief

__all__ = ["CANNOT_PASS", "MetricClassifier", "Standardised"]


class MetricClassifier(ClassifierMixin, TunedNetwork):  # type: ignore[misc]
    """A network that is trained by cross-entropy and then tuned for a scorer, as a black box, by a guided search.

    A part of the training rows is held out for the scorer; the guard leaves the network as it was trained unless the
    gain on them exceeds chance. What chance is, halves of these rows tell if each class has two of them; else a warning
    says so, and any gain is kept. Clones, pipelines, cross-validation and grid searches work as with any classifier.

    Several labels for each row (multi-label) have a logit and a threshold each, ranks (``ordinal``) a logit for each
    cut point. The search then also tries, as a start that costs one query, the thresholds at which as many are
    predicted as there are.

    The search looks first, by four queries, along the offsets that adjust the logits by the classes' shares of the
    training rows, of two classes along a threshold. There is no such line if three or more are about as frequent, or
    one is in no training row.

    Args:
        scoring: What to tune: a scorer's name (``sklearn.metrics.get_scorer_names()``), or
            ``scorer(estimator, X, y) -> float``, where higher is better, which may take ``sample_weight`` and
            ``groups`` too. None: ``balanced_accuracy``, or ``f1_macro`` for several labels.
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
        ordinal: Whether the classes, in ascending order, are ranks.

    Attributes:
        classes_: The labels, ``c``; of several labels, their numbers, ``k``.
        model_: The network, on ``n x features`` as they come, float64; an ordinary torch module, whose first layer
            standardises in float64.
        run_: What the search did (`Result`); None without queries.

    Raises:
        ValueError: From ``fit``, before training: there are fewer than two classes or too few rows, a number is out of
            range, there is no such scorer or there are several, the scorer is not handed ``groups``, or X has missing
            numbers (put an imputer before it in a pipeline) or a feature whose values float32 can't tell apart.
        AdapterError: From ``fit``, before training: there are ``queries``, but no hidden layer to modulate.
        BudgetError: From ``fit``, before training: ``queries`` are too few for a search.
        MetricError: From ``fit``: the scorer fails on the rows held out for it, or is not defined on them.

    Examples:
        >>> X, y = np.random.default_rng(0).normal(size=(90, 3)), np.arange(90) % 2
        >>> MetricClassifier(queries=0, epochs=1, random_state=0).fit(X, y).predict(X).shape
        (90,)
    """

    def __init__(
        self,
        scoring: str | Callable[..., float] | None = None,
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
        ordinal: bool = False,
    ) -> None:
        super().__init__(
            scoring,
            queries=queries,
            dim=dim,
            hidden=hidden,
            epochs=epochs,
            lr=lr,
            batch_size=batch_size,
            validation_fraction=validation_fraction,
            random_state=random_state,
        )
        self.class_weight = class_weight
        self.ordinal = ordinal

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> "MetricClassifier":
        """Train the network on rows ``n x features``, then tune it; returns itself.

        After an error, or Ctrl-C, it is what it was: fitted as before, or not at all.

        Args:
            X: The rows.
            y: Their labels, ``n``, or ``n x k`` of 0 and 1 for several labels each.
            sample_weight: Weights of the rows, ``n``, not negative. They count in the loss, and the scorer is handed
                them if it takes them; rows of weight 0 are left out.
            groups: What part of a population each row is of, ``n``, for a scorer such as the accuracy of the worst
                group. Rows are held out, and halves of them taken, such that each group of each class keeps its share.
        """
        self._fit(X, y, sample_weight, groups)
        return self

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

    @available_if(lambda self: not self.ordinal)  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the logits, ``n x c``, of two classes their difference, ``n``, for rows ``n x features``.

        Ranks have none.
        """
        logits = self._outputs(X).numpy()
        two = self._kind.kind == "classes" and logits.shape[1] == 2
        decided: np.ndarray[Any, Any] = logits[:, 1] - logits[:, 0] if two else logits
        return decided

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags: it takes several labels for each row."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    @property
    def _default_scoring(self) -> str:  # type: ignore[override]
        several = getattr(self, "_kind", None) is not None and self._kind.kind == "multilabel"
        return "f1_macro" if several else "balanced_accuracy"

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
        if self.class_weight is not None or self.ordinal:
            name = "class_weight" if self.class_weight is not None else "ordinal"
            raise ValueError(f"{name}={getattr(self, name)!r} is for one label a row, but y has {y.shape[1]}")
        self.classes_ = np.arange(y.shape[1])

    def _target(self, y: Any) -> tuple[Target, Tensor]:
        if y.ndim == 2:
            self._kind = Target("multilabel", y.shape[1])
            return self._kind, torch.from_numpy(y)
        self.classes_, codes = np.unique(y, return_inverse=True)  # of the rows that count
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; a classifier needs at least two")
        self._kind = Target("ordinal" if self.ordinal else "classes", len(self.classes_))
        return self._kind, torch.from_numpy(codes)

    def _split(self, y: Tensor, groups: Any, seed: int) -> tuple[Any, Any]:
        if self._kind.kind == "multilabel":
            train, held_out = self._split_labels(y, seed)
        else:
            codes = y.numpy()
            kinds = codes if groups is None else _within(codes, groups)
            stratify = next((each for each in (kinds, codes) if np.bincount(each).min() > 1), None)
            try:
                train, held_out = self._held_out(len(y), stratify, seed)
            except ValueError:
                if stratify is codes or stratify is None:
                    raise
                train, held_out = self._held_out(len(y), codes, seed)  # too few rows for each group of each class
        self._warn_of_rare(y, train, held_out)
        return train, held_out

    def _split_labels(self, y: Tensor, seed: int) -> tuple[Any, Any]:
        sizes = [len(part) for part in self._held_out(len(y), None, seed)]  # by its rules for sizes
        train, held_out = (part.numpy() for part in label_parts(y, sizes, seed))
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
            warnings.warn(str(rare), stacklevel=6)
        if len(unseen := self.classes_[(trained == 0).numpy()]) and not several:
            warnings.warn(
                f"the network can't learn {brief(unseen.tolist())}: the single row of such a label is held out for the"
                " scorer; give more such rows, or another random_state",
                stacklevel=6,
            )

    def _halves(self, y: Tensor, groups: Any, seed: int) -> Halves:
        if self._kind.kind == "multilabel":
            return label_halves(y, seed)
        within = None if groups is None else torch.from_numpy(_within(y.numpy(), groups))
        return stratified_halves(y, seed, within)

    def _loss_weights(self, y: Any, weights: Any) -> Any:
        if self.class_weight is None:
            return weights
        codes = np.searchsorted(self.classes_, y)
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            of_classes = np.bincount(codes, weights=weights)
            return weights * (weights.sum() / (len(self.classes_) * of_classes))[codes]
        return weights * compute_class_weight(self.class_weight, classes=self.classes_, y=y)[codes]

    def _lacking(self, y_val: Any) -> str:
        missing = self.classes_[:0] if y_val.ndim == 2 else np.setdiff1d(self.classes_, y_val)
        return (
            f"on the {len(y_val)} rows that are held out for it, as none has a label of {brief(missing.tolist())}; give"
            " more such rows, or raise validation_fraction"
            if len(missing)
            else ""
        )


def _within(codes: Any, groups: Any) -> Any:
    """Number rows by class and, within each, by group: ``n``, from ``n`` each."""
    return np.unique(np.stack([codes, groups], 1), axis=0, return_inverse=True)[1].ravel()
