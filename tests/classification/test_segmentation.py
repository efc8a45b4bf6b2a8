"""Mean IoU and boundaries of torchvision's segmentation networks, against references, and phi in them."""

import copy
import math
from typing import Any

import pytest
import sklearn.metrics as skm
import torch
import torchvision
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.classification.segmentation import boundary_f_metric, mean_iou_metric
from metricopt_ext.errors import DataError, MetricError

CLASSES = 4
HALVES = [torch.tensor([0, 3]), torch.tensor([1, 2])]


def images_and_labels() -> tuple[list[Tensor], list[Tensor]]:
    rng = torch.Generator().manual_seed(0)
    sizes = [(32, 40), (32, 32), (40, 32), (32, 32)]
    images = [torch.rand(3, *size, generator=rng) for size in sizes]
    labels = [torch.randint(CLASSES, size, generator=rng) for size in sizes]
    for label in labels:
        label[torch.rand(label.shape, generator=rng) < 0.1] = 255
    return images, labels


def network() -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.get_model(
        "lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=CLASSES
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)  # type: ignore[union-attr]
            module.weight.data.uniform_(0.5, 1.5)
    for last in (model.classifier.low_classifier, model.classifier.high_classifier):
        nn.init.normal_(last.weight)  # as it is born it predicts one class everywhere
    return model.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def by_scikit_learn(model: nn.Module, images: list[Tensor], labels: list[Tensor]) -> Any:
    predicted = torch.cat([model(image[None])["out"][0].argmax(0).flatten() for image in images])
    true = torch.cat([label.flatten() for label in labels])
    return skm.jaccard_score(true[true != 255], predicted[true != 255], average="macro", zero_division=0)


def test_it_is_scikit_learn_s_at_every_phi_and_on_the_halves() -> None:
    images, labels = images_and_labels()
    model = network()
    state, adapter = copy.deepcopy(model.state_dict()), attach_film(model, dim=4)
    metric = mean_iou_metric(images, labels, CLASSES, halves=HALVES)
    values = set()
    for phi in (torch.zeros(4), torch.tensor([0.5, -0.4, 0.3, 0.6])):
        adapter.set_phi(phi)
        found = metric.judge(model)
        assert 1 - found.cost == pytest.approx(by_scikit_learn(model, images, labels), abs=1e-12)
        assert found.halves is not None
        for cost, half in zip(found.halves, HALVES, strict=True):
            rows = half.tolist()
            expected = by_scikit_learn(model, [images[i] for i in rows], [labels[i] for i in rows])
            assert 1 - cost == pytest.approx(expected, abs=1e-12)
        values.add(found.cost)
    assert len(values) == 2
    adapter.remove()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ([], [], "0 images and 0 label maps"),
        ([torch.zeros(3, 4, 4)], [], "1 images and 0 label maps"),
        ([torch.zeros(3, 4, 4)], [torch.zeros(4, 5).long()], r"label map 0 is .* shape \(4, 5\)"),
        ([torch.zeros(3, 4, 4)], [torch.zeros(4, 4)], "label map 0 is torch.float32"),
        ([torch.zeros(3, 4, 4)], [torch.full((4, 4), 7)], r"label.*7; labels are 0\.\.3 or 255"),
        ([torch.zeros(3, 4, 4)], [torch.full((4, 4), 255)], r"no pixel.*255; give maps"),
        (torch.zeros(2, 3, 4, 4), torch.full((2, 4, 4), 255, dtype=torch.uint8), r"no pixel.*255; give maps"),
        (torch.zeros(0, 3, 4, 4), torch.zeros(0, 4, 4).long(), "0 images and 0 label maps"),
        ([torch.zeros(3, 4, 4)], [["sky"]], "must be tensors or arrays of numbers"),
    ],
)
def test_impossible_labels_are_refused(images: Any, labels: Any, message: str) -> None:
    for metric in (mean_iou_metric, boundary_f_metric):
        with pytest.raises(DataError, match=message):
            metric(images, labels, CLASSES)


@pytest.mark.parametrize("metric", [mean_iou_metric, boundary_f_metric])
def test_stacked_tensors_and_arrays_are_read_as_lists_of_tensors(metric: Any) -> None:
    rng, model = torch.Generator().manual_seed(1), nn.Conv2d(3, CLASSES, 1)
    images, labels = torch.rand(3, 3, 8, 8, generator=rng), torch.randint(CLASSES, (3, 8, 8), generator=rng)
    expected = metric(list(images), list(labels), CLASSES).judge(model).cost
    for shown, true in (
        (images, labels),
        (images.numpy(), labels.numpy()),
        (images, [each.numpy().astype("uint8") for each in labels]),
    ):
        assert metric(shown, true, CLASSES).judge(model).cost == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Conv2d(3, CLASSES, 3), r"shape \(1, 4, 2, 2\).*\(1, 4, 4, 4\)"),
        (nn.Sequential(nn.Conv2d(3, CLASSES, 1), nn.Threshold(torch.inf, torch.nan)), "has NaN"),
    ],
)
def test_outputs_that_can_not_be_judged_are_named(model: nn.Module, message: str) -> None:
    metric = mean_iou_metric([torch.zeros(3, 4, 4)], [torch.zeros(4, 4).long()], CLASSES)
    with pytest.raises(MetricError, match=message):
        metric.judge(model)


