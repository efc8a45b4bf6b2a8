"""AP50 or AP of a detector as the black-box metric."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.detection.ap50 import Definition, match, match_for, mean_over_ious
from metricopt_ext.detection.records import Detections, DetectionSet
from metricopt_ext.detection.toolkit import Example, Toolkit
from metricopt_ext.tasks.metric import Metric, with_halves

EVALUATION_BATCH = 8


def truth_of(examples: Sequence[Example], classes: Sequence[str]) -> DetectionSet:
    """Return the ground truth of examples in memory, in pixels of their images."""
    return DetectionSet(tuple(classes), [example.truth for example in examples])


def in_batches(examples: Sequence[Example]) -> list[Sequence[Example]]:
    """Divide examples into batches to evaluate."""
    return [examples[at : at + EVALUATION_BATCH] for at in range(0, len(examples), EVALUATION_BATCH)]


def ap50_metric(
    toolkit: Toolkit,
    examples: Sequence[Example],
    classes: Sequence[str],
    definition: Definition,
    halves: Sequence[Sequence[int]] = (),
    *,
    name: str = "AP50",
) -> Metric:
    """Return the black box: AP50 of what a detector finds in images, or AP.

    Args:
        toolkit: The toolkit of the detectors to evaluate.
        examples: The images.
        classes: Names of the classes.
        definition: See `ap50`.
        halves: Positions of two halves of the images, for a metric that also reports its value on each; empty for one
            that does not. They are not reported if one of them has no object that counts.
        name: ``"AP50"``, or ``"AP"``, the mean over the IoUs from 0.5 to 0.95.
    """
    truth = truth_of(examples, classes)
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    objects = match([nothing] * len(truth), truth, definition).objects
    reported = [torch.tensor(half) for half in halves] if all(objects[list(half)].any() for half in halves) else []

    def function(model: nn.Module) -> Any:
        found = [each for batch in in_batches(examples) for each in toolkit.detect(model, batch)]
        matches = match_for(name, found, truth, definition)

        def value_on(half: Tensor | None) -> float:
            return mean_over_ious(matches, None if half is None else half.tolist())

        return with_halves(value_on, reported)

    return Metric(function, maximize=True, name=name)
