"""The embeddings that a metric judges: of a model, kept if settings are tuned, and post-processed as these say."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.post_processing import PostProcessing, Whitening, each_alone, post_processed
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.kept_outputs import KeptOutputs, circumstances, digest_of_model
from metricopt_ext.utils.words import brief

Raw = TypeVar("Raw")

_NUMBERS = count()


class Processing(NamedTuple):
    """A post-processing, and the principal components that it needs.

    Attributes:
        post: What is done.
        whitening: Of the model that is judged; None if it needs none.
        unscaled: Whether the embeddings are given before the model's own scaling to length 1, which is done here then.
    """

    post: PostProcessing = PostProcessing()
    whitening: Whitening | None = None
    unscaled: bool = False

    def of(self, embeddings: Tensor, queries: Tensor | None = None) -> Tensor:
        """Return embeddings as they are searched; see `post_processed`."""
        return post_processed(self._scaled(embeddings), self.post, self.whitening, queries)

    def searched(self, embeddings: Tensor, queries: Tensor | None) -> tuple[Tensor, int]:
        """Return what is searched, and the ``augmentation`` that `recall_at_k` has yet to do.

        Where embeddings search each other, an item has no one vector: each query is left out of what it finds.
        """
        if self.post.augmentation and queries is None:
            return self.alone(embeddings), self.post.augmentation
        return self.of(embeddings, queries), 0

    def alone(self, embeddings: Tensor) -> Tensor:
        """Return the same before any is mixed with its neighbours; see `each_alone`."""
        return each_alone(self._scaled(embeddings), self.post, self.whitening)

    def _scaled(self, embeddings: Tensor) -> Tensor:
        return F.normalize(embeddings) if self.unscaled and not self.post.whitening else embeddings


class JudgedEmbeddings(Generic[Raw]):
    """A metric's function of the model, whose embeddings can be post-processed by settings for a while.

    Args:
        embed: Returns what a model makes of the metric's data, which nothing here changes.
        value: Returns the metric's value, of what ``embed`` returned, post-processed.
        embeddings_of: Returns all embeddings, ``n x d``, of what ``embed`` returned.
        embed_inputs: Returns the embeddings, ``n x d``, of a batch of further inputs. Metrics that give the same
            function share what it returns.
        augments: Whether the metric can be judged by a database augmentation.
        models: Returns all models that the embeddings depend on, of the model that is judged.
        whole_inputs: Whether further inputs are embedded all at once, as a dataset.
        unscaled: Whether ``embed`` leaves out the scaling of a model to length 1 (`Processing`).
    """

    def __init__(
        self,
        embed: Callable[[nn.Module], Raw],
        value: Callable[[Raw, Processing], Any],
        *,
        embeddings_of: Callable[[Raw], Tensor],
        embed_inputs: Callable[[nn.Module, Any], Tensor],
        augments: bool = True,
        models: Callable[[nn.Module], Iterable[nn.Module]] = lambda model: (model,),
        whole_inputs: bool = False,
        unscaled: Callable[[nn.Module], bool] = lambda model: False,
    ) -> None:
        self._embed, self._value, self._models, self._whole = embed, value, models, whole_inputs
        self._unscaled = unscaled
        self._embeddings_of, self._embed_inputs = embeddings_of, embed_inputs
        self.augments = augments
        self._post, self._whiten_on = PostProcessing(), None
        self._kept: KeptOutputs | None = None
        self._labelled: Sequence[tuple[Any, Tensor]] = ()
        self._number = next(_NUMBERS)  # of the data, which a copy has too

    def __call__(self, model: nn.Module) -> Any:
        """Return the metric's value of a model."""
        return self.judged(model, self._value)

    def judged(self, model: nn.Module, value: Callable[[Raw, Processing], Any]) -> Any:
        """Return another value of the same embeddings, post-processed alike."""
        digest = self._digest(model)
        return value(self._raw(model, digest), self._processing(model, digest))

    def processing(self, model: nn.Module) -> Processing:
        """Return what is done to a model's embeddings now, with their principal components if it needs them."""
        return self._processing(model, self._digest(model))

    @contextmanager
    def processed(
        self, post: PostProcessing, whiten_on: Any, kept: KeptOutputs, labelled: Sequence[tuple[Any, Tensor]] = ()
    ) -> Iterator[None]:
        """Post-process what is judged inside the ``with`` block.

        Args:
            post: What is done.
            whiten_on: What a whitening is fitted on: inputs, batches of inputs, pairs of such a batch and its labels,
                or a metric, for the embeddings of its data.
            kept: Keeps what models gave for these metrics and this ``whiten_on``, in memory.
            labelled: Inputs and their classes, for a covariance within classes.
        """
        before = self._post, self._whiten_on, self._kept, self._labelled
        self._post, self._whiten_on, self._kept, self._labelled = post, whiten_on, kept, labelled
        try:
            yield
        finally:
            self._post, self._whiten_on, self._kept, self._labelled = before

    def _digest(self, model: nn.Module) -> str:
        return "" if self._kept is None else self._dependent_on(model)

    def _dependent_on(self, model: nn.Module) -> str:
        """Return all that embeddings depend on but the data."""
        models = list(self._models(model))
        devices = [each.device for other in models for each in (*other.parameters(), *other.buffers())]
        digests = map(digest_of_model, models)
        return " ".join([*digests, circumstances(devices[0] if devices else torch.device("cpu"))])

    def _processing(self, model: nn.Module, digest: str) -> Processing:
        whitening = self._whitening(model, digest) if self._post.whitening else None
        return Processing(self._post, whitening, self._unscaled(model))

    def _raw(self, model: nn.Module, digest: str) -> Raw:
        if self._kept is None:
            return self._embed(model)
        raw: Raw = self._kept.of(f"{digest} embeddings {self._number}", lambda: self._embed(model))
        return raw

    def _whitening(self, model: nn.Module, digest: str) -> Whitening:
        assert self._kept is not None
        own, kept, labelled = judged_by(self._whiten_on), self._kept, self._labelled

        def given() -> Tensor:
            batches = [self._whiten_on] if self._whole else _batches(self._whiten_on)
            return _all(self._embed_inputs(model, each) for each in batches)

        if own is None:
            key = f"{digest} inputs by {id(self._embed_inputs)}"
            found = kept.of(key, given)
        else:
            key = f"{own._dependent_on(model)} embeddings {own._number}"
            found = own._embeddings_of(kept.of(key, lambda: own._embed(model)))
        if self._post.covariance == "within":

            def parts() -> Whitening:
                return Whitening.within(*((self._embed_inputs(model, x), y) for x, y in labelled))

            return kept.of(f"{key} within", parts)  # type: ignore[no-any-return]
        whitening: Whitening = kept.of(f"{key} whitening", lambda: Whitening.of(found), by_pass=False)
        return whitening


def judged_by(metric: Any) -> JudgedEmbeddings[Any] | None:
    """Return what a metric judges by, None of one that is no retrieval metric of this package."""
    function = metric.function if isinstance(metric, Metric) else None
    while function is not None and not isinstance(function, JudgedEmbeddings):
        function = getattr(function, "function", None)  # of one that counts the calls
    return function


def _batches(given: Any) -> Iterator[Any]:
    """Yield batches of inputs, without any labels beside them."""
    for each in [given] if isinstance(given, Tensor) else given:
        yield each[0] if isinstance(each, tuple | list) else each


def _all(parts: Iterable[Tensor]) -> Tensor:
    """Return embeddings of all inputs, on the CPU.

    Raises:
        DataError: There are none, or one is no ``b x d``.
    """
    found = [each.detach().cpu() for each in parts]
    if not found:
        raise DataError("there are no inputs to fit a whitening on; they must be iterable anew for each model")
    if wrong := [each for each in found if each.dim() != 2]:
        raise DataError(
            f"the inputs for a whitening have embeddings of shape {brief(tuple(wrong[0].shape))}, not b x d"
        )
    return torch.cat(found)
