"""A start of an embedder that whitens its embeddings, merged into its last linear layer."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.modulation import CONTEXT_NAME
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError
from metricopt_ext.retrieval.merge_whitening import merge_whitening
from metricopt_ext.retrieval.post_processing import PostProcessing, Whitening
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
    batches = list(inputs)
    model = copy.deepcopy(task.adapter.model)
    if hasattr(model, CONTEXT_NAME):
        Adapter(model).remove()
    model.eval()
    own = {name: each.clone() for name, each in model.state_dict().items()}
    whitening = Whitening.of(torch.cat([model(batch) for batch in batches]) if batches else torch.zeros(0, 0))
    merge_whitening(model, whitening, PostProcessing(whitening=1.0, l2_after=False), batches[0])
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
    return Start(task.origin(), {}, found)
