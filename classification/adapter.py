"""The adapter that a config describes."""

from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.probe import output_scale
from metricopt_ext.errors import ConfigError


def attach(model: nn.Module, config: ClassificationConfig, seed: int, x: Tensor | None = None) -> Adapter:
    """Attach the adapter that the settings describe.

    Args:
        model: The classifier.
        config: The settings.
        seed: Seed of the adapter's matrices.
        x: Train inputs, ``n x ...``, on which the scale of the logits' offsets is measured beside the matrices'
            coordinates (see `output_scale`); None for 1.

    Raises:
        AdapterError: The model lacks the layers.
        ConfigError: The settings contradict themselves.
    """
    settings = config.adapter
    layer = settings.layers[0] if settings.layers else None
    if settings.kind == "outputs":
        if len(settings.layers) > 1:
            raise ConfigError(f"adapter.layers={settings.layers}: one layer gives the logits")
        return attach_outputs(model, Outputs(layer))
    if settings.kind == "input_bias" and len(settings.layers) > 1:
        raise ConfigError(f"adapter.layers={settings.layers}: an input bias acts on one linear layer")
    if settings.kind not in ("film", "input_bias"):
        raise ConfigError(f"adapter.kind={settings.kind!r} is neither film nor input_bias nor outputs")

    def attached(outputs: Outputs | None) -> Adapter:
        if settings.kind == "film":
            return attach_film(model, settings.layers or None, dim=settings.dim, seed=seed, outputs=outputs)
        return attach_input_bias(model, layer, dim=settings.dim, seed=seed, outputs=outputs)

    if not settings.outputs:
        return attached(None)
    scale = 1.0
    if x is not None:
        probed = attached(None)
        scale = output_scale(probed, x)
        probed.remove()
    return attached(Outputs(scale=scale))


def check_adapter(adapter: Adapter, config: ClassificationConfig) -> None:
    """Reject what the adapter or its number of coordinates makes impossible, on a model that isn't trained yet."""
    config.check_queries(adapter.dim)
    adapter.merge()
