"""Starts of an embedder that whiten its embeddings, without labels or with them, by its last linear layer."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.context import CONTEXT_NAME
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError
from metricopt_ext.retrieval.merge_whitening import merge_whitening, whitening_layer
from metricopt_ext.retrieval.post_processing import PostProcessing, Whitening
from metricopt_ext.tasks.inputs import each_batch
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.weights import same_bits


@torch.no_grad()
def whitening_start(task: FinetuneTask, inputs: Iterable[Any]) -> Start:
    """Return the model with its embeddings whitened by PCA, by its last linear layer (Jegou & Chum, 2012, section 3).

    It is the setting ``whitening`` at 1 of `retrieval_settings`, without the scaling to length 1 that is done after it;
    where the metric compares by cosine, the two are the same. Directions in which embeddings do not vary become 0.

    Args:
        task: Its model's last linear layer is replaced in the start, not in the model.
        inputs: Batches of inputs, without labels, of more examples than the embeddings have dimensions.

    Raises:
        AdapterError: The embeddings are no linear layer's output, or that layer has no bias, which takes the mean.
        DataError: The inputs are too few, or their embeddings do not differ (`Whitening`).
    """
    batches, model = _batches(inputs), _base(task)
    return _merged(task, model, Whitening.of(_embedded(model, batches)), batches)


@torch.no_grad()
def lda_whitening_start(task: FinetuneTask, inputs: Iterable[Any], labels: Tensor) -> Start:
    """Return the model with its embeddings whitened within classes, by its last linear layer.

    See `Whitening.within`; without scaling to length 1, as `whitening_start`.

    Args:
        task: Its model's last linear layer is replaced in the start, not in the model.
        inputs: Batches of inputs.
        labels: Their classes, ``n`` integers, of which there are fewer than ``n - d`` for embeddings of d dimensions.

    Raises:
        AdapterError: As from `whitening_start`.
        DataError: The inputs are too few, or the embeddings of a class do not differ.
    """
    batches, model, labels = _batches(inputs), _base(task), torch.as_tensor(labels)
    return _merged(task, model, Whitening.within(_embedded(model, batches), labels), batches)


class Whitened(nn.Module):
    """A model whose embeddings are whitened, and then scaled to length 1, as any model's can be.

    Args:
        model: The model.
        whitening: Of its embeddings.
    """

    def __init__(self, model: nn.Module, whitening: Whitening) -> None:
        super().__init__()
        self.model, self.layer = model, whitening_layer(whitening, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs, ``n x ...``, to whitened embeddings, ``n x D``."""
        embeddings = self.model(x)
        return F.normalize(self.layer(embeddings.double())).to(embeddings.dtype)


@torch.no_grad()
def whitened(task: FinetuneTask, inputs: Iterable[Any], labels: Tensor | None = None) -> Whitened:
    """Return a copy of the model with its embeddings whitened by PCA, or within classes, whatever its last layer is.

    Args:
        task: Its model stays as it is.
        inputs: Batches of inputs.
        labels: Their classes, ``n`` integers; None for PCA.

    Raises:
        DataError: As from `whitening_start` and `lda_whitening_start`.
    """
    model = _base(task)
    x = _embedded(model, _batches(inputs))
    return (
        Whitened(model, Whitening.of(x) if labels is None else Whitening.within(x, torch.as_tensor(labels)))
        .to(x.device)
        .eval()
    )


def _base(task: FinetuneTask) -> nn.Module:
    model = copy.deepcopy(task.adapter.model)
    if hasattr(model, CONTEXT_NAME):
        Adapter(model).remove()
    return model.eval()


def _batches(inputs: Iterable[Any]) -> Iterable[Any]:
    return list(inputs) if isinstance(inputs, Iterator) else inputs  # which are gone through twice


def _embedded(model: nn.Module, batches: Iterable[Any]) -> Tensor:
    return torch.cat(list(each_batch(batches, model)))


def _merged(task: FinetuneTask, model: nn.Module, whitening: Whitening, batches: Iterable[Any]) -> Start:
    own = {name: each.clone() for name, each in model.state_dict().items()}
    merge_whitening(model, whitening, PostProcessing(whitening=1.0), next(iter(batches)))
    found = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if name not in own:
            raise AdapterError(
                f"the last linear layer has no {name.rpartition('.')[2]}, which would take the mean away; make it with"
                " bias=True, the bias being 0"
            )
        whole = torch.zeros_like(own[name])
        whole[: len(parameter)] = parameter.detach()
        if not same_bits(whole, own[name]):
            found[name] = whole
    return Start(task.origin(), found)