def boundary_of(shown: Tensor, label: int) -> list[tuple[int, int]]:
    """The boundary pixels of a class, straight from the definition."""
    height, width = shown.shape
    found = []
    for y in range(height):
        for x in range(width):
            near = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
            inside = [(a, b) for a, b in near if 0 <= a < height and 0 <= b < width]
            if shown[y, x] == label and any(shown[a, b] not in (label, 255) for a, b in inside):
                found.append((y, x))
    return found


def naive_boundary_f(predicted: Tensor, true: Tensor, label: int, reach: float) -> float:
    guessed, actual = boundary_of(torch.where(true == 255, 255, predicted), label), boundary_of(true, label)
    if not guessed and not actual:
        return math.nan
    near = [
        sum(any(math.dist(a, b) <= reach for b in others) for a in some) / max(len(some), 1)
        for some, others in ((guessed, actual), (actual, guessed))
    ]
    return 2 * near[0] * near[1] / sum(near) if sum(near) else 0.0


def blocks(seed: int) -> Tensor:
    """A map of larger areas, some of them to be ignored."""
    rng = torch.Generator().manual_seed(seed)
    shown = torch.randint(CLASSES, (4, 5), generator=rng).repeat_interleave(4, 0).repeat_interleave(4, 1)
    shown[torch.rand(shown.shape, generator=rng) < 0.05] = 255
    return shown


class Shown(nn.Module):
    """Predicts maps that are given as images, ``1 x 1 x h x w``."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot(x[:, 0].long(), CLASSES).movedim(-1, 1).float()


@pytest.mark.parametrize("tolerance", [1.0, 1.5, 3.0, None])
def test_boundaries_are_compared_as_defined(tolerance: float | None) -> None:
    labels = [blocks(seed) for seed in range(4)]
    images = [
        blocks(seed + 10 * (seed > 0)).clamp(max=CLASSES - 1)[None].float() for seed in range(4)
    ]  # the first right
    reach = tolerance or 0.0075 * math.hypot(16, 20)
    each = torch.tensor(
        [
            [naive_boundary_f(image[0], label, c, reach) for c in range(CLASSES)]
            for image, label in zip(images, labels, strict=True)
        ],
        dtype=torch.float64,
    )
    found = boundary_f_metric(images, labels, CLASSES, tolerance=tolerance, halves=HALVES).judge(Shown())
    assert 1 - found.cost == pytest.approx(float(each.nanmean(0).nanmean()), abs=1e-12)
    assert found.halves is not None
    for cost, half in zip(found.halves, HALVES, strict=True):
        assert 1 - cost == pytest.approx(float(each[half].nanmean(0).nanmean()), abs=1e-12)
    alone = boundary_f_metric(images[:1], labels[:1], CLASSES, tolerance=tolerance).judge(Shown())
    assert alone.cost == 0


def test_boundaries_of_a_network_move_with_phi() -> None:
    images, labels = images_and_labels()
    labels = [label.clamp(max=1) for label in labels]
    adapter = attach_film(network(), dim=4)
    metric = boundary_f_metric(images, labels, CLASSES, tolerance=2)
    before = metric.judge(adapter.model).cost
    adapter.set_phi(torch.tensor([0.5, -0.4, 0.3, 0.6]))
    assert metric.judge(adapter.model).cost != before


def test_maps_without_a_boundary_and_a_tolerance_of_none_are_refused() -> None:
    image, flat = torch.zeros(1, 4, 4), torch.zeros(4, 4).long()
    with pytest.raises(DataError, match="no label map has a boundary"):
        boundary_f_metric([image], [flat], CLASSES)
    with pytest.raises(ValueError, match="tolerance is 0; it must be above 0"):
        boundary_f_metric([image], [flat], CLASSES, tolerance=0)
    half = flat.clone()
    half[:2] = 1
    metric = boundary_f_metric([image, image], [half, flat], CLASSES, halves=[torch.tensor([0]), torch.tensor([1])])
    with pytest.warns(UserWarning, match=r"boundary.*images without a boundary"):
        assert metric.judge(Shown()).halves is None
