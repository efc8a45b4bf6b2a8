"""What a detection metric's data lack."""

import torch

from metricopt_ext.data.rare import Rare
from metricopt_ext.detection.metric import rare_images
from metricopt_ext.detection.records import Annotated, DetectionSet


def test_types_of_images_are_those_with_a_counting_object_of_a_class() -> None:
    def image(number: int, labels: list[int], difficult: bool = False) -> Annotated:
        flags = torch.full((len(labels),), difficult)
        boxes = torch.tensor([[0.0, 0.0, 5.0, 5.0]] * len(labels)).reshape(-1, 4)
        nothing = torch.zeros(len(labels), dtype=torch.bool)
        return Annotated(number, None, 9, 9, boxes, torch.tensor(labels, dtype=torch.int64), flags, nothing)  # type: ignore[arg-type]

    images = [image(i, [0, 0, 1] if i < 10 else [0]) for i in range(12)]
    images += [image(12, [2]), image(13, [2, 2], difficult=True), image(14, [])]
    assert rare_images(DetectionSet(("cat", "dog", "emu", "fox"), images)) == Rare(
        "image type", 4, 2, {"fox": 0, "emu": 1}
    )
