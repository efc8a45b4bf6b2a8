"""Which outputs of a detector that torchvision trained on COCO are a set's classes: 80 of its 91."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models import get_model_weights

from metricopt_ext.detection.torchvision_models import PREDICTORS, STANDARD
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.errors import DataError
from metricopt_ext.utils.state_dict import read_state_dict
from metricopt_ext.utils.tensor_names import names_in_model
from metricopt_ext.utils.words import shortened

# What VOC, and those who followed it, call some of COCO's categories.
OTHER_NAMES = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "motorbike": "motorcycle",
    "pottedplant": "potted plant",
    "sofa": "couch",
    "tvmonitor": "tv",
}


def coco_categories() -> tuple[str, ...]:
    """Return what torchvision's detectors call their 91 outputs: the background, 80 categories, and gaps, ``N/A``."""
    weights = get_model_weights("fasterrcnn_resnet50_fpn")["DEFAULT"]
    return tuple(weights.meta["categories"])


def coco_outputs(classes: Sequence[str], category_ids: Sequence[int | str] = ()) -> tuple[int, ...]:
    """Return the output for each of a set's classes, which is its category's id in COCO.

    Args:
        classes: The classes: COCO's 80 categories or some of them, by COCO's names or VOC's.
        category_ids: How the set numbers them. If these are COCO's 80 ids, names may be in any language.

    Raises:
        DataError: A class is none of COCO's categories.
    """
    names = coco_categories()
    ids = [at for at, name in enumerate(names) if at and name != "N/A"]
    if list(category_ids) == ids:
        return tuple(ids)
    known = {names[at]: at for at in ids}
    known |= {other: known[name] for other, name in OTHER_NAMES.items()}
    strange = [name for name in classes if name not in known]
    found = tuple(known[name] for name in classes if name in known)
    if strange or len(set(found)) < len(found):
        raise DataError(f"the data's classes {shortened(strange or list(classes))} are not COCO's categories")
    return found


def for_classes(
    toolkit: TorchvisionToolkit, classes: Sequence[str], category_ids: Sequence[int | str], weights: Path, entry: str
) -> TorchvisionToolkit:
    """Return a toolkit whose detectors have the outputs of a file of weights, and detect a set's classes by them.

    It is the same if the outputs are the set's classes and the background, or if the file is not of this detector, as
    loading it will say.

    Args:
        toolkit: The detectors.
        classes: The set's classes.
        category_ids: How the set numbers them; empty if it is not in COCO's format.
        weights: The file.
        entry: The state dict's key in it; empty to find it.

    Raises:
        DataError: The outputs are of other classes than the set's.
    """
    if toolkit.name not in STANDARD:
        return toolkit
    outputs = _outputs(toolkit, read_state_dict(weights, entry), len(classes) + 1)
    if outputs in (None, len(classes) + 1):
        return toolkit
    said = f"{weights} has {outputs} outputs, the background's among them; the data has {len(classes)} classes"
    if outputs != len(coco_categories()):
        raise DataError(f"{said}, so it must have {len(classes) + 1}: train it for yours")
    try:
        return replace(toolkit, labels=coco_outputs(classes, category_ids))
    except DataError as error:
        raise DataError(f"{said}, and {error}: train it for yours") from error


def _outputs(toolkit: TorchvisionToolkit, state: Mapping[str, Tensor], own: int) -> int | None:
    """Return how many outputs the predictor of a file has, None if it is of another kind.

    Args:
        toolkit: The detectors.
        state: The file's state dict.
        own: How many outputs a detector of the set's classes has.
    """
    with torch.device("meta"):  # shapes without memory
        expected = replace(toolkit, weights="", labels=()).build(own - 1, seed=0).state_dict()
    given = {name: state[key] for key, name in names_in_model(state, expected).names.items()}
    biases = [name for name in expected if name.startswith(PREDICTORS) and name.endswith("bias")]
    if not all(name in given and given[name].dim() for name in biases):
        return None
    counts = {len(given[name]) * own / len(expected[name]) for name in biases}
    others = counts - {own}  # some biases do not depend on the number of outputs
    if len(others) > 1 or not all(count.is_integer() for count in others):
        return None
    return int(others.pop()) if others else own
