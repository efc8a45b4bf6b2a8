r"""Measure the recall of region proposals (the paper's Figure S3): the share of objects that one of the first k covers.

    python benchmarks/measure_proposals.py --config-file configs/detection/scenes_torchvision.yaml \
        --annotations out/scenes/seed-0/scenes --split test \
        --weights out/scenes/seed-0/model.safetensors out/scenes/seed-0/tuned.pth

The detectors are one of torchvision's in two stages, with each of the weights; the images are in Pascal VOC's format.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.utils.extras import naming_extras

with naming_extras():
    from torchvision.models.detection.transform import resize_boxes

    from metricopt_ext.detection.build import build_toolkit
    from metricopt_ext.detection.config import DetectionConfig
    from metricopt_ext.detection.metric import in_batches, truth_of
    from metricopt_ext.detection.pictures import box_iou
    from metricopt_ext.detection.records import DetectionSet
    from metricopt_ext.detection.task import load_examples
    from metricopt_ext.detection.toolkit import Example
    from metricopt_ext.detection.torchvision_toolkit import images_of
    from metricopt_ext.detection.voc import read_voc
    from metricopt_ext.experiment.command import errors_in_one_line
    from metricopt_ext.experiment.style import print_table
    from metricopt_ext.utils.config import load_config
    from metricopt_ext.utils.modes import evaluating
    from metricopt_ext.utils.state_dict import load_checkpoint

COUNTS = (10, 50, 100, 300)


def main() -> None:
    """Measure, and print a line for each detector."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, type=Path, help="describes the detector")
    parser.add_argument("--annotations", required=True, type=Path, help="folder in Pascal VOC's format")
    parser.add_argument("--split", help="list of the images; default: all")
    parser.add_argument("--weights", required=True, nargs="+", type=Path, help="files of the detectors' weights")
    parser.add_argument("overrides", nargs="*", help="of the config, KEY=VALUE")
    arguments = parser.parse_args()
    with errors_in_one_line():
        config = load_config(DetectionConfig, arguments.config_file, arguments.overrides)
        data, toolkit = read_voc(arguments.annotations, arguments.split), build_toolkit(config)
        examples, rows = load_examples(data, config.data.size or None), []
        for weights in arguments.weights:
            model = toolkit.build(len(data.classes), seed=0)
            load_checkpoint(model, weights)
            batches = in_batches(examples)
            boxes = [each for batch in batches for each in propose(model, batch)]
            judged = [example for batch in batches for example in batch]
            recalls = proposal_recall(boxes, truth_of(judged, data.classes))
            rows.append([str(weights), *(f"{recalls[k]:.4f}" for k in COUNTS)])
        print_table(["recall of the first", *map(str, COUNTS)], rows)


@torch.no_grad()
def propose(model: nn.Module, batch: Sequence[Example]) -> list[Tensor]:
    """Return the region proposals of each image, ``p x 4`` in its pixels, best first."""
    detector: Any = model
    with evaluating(model):
        images, _ = detector.transform(images_of(model, batch))
        proposals, _ = detector.rpn(images, detector.backbone(images.tensors))
    pairs = zip(proposals, images.image_sizes, batch, strict=True)
    return [resize_boxes(boxes, size, example.size).cpu() for boxes, size, example in pairs]


def proposal_recall(
    proposals: Sequence[Tensor], truth: DetectionSet, counts: Sequence[int] = COUNTS, iou: float = 0.5
) -> dict[int, float]:
    """Return, for each k, the share of objects whose box one of the first k proposals of its image covers.

    Classes don't matter. Difficult objects and crowd regions don't count. One proposal may cover several objects.

    Args:
        proposals: Boxes ``p x 4`` for each image of ``truth`` in the same order, best first; p may differ.
        truth: The images with their objects, at least one of which counts.
        counts: The numbers k.
        iou: Minimum intersection over union of a box and a proposal that covers it.
    """
    ranks = []
    for boxes, image in zip(proposals, truth.images, strict=True):
        covered = box_iou(image.boxes[~(image.difficult | image.crowd)], boxes) >= iou
        never = torch.full((len(covered), 1), True, device=covered.device)  # as if one more proposal covered all
        first = torch.cat([covered, never], 1).int().argmax(1)
        ranks.append(torch.where(covered.any(1), first.double(), torch.inf).cpu())
    everything = torch.cat(ranks)
    return {k: float((everything < k).double().mean()) for k in counts}


if __name__ == "__main__":
    main()
