"""The finetuning task: one frozen model with its loss, its batches and its metric (paper, section 3.1)."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.check import check_effect
from metricopt_ext.adapters.context import CONTEXT_NAME
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, MetricError, WeightsError
from metricopt_ext.tasks.batches import Batches, rows_of
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.inputs import entropy, logits_of, refuse_probabilities
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.population import MANY, why_one_by_one
from metricopt_ext.tasks.settings import Settings, Value, Values
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.folded_batch_norm import FoldedBatchNorm
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.weights import checksums
from metricopt_ext.utils.words import and_more, brief, shortened

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class OutputLoss:
    """A surrogate loss in two parts, the second of which ``vmap`` can't handle (data-dependent control flow).

    A `FinetuneTask` computes the outputs of a population together and then each task's loss separately, from the
    outputs and the batch of that task alone.

    Attributes:
        forward: ``forward(model, batch) -> outputs``, a tensor or a tree of tensors.
        loss: ``loss(outputs, batch) -> scalar``.
    """

    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Tensor]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a model on a batch, a scalar."""
        return self.loss(self.forward(model, batch), batch)


@dataclass(frozen=True, eq=False)
class FinetuneTask:
    """A frozen model whose phi is to be finetuned.

    Populations of phi share the frozen weights. ``torch.func.vmap`` computes their losses: if the input is shared, it
    runs the network before the first modulated layer only once, and folds the population into the batch after it.

    Attributes:
        adapter: Handle to the model's adapter.
        metric: What the model is judged by.
        loss: ``loss(model, batch) -> scalar``, the surrogate loss l(phi); an `OutputLoss` if only the model's part of
            it can be computed for a population at once. None, like ``batches``, if no loss is known: a search then
            treats all directions of phi alike.
        batches: ``batches(seed, task, step) -> batch``, the same batch at every call with the same arguments
            (`TensorBatches`, `DatasetBatches`).
        batches_of: The batches of some of the metric's outcomes, by name: all training examples of a class, of a group.
            Each is gone through once, where a search begins, and costs no query: the gradient of an outcome's own loss
            promises which way it goes (`promised`). Only with a loss, for outcomes whose direction is known
            (`Metric`).
        gradients: Only without a loss: gradients in phi computed elsewhere, ``m x d``; their directions shape f's
            kernel and the first design.
        inputs: Only without a loss: batches of the deployment's inputs, without labels. To find directions of phi, the
            entropy of the model's predictions for them stands in for a loss; the model must return logits.
        settings: Settings of inference, which a search tunes before phi: first the free ones, then one after another,
            then combinations. The metric judges the model while they are in force.
        population: Maximum number of phi in one forward pass, at least 1; results can depend on it in the last bits.
            None, as given, chooses it on the first batch: 16 if ``vmap`` computes two phi as each alone, else 1, e.g.
            if control flow depends on data. A batch that fails so is computed one by one.
        at_once: How many phi are computed in one forward pass, at most; 1 without a loss.
        chosen: What was chosen for ``population`` and why, in one line; empty where it is given, or without a loss.
    """

    adapter: Adapter
    _: KW_ONLY
    metric: Metric
    loss: Loss | None = None
    batches: Batches | None = None
    batches_of: Mapping[str, Iterable[Any]] | None = None
    gradients: Tensor | None = None
    inputs: Sequence[Any] | None = None
    settings: Settings | None = None
    population: int | None = None
    at_once: int = field(init=False)
    chosen: str = field(init=False, default="")
    _values: Values = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Check the arguments, and on the first batch that phi acts (see `check_effect`).

        Raises:
            ValueError: ``population`` is below 1, one of ``loss`` and ``batches`` is given without the other, or
                ``gradients`` or ``inputs`` beside them; or the gradients are of another shape, not finite, or 0; or
                there are no inputs; or ``batches_of`` names what is no outcome, or one of no known direction.
            TypeError: ``adapter`` or ``metric`` is something else, ``batches`` can't be replayed, ``loss`` is no
                function of model and batch, or ``settings`` is no `Settings`.
            AdapterError: The model does not return logits for ``inputs``. Or the offsets act on a layer that does not
                give what the model returns, or a coordinate of phi moves no output on the first batch.
            WeightsError: The loss changed the model's weights on the first batch.
        """
        meant = {
            "adapter": (isinstance(self.adapter, Adapter), "what attach_film(model) returns"),
            "metric": (isinstance(self.metric, Metric), "a Metric, as of Metric(function, maximize=True)"),
            "settings": (isinstance(self.settings, Settings | None), "a Settings, with a function that applies them"),
            "batches": (
                self.batches is None or callable(self.batches),
                "a function batches(seed, task, step) -> batch, e.g. DatasetBatches(dataset, batch_size)",
            ),
            "loss": (
                self.loss is None or (callable(self.loss) and not isinstance(self.loss, nn.modules.loss._Loss)),
                "a function loss(model, batch) of a scalar tensor; of a criterion of outputs and targets,"
                " loss=lambda model, batch: criterion(model(batch[0]), batch[1])",
            ),
        }
        for name, (fits, what) in meant.items():
            if not fits:
                raise TypeError(f"{name} is {brief(getattr(self, name))}; it must be {what}")
        if self.population is not None:
            check_integer(1, population=self.population)
        if (self.loss is None) != (self.batches is None):
            given, other = ("loss", "batches") if self.batches is None else ("batches", "loss")
            raise ValueError(f"{given} is given without {other}; give both, or neither for a search without a loss")
        vars(self)["at_once"] = self.population or 1
        told = [name for name in ("loss", "gradients", "inputs") if getattr(self, name) is not None]
        if len(told) > 1:
            raise ValueError(f"{told[1]} are given beside {told[0]}; one says which directions matter, leave one out")
        if (gradients := self.gradients) is not None:
            shape = tuple(gradients.shape) if isinstance(gradients, Tensor) else brief(gradients)
            if shape[1:] != (self.dim,) or not gradients.isfinite().all() or not gradients.any():
                raise ValueError(f"gradients are {shape}; they must be m x {self.dim} finite numbers, not all 0")
        if self.inputs is not None:
            self._check_inputs(self.inputs)
        if self.batches_of is not None:
            self._check_batches_of(self.batches_of)
        if self.loss is None or self.batches is None:
            return
        check_effect(self.adapter, self.loss, partial(self.batches, 0, 0, 0))
        if self.population is None:
            self._choose_population()

    def _choose_population(self) -> None:
        """Choose how many phi are computed at once, as the first batches of two tasks show it."""

        def compute(phi: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
            with seeded_streams(0, phi.device):
                batches = [self.batches(0, row, 0) for row in rows]  # type: ignore[misc]
                return (self._together if len(rows) > 1 else self._one_by_one)(phi, batches, False)

        why = why_one_by_one(self.adapter.model, self.origin(), compute)
        number, why = (1, why) if why else (MANY, "two at once have the losses and gradients of each alone")
        vars(self).update(at_once=number, chosen=f"population {number}: {why}")

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        if not isinstance(inputs, Sequence) or not len(inputs):
            raise ValueError(f"inputs are {brief(inputs)}; they must be a list of batches, e.g. x.split(100)")
        with torch.enable_grad(), seeded_streams(0, self.origin().device):  # which tells what made them
            refuse_probabilities(logits_of(self.adapter.model(inputs[0])))
        check_effect(self.adapter, entropy, lambda: inputs[0])

    def _check_batches_of(self, batches_of: Mapping[str, Iterable[Any]]) -> None:
        if not isinstance(batches_of, Mapping):
            raise TypeError(
                f"batches_of is {brief(batches_of)}; it must map outcomes to batches, {{NAME: [batch, ...]}}"
            )
        for name, batches in batches_of.items():
            if not isinstance(batches, Iterable) or isinstance(batches, Iterator):  # which is at its end the next time
                raise TypeError(f"batches_of has {brief(batches)} for {name!r}; it must be a list of batches")
        if self.loss is None:
            raise ValueError("batches_of are given without a loss, by which they would promise something; give both")
        made = self.metric.combination
        for name in batches_of.keys() - self.metric.subject_to.keys():
            if made is None or not made.combines(name):
                raise ValueError(
                    f"batches_of has {name!r}, but metric {self.metric.name!r} has no such outcome, nor is it subject"
                    " to one; leave it out"
                )
            if self.metric.outcome_sign(name) is None:
                remedy = f"Metric(..., directions={{{name!r}: True}}), or False"
                raise ValueError(f"batches_of has {name!r}, of which nothing tells whether higher is better; {remedy}")

    def check_outcomes(self, outcomes: Collection[str]) -> None:
        """Refuse `batches_of` that names what the metric does not tell.

        Args:
            outcomes: Names of what it tells.

        Raises:
            ValueError: It does.
        """
        if strange := sorted((self.batches_of or {}).keys() - outcomes):
            known = shortened(list(outcomes))
            raise ValueError(f"batches_of has {strange[0]!r}, but metric {self.metric.name!r} tells {known}; rename it")

    def probing(self) -> "FinetuneTask":
        """Return the task by whose loss directions of phi are looked for: without one, the entropy of `inputs`."""
        if self.loss is not None or (inputs := self.inputs) is None:
            return self

        def cycled(seed: int, task: int, step: int) -> Any:
            return inputs[(seed + task + step) % len(inputs)]

        return self._with(loss=entropy, batches=cycled)

    def with_settings(self, settings: Settings | None) -> "FinetuneTask":
        """Return the same task with other settings of inference, or without any."""
        return self._with(settings=settings, _values={})

    def with_values(self, values: Values) -> "FinetuneTask":
        """Return the same task whose starts have these settings of inference, where they don't say others.

        Raises:
            ValueError: It has no such setting, or that can't be such a value.
        """
        return self._with(_values=self.values_of(values))

    def values_of(self, values: Values) -> dict[str, Value]:
        """Return all settings of inference at a start that says some of them, by name; none of a task without any.

        Raises:
            ValueError: It has no such setting, or that can't be such a value.
        """
        if self.settings is not None:
            return self.settings.complete({**self.settings.first, **self._values, **values})
        if values:
            raise ValueError(f"settings are {brief(dict(values))}, but the task has none; give it settings=")
        return {}

    @contextmanager
    def at(self, start: Start) -> Iterator[nn.Module]:
        """Make the model be a start for a while, in evaluation mode, its settings of inference in force, and yield it.

        Raises:
            AdapterError, ValueError: The start does not fit the model, or has other settings than the task.
            MetricError: Its settings can't be applied.
        """
        with self.adapter.applied(start) as model, evaluating(model), self.in_force(start.settings, model):
            yield model

    @contextmanager
    def in_force(self, values: Values, model: nn.Module) -> Iterator[dict[str, Value] | None]:
        """Have settings of inference in force for a model, and yield all of them; None of a task without any.

        Raises:
            ValueError: As from `values_of`.
            MetricError: They can't be applied.
        """
        values = self.values_of(values)
        with ExitStack() as held:
            if self.settings is not None:
                try:
                    held.enter_context(self.settings.applied(values, model))
                except Exception as error:
                    what = f"settings {_shown(values)} can't be applied"
                    raise MetricError(f"{what}: {type(error).__name__}: {brief(error)}") from error
            yield values or None

    @contextmanager
    def keeping_weights(self) -> Iterator[None]:
        """Make the model be as it was trained for a run, at phi = 0, and refuse a run that changed its weights.

        Raises:
            WeightsError: The metric or the loss changed a parameter other than phi, whether that left a trace or not.
        """
        before = checksums(self.adapter.model)
        with self.adapter.applied(Start(self.origin())):
            yield
        after = checksums(self.adapter.model)
        changed = [name for name in before if after.get(name) != before[name] and name.split(".")[0] != CONTEXT_NAME]
        if changed:
            raise WeightsError(
                f"metric {self.metric.name!r} or the loss changed the model's {and_more(changed)}, so that values"
                " may be of another model. Evaluate a copy of the model, and let the loss change nothing"
            )

    def judged_by(self, metric: Metric) -> "FinetuneTask":
        """Return the same task with another metric."""
        return self._with(metric=metric)

    def copied(self) -> "FinetuneTask":
        """Return the same task on a copy of the model, whose weights can be changed freely."""
        return self._with(adapter=Adapter(copy.deepcopy(self.adapter.model)))

    def _with(self, **changes: Any) -> "FinetuneTask":
        """Return a copy with other attributes; the first batch, which tells the same, is not run again."""
        changed = object.__new__(type(self))
        vars(changed).update({**vars(self), **changes})
        return changed

    @property
    def dim(self) -> int:
        """The dimension d of phi."""
        return self.adapter.dim

    def origin(self) -> Tensor:
        """Return phi = 0, ``d``: the model as it was trained."""
        return torch.zeros_like(self.adapter.phi.detach())

    def starts(self, std: float, seed: int, indices: Sequence[int]) -> Tensor:
        """Draw random starts phi_0 ~ N(0, std^2 I), ``n x d``, one for each task index."""
        drawn = [torch.randn(self.dim, generator=generator(seed, "start", index)) * std for index in indices]
        return torch.stack(drawn).to(self.origin())

    def loss_and_gradient(
        self, phi: Tensor, seed: int, indices: Sequence[int], step: int, *, differentiable: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return each task's loss l(phi_t) on its own batch, ``n``, and its gradient, ``n x d``.

        Args:
            phi: One vector per task, ``n x d``.
            seed: Seed of the batches.
            indices: The n task indices.
            step: The step t.
            differentiable: Whether both can be differentiated further, with respect to whatever phi was computed from;
                the loss must then be twice differentiable, and the model without gradient checkpointing.

        Raises:
            AdapterError: The loss is no scalar, has no gradient in phi, or can't be computed for several phi at once;
                or there is none; or ``differentiable`` meets gradient checkpointing.
            FloatingPointError: A loss or a gradient is not finite, as with an empty batch.
        """
        if self.batches is None:
            raise AdapterError(
                "this needs gradients of a loss, and the task has none; give FinetuneTask loss= and batches=, or search"
                " by GuidedTrustRegion() or CMAES(), which do without"
            )
        parts = []
        for at in range(0, len(indices), self.at_once):  # one population's batches and activations are held at once
            some = slice(at, at + self.at_once)
            parts.append(
                self._part(phi[some], [self.batches(seed, each, step) for each in indices[some]], differentiable)
            )
        loss, gradient = (torch.cat(each) for each in zip(*parts, strict=True))
        finite = loss.isfinite() & gradient.isfinite().all(dim=1)
        if not finite.all():
            worst = indices[int((~finite).nonzero()[0])]
            advice = "lower the lr" if step else "look at the loss and its batch"
            raise FloatingPointError(f"the loss or its gradient of task {worst} is not finite at step {step}; {advice}")
        return loss, gradient

    def promised(self, phi: Tensor) -> dict[str, Tensor]:
        """Return along which direction, ``d``, each outcome rises by what its own loss promises, by the outcome's name.

        That is the gradient of the mean loss over its own examples where lower is better, and minus that where higher
        is: a recall rises where the loss of its class falls.

        Args:
            phi: Where, ``d``; the model holds what else there is of the start.

        Raises:
            ValueError: `batches_of` has no batch of an outcome, or batches whose examples can't be counted.
            AdapterError, FloatingPointError: As from `loss_and_gradient`.
        """
        found = {}
        for name, batches in (self.batches_of or {}).items():
            whole, rows = torch.zeros_like(phi), 0
            for batch in batches:
                with seeded_streams(0, phi.device):
                    _, gradient = self._one_by_one(phi[None], [batch], False)
                whole, rows = whole + gradient[0] * (own := rows_of(batch)), rows + own
            if not rows:
                raise ValueError(f"batches_of has no batch of {name!r}; leave it out, which promises nothing")
            if not whole.isfinite().all():
                raise FloatingPointError(f"the gradient of the loss of {name!r} is not finite; look at its batches")
            sign = self.metric.outcome_sign(name)
            assert sign is not None  # as it was checked
            found[name] = sign * whole / rows
        return found

    def check_loss(self, seed: int, tasks: int, *, differentiable: bool = False) -> None:
        """Compute losses and gradients at phi = 0 in the way that a search will, so that what fails costs no query.

        Without a loss, and without inputs for one, there is nothing to check.

        Args:
            seed: Seed of the batches.
            tasks: How many are computed, together unless ``population`` is 1; two show whether several can be.
            differentiable: As of `loss_and_gradient`.

        Raises:
            AdapterError, FloatingPointError: As from `loss_and_gradient`.
        """
        own = self.probing()
        if own.loss is not None:
            phi = self.origin().expand(tasks, -1)
            own.loss_and_gradient(phi, seed, range(tasks), 0, differentiable=differentiable)

    def first_loss(self, seed: int) -> float | None:
        """Return the loss at phi = 0 on the first batch of the first task, by which runs on other data are noticed.

        What it draws at random is the same each time, and nobody's stream is moved. None without a loss or inputs.
        """
        own, phi = self.probing(), self.origin()
        if own.batches is None:
            return None
        with seeded_streams(0, phi.device), self.adapter.using(phi) as model:
            return float(_loss_of(own.loss, model, own.batches(seed, 0, 0)).detach())

    def evaluate(self, at: Start | Tensor, purpose: str, where: str = "") -> Evaluation:
        """Evaluate the metric at a start, its settings of inference in force; one query.

        Args:
            at: The start; or phi alone, ``d``, where the model holds what else there is of it.
            purpose: What the ledger books the query under.
            where: What an error's message says of the point.

        Raises:
            AdapterError, ValueError: The start does not fit the model, or has other settings than the task.
            MetricError: The metric failed.
            BudgetError: The budget is spent.
        """
        start = at if isinstance(at, Start) else replace(self.adapter.as_start(), phi=at)
        self.adapter.check(start)

        def judged() -> Evaluation:
            with self.adapter.applied(start):
                return self.judge(start, where)

        return self.metric.ask(judged, purpose, start.phi, start)

    def judge(self, start: Start, where: str = "") -> Evaluation:
        """Judge the model, which holds a start already, by the metric, without booking a query; see `evaluate`.

        So a metric that exports the model, or reads its state dict, judges the right one.
        """
        model = self.adapter.model
        try:
            with self.in_force(start.settings, model) as values:
                return self.metric.judge(model, *([] if values is None else [values]))  # a subclass may take no more
        except MetricError as error:
            place = [where, f"|phi| = {start.phi.norm():.3g}", _shown(self.values_of(start.settings))]
            raise type(error)(f"{error} ({', '.join(filter(None, place))})") from error

    def look(self, start: Start) -> dict[str, float]:
        """Return what the metric's ``also`` has of a start (`Metric.look`)."""
        with self.adapter.applied(start) as model, self.in_force(start.settings, model) as values:
            return self.metric.look(model, values)

    def _part(self, phi: Tensor, batches: Sequence[Any], differentiable: bool) -> tuple[Tensor, Tensor]:
        """Compute a population; if it fails, one by one where it was chosen, or say why a given one can't be done.

        Of what fails for one phi alone, its own error is raised.
        """
        if len(phi) == 1 or self.at_once == 1:
            return self._one_by_one(phi, batches, differentiable)
        try:
            return self._together(phi, batches, differentiable)
        except Exception as error:
            found = self._one_by_one(phi, batches, differentiable)
            if self.population is None:
                return found
            raise AdapterError(
                f"loss(model, batch) can be computed for one phi, but not for {len(phi)} at once by torch.func.vmap"
                f" ({type(error).__name__}: {brief(error)}); make the task with population=1"
            ) from error

    def _one_by_one(self, phi: Tensor, batches: Sequence[Any], differentiable: bool) -> tuple[Tensor, Tensor]:
        rows = []
        for own, batch in zip(_followed(phi, differentiable), batches, strict=True):
            with self.adapter.using(own) as model:  # also in the backward pass, which may run checkpointed layers again
                rows.append(self._with_gradient(_loss_of(self.loss, model, batch), own, differentiable))
        losses, gradients = (torch.stack(each) for each in zip(*rows, strict=True))
        return losses, gradients

    def _together(self, phi: Tensor, batches: Sequence[Any], differentiable: bool) -> tuple[Tensor, Tensor]:
        phi, stacked = _followed(phi, differentiable), tree_map(lambda *leaves: torch.stack(leaves), *batches)
        forward = self.loss.forward if isinstance(self.loss, OutputLoss) else partial(_loss_of, self.loss)

        def outputs_of(phi: Tensor, batch: Any) -> Any:
            with self.adapter.using(phi) as model:
                return forward(model, batch)

        with FoldedBatchNorm():
            losses = torch.func.vmap(outputs_of)(phi, stacked)
        if isinstance(self.loss, OutputLoss):
            outputs = [tree_map(lambda leaf, row=row: leaf[row], losses) for row in range(len(phi))]
            losses = torch.stack([_loss_of(self.loss.loss, *each) for each in zip(outputs, batches, strict=True)])
        return self._with_gradient(losses, phi, differentiable)

    def _with_gradient(self, losses: Tensor, phi: Tensor, differentiable: bool) -> tuple[Tensor, Tensor]:
        """Return losses, and their gradients in phi, of its shape.

        Raises:
            AdapterError: There are none.
        """
        with ExitStack() as held:
            for layer in map(self.adapter.model.get_submodule, self.adapter.layers) if differentiable else ():
                refuse = partial(_refuse_another_pass, type(self.adapter.model).__name__)
                held.callback(layer.register_forward_pre_hook(refuse).remove)
            try:
                (gradient,) = torch.autograd.grad(losses.sum(), phi, create_graph=differentiable)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise AdapterError(
                    f"loss(model, batch) has no gradient in phi: {brief(error)}; compute it from the model's output by"
                    " differentiable operations, with gradients enabled; for a model without gradients, as a quantised"
                    " one, strategy=CMAES() of metricopt_ext.search.direct asks for none"
                ) from error
        return losses if differentiable else losses.detach(), gradient


def _refuse_another_pass(model: str, layer: nn.Module, inputs: Any) -> None:
    """Refuse a backward pass that runs a modulated layer again, when phi, and those of later passes, are gone.

    Raises:
        AdapterError: It does, as under gradient checkpointing.
    """
    raise AdapterError(
        f"{model} uses gradient checkpointing, which runs layers again in a backward pass: gradients that are"
        " differentiated further would be of another phi; turn it off, as by model.gradient_checkpointing_disable()"
    )


def _shown(values: Values) -> str:
    return ", ".join(f"{name} {brief(value)}" for name, value in values.items())


def _followed(phi: Tensor, differentiable: bool) -> Tensor:
    """Return phi as autograd follows it: as it was computed, if gradients of gradients go back to what it is of."""
    return phi if differentiable and phi.requires_grad else phi.detach().requires_grad_(True)


def _loss_of(function: Any, made: Any, batch: Any) -> Tensor:
    """Return the loss of a model, or of outputs, on a batch.

    Raises:
        AdapterError: It is no scalar tensor.
    """
    loss = function(made, batch)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise AdapterError(f"loss(model, batch) returned {shape}; it must return a scalar tensor")
    return loss
