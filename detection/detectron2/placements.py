"""Where FiLM goes in Detectron2's R-CNN detectors, by name."""

from collections.abc import Sequence

from torch import nn

from metricopt_ext.detection.toolkit import patterns_in
from metricopt_ext.errors import ConfigError

# The norms come before the ReLU, where the paper puts FiLM. A C4 model has the last stage of the ResNet as its head;
# an FPN model has linear layers there. Only what matches a given model is used. A change of contrast or noise reaches
# the early layers first, and they are few enough for a short phi.
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "backbone": ("backbone.*res?.*.norm",),
    "early": ("backbone.*stem.*.norm", "backbone.*res2.*.norm"),
    "last_stage": ("backbone.res4.*.norm", "backbone.bottom_up.res5.*.norm"),
    "fpn": ("backbone.fpn_output?.norm", "backbone.fpn_output?"),
    "roi_head": ("roi_heads.res5.*.norm", "roi_heads.box_head.conv*.norm", "roi_heads.box_head.fc?"),
    "predictor": ("roi_heads.box_predictor.cls_score", "roi_heads.box_predictor.bbox_pred"),
}
PLACEMENTS["all"] = tuple(pattern for patterns in PLACEMENTS.values() for pattern in patterns)


def film_layers(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Return the patterns of layers for `attach_film`.

    Args:
        model: A detector of Detectron2.
        layers: Names of `PLACEMENTS`, which stand for those of their patterns that match layers of the model, or
            patterns of module names.

    Raises:
        ConfigError: A placement or pattern is not in this model.
    """
    chosen: list[str] = []
    for entry in layers:
        patterns = patterns_in(model, PLACEMENTS.get(entry, (entry,)))
        if not patterns:
            raise ConfigError(
                f"layers={entry!r} match no layer of this model; choose from {', '.join(PLACEMENTS)}, or give patterns"
                " of module names"
            )
        chosen += patterns
    return chosen
