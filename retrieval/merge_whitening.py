"""A whitening of embeddings, merged into the linear layer that gives them: the model alone then gives them whitened."""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.context import Context
from metricopt_ext.errors import AdapterError
from metricopt_ext.retrieval.judged import Processing
from metricopt_ext.retrieval.models import unscaled
from metricopt_ext.retrieval.post_processing import PostProcessing, Whitening
from metricopt_ext.utils.modes import evaluating


def whitening_layer(whitening: Whitening, power: float) -> nn.Linear:
    """Return the whitening as a layer, from ``n x d`` to ``n x r``, in float64; see `Whitening.applied`."""
    matrix = whitening.projection(power)
    layer = nn.Linear(len(whitening.mean), matrix.shape[1], dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(matrix.T)
        layer.bias.copy_(-whitening.mean @ matrix)
    return layer


@torch.no_grad()
def merge_whitening(model: nn.Module, whitening: Whitening, post: PostProcessing, example: Any) -> tuple[str, ...]:
    """Merge a whitening into the linear layer whose output the model's embeddings are.

    Args:
        model: The model; its embeddings are whitened from then on, of the layer's own precision.
        whitening: Of this model's embeddings.
        post: What is done to embeddings.
        example: A batch of inputs, by which the layer is found: its output is what the model returns.

    Returns:
        What of ``post`` a layer can't do, each a sentence with the code for it.

    Raises:
        AdapterError: Nothing is changed, as the embeddings are no linear layer's output, but scaled to length 1, say;
            the layer's weights are another's too; or an adapter is on the model.
        DataError: As from `Whitening.projection`.
    """
    after = "append it: nn.Sequential(model, whitening_layer(whitening, power)), in the model's own precision"
    if any(isinstance(module, Context) for module in model.modules()):
        raise AdapterError("phi is not merged yet, which the whitening is of; call adapter.merge() first")
    left = list[str]()
    if post.whitening:
        layer = _last_linear(model, example, after)
        merged = whitening_layer(whitening, post.whitening).to(layer.weight.device)
        bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
        if len(whitening.mean) != layer.out_features:
            raise AdapterError(
                f"a whitening of {len(whitening.mean)} dimensions is for as many outputs, the last linear layer has"
                f" {layer.out_features}"
            )
        before, trained = (layer.weight, layer.bias), layer.weight.requires_grad
        weight, bias = merged.weight @ layer.weight.double(), merged(bias.to(merged.weight))
        with evaluating(model):
            expected = merged(model(example).double())
            layer.weight = nn.Parameter(weight.to(layer.weight.dtype), trained)
            layer.bias = nn.Parameter(bias.to(layer.weight.dtype), trained)
            found = model(example).double()
        tolerance = max(1e-3, 8 * torch.finfo(layer.weight.dtype).eps)  # of half precision's own rounding
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
            layer.weight, layer.bias = before
            raise AdapterError(f"what the model does after its last linear layer changes a whitening there; {after}")
        layer.out_features = len(bias)
        left.append("Lengths are left to the search: torch.nn.functional.normalize(model(x)).")
    if post.augmentation:
        left.append(
            f"Database augmentation is of the gallery, once it is embedded: augmented(gallery, {post.augmentation})."
        )
    return tuple(left)


@torch.no_grad()
def whitened_layer(adapter: Adapter, processing: Processing, example: Tensor) -> dict[str, Tensor]:
    """Return the tensors, by name, by which the model's last linear layer whitens; the model stays as it is.

    Dimensions that the whitening leaves out are 0.

    Args:
        adapter: Its model, with phi and what its start replaced, is an `Embedder`.
        processing: Has the power and this model's whitening, of unscaled embeddings.
        example: A batch of images.

    Raises:
        AdapterError: The embeddings are no linear layer's output, or that layer has no bias, which takes the mean.
    """
    model = copy.deepcopy(adapter.model)
    Adapter(model).merge()
    own = {name: each.clone() for name, each in model.state_dict().items()}
    assert processing.whitening is not None
    with unscaled(model):
        merge_whitening(model, processing.whitening, replace(processing.post, augmentation=0), example)
    found = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if name not in own:
            raise AdapterError(
                f"the last linear layer has no {name.rpartition('.')[2]}, which would take the mean away; make it with"
                " bias=True, the bias being 0"
            )
        if name.rpartition(".")[0] in adapter.layers and not torch.equal(parameter, own[name]):
            raise AdapterError("phi acts on the last linear layer, too")
        whole = torch.zeros_like(own[name])
        whole[: len(parameter)] = parameter.detach()
        if not torch.equal(whole, own[name]):
            found[name] = whole
    return found


def _last_linear(model: nn.Module, example: Any, after: str) -> nn.Linear:
    """Return the linear layer whose output a model returns.

    Raises:
        AdapterError: There is none, or its weights are another's too.
    """
    outputs = list[tuple[nn.Module, Tensor]]()
    hooks = [
        layer.register_forward_hook(lambda layer, _, output: outputs.append((layer, output)))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        with evaluating(model):
            found = model(example)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, output in outputs:
        if isinstance(found, Tensor) and found.shape == output.shape and torch.equal(found, output):
            assert isinstance(layer, nn.Linear)
            count = Counter(id(each) for module in model.modules() for each in module._parameters.values())
            calls = sum(other is layer for other, _ in outputs)
            if type(layer) is not nn.Linear or count[id(layer.weight)] > 1 or calls > 1:
                raise AdapterError(f"the last linear layer's weights are computed, or used elsewhere too; {after}")
            return layer
    scaled = isinstance(found, Tensor) and any(
        found.shape == output.shape and torch.allclose(found, F.normalize(output)) for _, output in outputs
    )
    why = "scaled to length 1 after the last linear layer" if scaled else "no linear layer's output"
    raise AdapterError(f"the model's embeddings are {why}, so a whitening can't be merged into it; {after}")
