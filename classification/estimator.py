"""A scikit-learn classifier for tables: a neural network, trained by its loss and then tuned for a scorer."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import check_scoring
from sklearn.model_selection import train_test_split
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.data.halves import Halves, stratified_halves
from metricopt_ext.data.precision import check_told_apart
from metricopt_ext.data.rare import rare_groups
from metricopt_ext.methods.pipeline import check_plan, optimize_metric
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric, with_halves
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.utils.seeding import seeded_streams
from metricopt_ext.utils.words import brief

CPU = torch.device("cpu")


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
        std = torch.where(x.amax(0) > x.amin(0), x.std(0, correction=0), 1)
        self.register_buffer("mean", x.mean(0))
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

    Args:
        scoring: What to tune: a scorer's name (``sklearn.metrics.get_scorer_names()``), or
            ``scorer(estimator, X, y) -> float``, where higher is better.
        queries: How often the scorer may be asked, at least `GuidedTrustRegion().least_queries` of all of phi; 0 for
            the network as it was trained.
        dim: How many numbers modulate the hidden layers, at least 1; an offset for each class comes with them.
        hidden: Widths of the hidden layers.
        epochs: Passes through the training rows.
        lr: AdamW's learning rate.
        batch_size: Rows in a batch.
        validation_fraction: Share of the rows that the scorer is asked on, between 0 and 1.
        random_state: Seed of all draws, as scikit-learn has it.

    Attributes:
        classes_: The labels, ``c``.
        model_: The network, on ``n x features`` as they come, float64; an ordinary torch module, whose first layer
            standardises in float64.
        run_: What the search did (`Result`); None without queries.

    Raises:
        ValueError: From ``fit``, before training: there are fewer than two classes or too few rows, a number is out of
            range, there is no such scorer, or X has missing numbers (put an imputer before it in a pipeline) or a
            feature whose values float32 can't tell apart.
        AdapterError: From ``fit``, before training: there are ``queries``, but no hidden layer to modulate.
        BudgetError: From ``fit``, before training: ``queries`` are too few for a search.
        MetricError: From ``fit``: the scorer fails on the rows held out for it, or is not defined on them.

    Example:
        >>> X, y = np.random.default_rng(0).normal(size=(90, 3)), np.arange(90) % 2
        >>> MetricClassifier(queries=0, epochs=1, random_state=0).fit(X, y).predict(X).shape
        (90,)
    """

    def __init__(
        self,
        scoring: str | Callable[..., float] = "balanced_accuracy",
        *,
        queries: int = 100,
        dim: int = 16,
        hidden: Sequence[int] = (64, 32),
        epochs: int = 30,
        lr: float = 3e-3,
        batch_size: int = 64,
        validation_fraction: float = 0.3,
        random_state: Any = None,
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

    def fit(self, X: Any, y: Any) -> "MetricClassifier":
        """Train the network on rows ``n x features`` with labels ``n``, then tune it; returns itself.

        After an error, or Ctrl-C, it is what it was: fitted as before, or not at all.
        """
        before = dict(vars(self))
        try:
            return self._fitted(X, y)
        except BaseException:
            self.__dict__ = before
            raise

    def _fitted(self, X: Any, y: Any) -> "MetricClassifier":
        rows = X  # as they came: a scorer may need the columns' names
        X, y = validate_data(self, X, y, dtype=np.float64)
        try:
            self.classes_, codes = np.unique(y, return_inverse=True)
        except TypeError as error:  # they can't be sorted
            kinds = sorted({type(label).__name__ for label in y.tolist()})
            raise ValueError(f"y has labels of the types {', '.join(kinds)}; make them all of one") from error
        check_classification_targets(y)
        check_integer(0, epochs=self.epochs)
        check_integer(1, batch_size=self.batch_size)
        if not isinstance(self.hidden, Sequence | np.ndarray):
            raise ValueError(f"hidden is {self.hidden!r}; it must be a sequence of widths, such as (64, 32)")
        for width in self.hidden:
            check_integer(1, hidden=width)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; a classifier needs at least two")
        stream = check_random_state(self.random_state)
        seed = int(stream.randint(2**31))
        stratify = codes if np.bincount(codes).min() > 1 else None
        try:
            train, held_out = train_test_split(
                np.arange(len(y)), test_size=self.validation_fraction, stratify=stratify, random_state=seed
            )
        except ValueError as error:
            raise ValueError(f"n_samples = {len(y)} can't be split for the scorer: {error}") from error
        x_train, y_train = torch.from_numpy(X[train]), torch.from_numpy(codes[train])
        counts = np.bincount(codes[held_out], minlength=len(self.classes_)).tolist()
        if self.queries and (rare := rare_groups("class", dict(zip(map(str, self.classes_), counts, strict=True)))):
            warnings.warn(str(rare), stacklevel=3)
        if len(unseen := np.setdiff1d(self.classes_, y[train])):
            warnings.warn(
                f"the network can't learn {brief(unseen.tolist())}: the single row of such a label is held out for the"
                " scorer; give more such rows, or another random_state",
                stacklevel=3,
            )
        with seeded_streams(seed, CPU):
            self.model_ = self._network(x_train)
            if self.queries:
                self._check_search(seed)
            self._train(x_train, y_train)
        halves = stratified_halves(torch.from_numpy(codes[held_out]), seed)
        X_val = _safe_indexing(rows, held_out) if hasattr(rows, "columns") else X[held_out]
        self.run_ = self._tuned(x_train, y_train, X_val, y[held_out], halves, seed) if self.queries else None
        return self

    def predict_proba(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the probability of each class, ``n x c``, for rows ``n x features``."""
        check_is_fitted(self, "model_")
        x = torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))  # a copy: a frame's may be read-only
        with torch.no_grad():
            probabilities: np.ndarray[Any, Any] = self.model_(x).double().softmax(1).numpy()
        bad = np.flatnonzero(~np.isfinite(probabilities).all(1))
        if len(bad):
            raise ValueError(f"row {bad[0]} of X has a value too large, beside those that the network was trained on")
        return probabilities

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the label of each row, ``n``, for rows ``n x features``."""
        probabilities = self.predict_proba(X)
        predicted: np.ndarray[Any, Any] = self.classes_[probabilities.argmax(1)]
        return predicted

    def _network(self, x: Tensor) -> nn.Sequential:
        """Make the network, whose first layer standardises the features."""
        layers: list[nn.Module] = [Standardised(x)]
        for a, b in zip((x.shape[1], *self.hidden), self.hidden, strict=False):
            layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU()]
        width = self.hidden[-1] if len(self.hidden) else x.shape[1]
        return nn.Sequential(*layers, nn.Linear(width, len(self.classes_)))

    def _train(self, x: Tensor, y: Tensor) -> None:
        optimizer = torch.optim.AdamW(self.model_.parameters(), lr=self.lr)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(x)).split(self.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(self.model_(x[rows]), y[rows]).backward()
                optimizer.step()
        if not all(bool(parameter.isfinite().all()) for parameter in self.model_.parameters()):
            raise ValueError(f"training with lr={self.lr!r} ended in weights that are not finite; lower it")

    def _check_search(self, seed: int) -> None:
        """Refuse before training what the search would refuse after it."""
        check_scoring(self, self.scoring)
        adapter = self._attached(seed)
        check_plan(adapter, Metric(lambda: 0.0, maximize=True), queries=self.queries, seed=seed)
        adapter.remove()

    def _attached(self, seed: int) -> Adapter:
        return attach_film(self.model_, dim=self.dim, seed=seed, outputs=Outputs())

    def _name(self) -> str:
        """The scorer's name, without the address that a function's text has."""
        return str(getattr(self.scoring, "__name__", self.scoring))

    def _tuned(self, x: Tensor, y: Tensor, X_val: Any, y_val: Any, halves: Halves, seed: int) -> Any:
        """Search phi for the scorer on the held-out rows and merge it; returns what the search did."""
        scorer, missing = check_scoring(self, self.scoring), np.setdiff1d(self.classes_, y_val)

        def value_on(half: Tensor | None) -> float:
            lacking = (
                f"on the {len(y_val)} rows that are held out for it, as none has a label of"
                f" {brief(missing.tolist())}; give more such rows, or raise validation_fraction"
            )
            try:
                if half is None:
                    value: float = scorer(self, X_val, y_val)
                else:
                    value = scorer(self, _safe_indexing(X_val, half.numpy()), y_val[half.numpy()])
            except ValueError as error:
                if half is None and len(missing):
                    raise ValueError(f"{brief(error)}; it is not defined {lacking}") from error
                raise
            if half is None and len(missing) and isinstance(value, float) and math.isnan(value):
                raise ValueError(f"it is nan {lacking}")
            return value

        adapter = self._attached(seed)
        task = FinetuneTask(
            adapter,
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            batches=TensorBatches(x, y, self.batch_size),
            metric=Metric(lambda: with_halves(value_on, halves), maximize=True, bounds=None, name=self._name()),
        )
        run = optimize_metric(task, queries=self.queries, seed=seed, watcher=Watcher())
        adapter.merge()
        return run
