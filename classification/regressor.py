"""A scikit-learn regressor for tables: a neural network, trained by its loss and then tuned for a scorer."""

from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from metricopt_ext.classification.targets import Target
from metricopt_ext.classification.tuned_network import CANNOT_PASS, TunedNetwork
from metricopt_ext.data.halves import Halves, random_halves, stratified_halves

__all__ = ["CANNOT_PASS", "MetricRegressor"]


class MetricRegressor(RegressorMixin, TunedNetwork):  # type: ignore[misc]
    """A network that is trained by the squared error and then tuned for a scorer, as a black box, by a guided search.

    The scorer may be one that squared errors serve badly: a quantile's (pinball) loss, a rank correlation, a cost that
    is not symmetric. It is asked on rows that are held out; the guard keeps a change only if its gain exceeds chance,
    as two halves of these rows tell.

    Args:
        scoring: What to tune: a scorer's name, or ``scorer(estimator, X, y) -> float``, where higher is better, which
            may take ``sample_weight`` and ``groups`` too. None: ``neg_mean_absolute_error``.
        queries: How often the scorer may be asked; 0 for the network as it was trained.
        dim: How many numbers modulate the hidden layers, at least 1; one that shifts all predictions comes with them.
        hidden: Widths of the hidden layers.
        epochs: Passes through the training rows.
        lr: AdamW's learning rate.
        batch_size: Rows in a batch.
        validation_fraction: Share of the rows that the scorer is asked on, between 0 and 1.
        random_state: Seed of all draws, as scikit-learn has it.

    Attributes:
        model_: The network, on ``n x features`` as they come, float64; it predicts ``(y - mean_) / std_``, ``n x 1``.
        mean_: Mean of the targets that it was trained on.
        std_: Their standard deviation; 1 if they are all the same.
        run_: What the search did (`Result`); None without queries.

    Raises:
        ValueError: From ``fit``, before training: there are too few rows, a number is out of range or missing, there
            is no such scorer or there are several, or the scorer is not handed ``groups``.
        AdapterError: From ``fit``, before training: there are ``queries``, but no hidden layer to modulate.
        BudgetError: From ``fit``, before training: ``queries`` are too few for a search.
        MetricError: From ``fit``: the scorer fails on the rows held out for it.

    Examples:
        >>> X = np.random.default_rng(0).normal(size=(90, 3))
        >>> MetricRegressor(queries=0, epochs=1, random_state=0).fit(X, X.sum(1)).predict(X).shape
        (90,)
    """

    _default_scoring = "neg_mean_absolute_error"

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> "MetricRegressor":
        """Train the network on rows ``n x features``, then tune it; returns itself.

        After an error, or Ctrl-C, it is what it was: fitted as before, or not at all.

        Args:
            X: The rows.
            y: Their targets, ``n`` numbers.
            sample_weight: As in `MetricClassifier.fit`.
            groups: As in `MetricClassifier.fit`; each group keeps its share.
        """
        self._fit(X, y, sample_weight, groups)
        return self

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the prediction for each row, ``n`` float64, for rows ``n x features``."""
        outputs = self._outputs(X)
        predicted: np.ndarray[Any, Any] = outputs[:, 0].numpy() * self.std_ + self.mean_
        return predicted

    def _read(self, X: Any, y: Any) -> tuple[Any, Any]:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        return X, y.astype(np.float64)

    def _target(self, y: Any) -> tuple[Target, Tensor]:
        return Target("regression", 1), torch.from_numpy(y)

    def _scaled(self, y: Tensor) -> Tensor:
        self.mean_ = float(y.mean())
        self.std_ = float(y.std(correction=0)) or 1.0
        return ((y - self.mean_) / self.std_).float()

    def _split(self, y: Tensor, groups: Any, seed: int) -> tuple[Any, Any]:
        stratify = groups if groups is not None and np.bincount(groups).min() > 1 else None
        return self._held_out(len(y), stratify, seed)

    def _halves(self, y: Tensor, groups: Any, seed: int) -> Halves:
        halves = random_halves(len(y), seed) if groups is None else stratified_halves(torch.from_numpy(groups), seed)
        return random_halves(len(y), seed) if isinstance(halves, str) else halves
