"""What the scikit-learn estimators share: a network, trained by its loss and then tuned for a scorer."""

import inspect
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.base import BaseEstimator
from sklearn.metrics import check_scoring
from sklearn.model_selection import train_test_split
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.classification.offsets import target_line
from metricopt_ext.classification.targets import Target, matching_offsets
from metricopt_ext.data.halves import Halves
from metricopt_ext.data.precision import check_told_apart, mean_and_spread
from metricopt_ext.methods.pipeline import check_plan, optimize_metric
from metricopt_ext.methods.prior_starts import moved_by
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.halved import with_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import seeded_streams
from metricopt_ext.utils.words import brief

CPU = torch.device("cpu")
CHUNK = 256  # rows that a prediction runs the network on
WEIGHTS, GROUPS = "sample_weight", "groups"
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


class TunedNetwork(BaseEstimator):  # type: ignore[misc]
    """The estimators' common part; each says what it predicts (`_read`) and what of the rows is held out (`_split`).

    Args:
        scoring: What to tune; see the estimators.
        queries: How often the scorer may be asked.
        dim: How many numbers modulate the hidden layers.
        hidden: Widths of the hidden layers.
        epochs: Passes through the training rows.
        lr: AdamW's learning rate.
        batch_size: Rows in a batch.
        validation_fraction: Share of the rows that the scorer is asked on.
        random_state: Seed of all draws.
    """

    _default_scoring: str
    model_: nn.Sequential
    run_: Any

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

    def get_metadata_routing(self) -> Any:
        """Return which metadata ``fit`` takes, and that the scorer may request them, as scikit-learn routes them."""
        router = MetadataRouter(owner=type(self).__name__).add_self_request(self)
        scorer = self._checked_scorer()
        if hasattr(scorer, "get_metadata_routing"):
            router.add(scorer=scorer, method_mapping=MethodMapping().add(caller="fit", callee="score"))
        return router

    @abstractmethod
    def _read(self, X: Any, y: Any) -> tuple[Any, Any]:
        """Check and keep rows and targets; returns both as arrays, ``n x features`` float64 and as they are scored."""

    @abstractmethod
    def _target(self, y: Any) -> tuple[Target, Tensor]:
        """Return what is predicted, and the targets of its loss, for targets as `_read` returns them."""

    @abstractmethod
    def _split(self, y: Tensor, groups: Any, seed: int) -> tuple[Any, Any]:
        """Return the rows to train on and those that are held out for the scorer."""

    @abstractmethod
    def _halves(self, y: Tensor, groups: Any, seed: int) -> Halves:
        """Return two halves of held-out rows."""

    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> "TunedNetwork":
        """Train and tune; after an error, or Ctrl-C, all is as it was: fitted as before, or not at all."""
        before = dict(vars(self))
        try:
            return self._fitted(X, y, sample_weight, groups)
        except BaseException:
            self.__dict__ = before
            raise

    def _fitted(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> "TunedNetwork":
        given = {WEIGHTS: sample_weight, GROUPS: groups}
        scored_by = self._metadata({name: value for name, value in given.items() if value is not None})
        rows = X  # as they came: a scorer may need the columns' names
        X, y = self._read(X, y)
        weights = _weights(sample_weight, X)
        if groups is not None:
            groups = column_or_1d(groups)
            check_consistent_length(X, groups)
        as_arrays = {WEIGHTS: weights, GROUPS: groups}
        scored_by = {name: as_arrays[of] for name, of in scored_by.items()}
        groups = None if groups is None else np.unique(groups, return_inverse=True)[1]
        if not weights.all():  # as if these rows were not there
            kept = np.flatnonzero(weights)
            rows, X, y, weights = _safe_indexing(rows, kept), X[kept], y[kept], weights[kept]
            groups = groups if groups is None else groups[kept]
            scored_by = {name: _safe_indexing(value, kept) for name, value in scored_by.items()}
        self._check_settings()
        target, y_loss = self._target(y)
        seed = int(check_random_state(self.random_state).randint(2**31))
        train, held_out = self._split(y_loss, groups, seed)
        x_train, y_train = torch.from_numpy(X[train]), self._scaled(y_loss[torch.from_numpy(train)])
        weights = self._loss_weights(y, weights)[train]
        w_train = torch.from_numpy(weights / weights.mean()).float()
        with seeded_streams(seed, CPU):
            self.model_ = self._network(x_train, target.outputs)
            if self.queries:
                self._check_search(seed, target)
            self._train(x_train, y_train, w_train, target)
        self.run_ = None
        if self.queries:
            halves = self._halves(
                y_loss[torch.from_numpy(held_out)], groups if groups is None else groups[held_out], seed
            )
            X_val = _safe_indexing(rows, held_out) if hasattr(rows, "columns") else X[held_out]
            metadata = {name: _safe_indexing(value, held_out) for name, value in scored_by.items()}
            judged = self._scorer(X_val, y[held_out], metadata, self._lacking(y[held_out]))
            self.run_ = self._tuned(x_train, y_train, w_train, target, judged, halves, seed)
        return self

    def _held_out(self, count: int, stratify: Any, seed: int) -> tuple[Any, Any]:
        """Divide rows 0..count-1 into those to train on and those that are held out, by classes if some are given."""
        try:
            train, held_out = train_test_split(
                np.arange(count), test_size=self.validation_fraction, stratify=stratify, random_state=seed
            )
        except ValueError as error:
            raise ValueError(f"n_samples = {count} can't be split for the scorer: {error}") from error
        return train, held_out

    def _scaled(self, y: Tensor) -> Tensor:
        """Return the targets to train on as the loss takes them."""
        return y

    def _check_settings(self) -> None:
        check_integer(0, epochs=self.epochs)
        check_integer(1, batch_size=self.batch_size)
        if not isinstance(self.hidden, Sequence | np.ndarray):
            raise ValueError(f"hidden is {self.hidden!r}; it must be a sequence of widths, such as (64, 32)")
        for width in self.hidden:
            check_integer(1, hidden=width)

    def _loss_weights(self, y: Any, weights: Any) -> Any:
        """Return the weight of each row in the loss, ``n``."""
        return weights

    def _lacking(self, y_val: Any) -> str:
        """Say which labels no held-out row has, and what to do; empty if all are there."""
        return ""

    def _metadata(self, given: dict[str, Any]) -> dict[str, str]:
        """Return which of these the scorer is handed, by the names of its arguments.

        With scikit-learn's metadata routing that is what it requests, else what it takes.
        """
        if not given or not self.queries:
            return {}
        scorer = self._checked_scorer()
        routed = sklearn.get_config()["enable_metadata_routing"] and hasattr(scorer, "get_metadata_routing")
        if routed:
            asked = dict(process_routing(self, "fit", **given).scorer.score)
            found = {argument: name for argument, value in asked.items() for name in given if value is given[name]}
        else:
            found = {name: name for name in given if _takes(scorer, name)}
        handed = set(found.values())
        remedy = (
            f"let it request them by set_score_request({GROUPS}=True)"
            if routed
            else f"write scorer(estimator, X, y, {GROUPS}), or enable scikit-learn's metadata routing and let it"
            " request them"
        )
        if GROUPS in given and GROUPS not in handed:
            raise ValueError(f"groups are given, but the scorer {self._name()} is not handed them; {remedy}")
        if WEIGHTS in given and WEIGHTS not in handed and not routed:  # a request of none is the user's own
            warnings.warn(
                f"the weights count in the loss, but the scorer {self._name()} takes no {WEIGHTS}, so what is tuned"
                " does not have them",
                stacklevel=5,
            )
        return found

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
        adapter = self._attached(seed)
        starts = {THRESHOLDS: Start(adapter.phi)} if _has_thresholds(target) else None
        check_plan(adapter, Metric(lambda: 0.0, maximize=True), queries=self.queries, starts=starts, seed=seed)
        adapter.remove()

    def _attached(self, seed: int) -> Adapter:
        return attach_film(self.model_, dim=self.dim, seed=seed, outputs=Outputs())

    def _scoring(self) -> Any:
        return self._default_scoring if self.scoring is None else self.scoring

    def _checked_scorer(self) -> Any:
        """Return the scorer.

        Raises:
            ValueError: There is no such one, or there are several.
        """
        scoring = self._scoring()
        if isinstance(scoring, list | tuple | set | dict):
            raise ValueError(
                f"scoring is {brief(scoring)}, of several metrics, and the search tunes one; name one of them, or give"
                " a scorer(estimator, X, y) that makes one number of them"
            )
        return check_scoring(self, scoring)

    def _name(self) -> str:
        """The scorer's name, without the address that a function's text has."""
        scoring = self._scoring()
        return str(getattr(scoring, "__name__", scoring))

    def _scorer(
        self, X_val: Any, y_val: Any, metadata: Mapping[str, Any], lacking: str
    ) -> Callable[[Tensor | None], float]:
        """Return the scorer's value on a half of the held-out rows, or on all of them for None."""
        scorer = self._checked_scorer()

        def value_on(half: Tensor | None) -> float:
            try:
                if half is None:
                    value: float = scorer(self, X_val, y_val, **metadata)
                else:
                    rows = half.numpy()
                    own = {name: _safe_indexing(each, rows) for name, each in metadata.items()}
                    value = scorer(self, _safe_indexing(X_val, rows), y_val[rows], **own)
            except ValueError as error:
                if half is None and lacking:
                    raise ValueError(f"{brief(error)}; it is not defined {lacking}") from error
                raise
            if isinstance(value, Mapping):
                raise ValueError(
                    f"it returned a dict of {', '.join(map(str, value))}; it must return one number, such as one of"
                    " them"
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
        judged: Callable[[Tensor | None], float],
        halves: Halves,
        seed: int,
    ) -> Any:
        """Search phi for the scorer on the held-out rows and merge it; returns what the search did."""
        starts = dict[str, Start | StartLine]()
        adapter = self._attached(seed)
        if (line := target_line(adapter, target, y)) is not None:
            starts["prior_line"] = line
        if _has_thresholds(target):
            with torch.no_grad():
                offsets = matching_offsets(self.model_(x), target.shares(y))
            starts[THRESHOLDS] = Start(moved_by(adapter, offsets))
        task = FinetuneTask(
            adapter,
            loss=lambda model, batch: (batch[2] * target.losses(model(batch[0]), batch[1])).mean(),
            batches=TensorBatches(x, y, self.batch_size, more=[w]),
            metric=Metric(lambda: with_halves(judged, halves), maximize=True, bounds=None, name=self._name()),
        )
        run = optimize_metric(task, queries=self.queries, starts=starts or None, seed=seed, callback=Callback())
        adapter.merge()
        return run


def _has_thresholds(target: Target) -> bool:
    return target.kind in ("multilabel", "ordinal")


def _weights(sample_weight: Any, X: Any) -> Any:
    """Return the weights of rows, ``n`` float64; of none, 1."""
    weights = np.array(_check_sample_weight(sample_weight, X, dtype=np.float64))
    if (weights < 0).any():
        raise ValueError(f"{WEIGHTS} must not be negative, got {weights.min():g} in row {int(weights.argmin())}")
    if not weights.any():
        raise ValueError(f"{WEIGHTS} is 0 in each row; at least two classes, or rows, must count")
    return weights


def _takes(scorer: Any, name: str) -> bool:
    """Whether a scorer has an argument of this name; one of scikit-learn's hands it to its metric."""
    metric = getattr(scorer, "_score_func", None)
    if metric is not None and name != WEIGHTS:
        return False  # it refuses any other without metadata routing
    try:
        parameters = inspect.signature(metric or scorer).parameters.values()
    except (TypeError, ValueError):  # a builtin may have none
        return False
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)
