"""Mean IoU of torchvision's segmentation networks, against scikit-learn, and phi in them."""

import copy
from typing import Any

import pytest
import sklearn.metrics as skm
import torch
import torchvision
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.classification.segmentation import mean_iou_metric
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
        ([torch.zeros(3, 4, 4)], [torch.full((4, 4), 7)], r"label map 0 holds 7; labels are 0\.\.3 or 255"),
    ],
)
def test_impossible_labels_are_refused(images: list[Tensor], labels: list[Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        mean_iou_metric(images, labels, CLASSES)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Conv2d(3, CLASSES, 3), r"shape \(1, 4, 2, 2\); mean IoU needs \(1, 4, 4, 4\)"),
        (nn.Sequential(nn.Conv2d(3, CLASSES, 1), nn.Threshold(torch.inf, torch.nan)), "has NaN"),
    ],
)
def test_outputs_that_can_not_be_judged_are_named(model: nn.Module, message: str) -> None:
    metric = mean_iou_metric([torch.zeros(3, 4, 4)], [torch.zeros(4, 4).long()], CLASSES)
    with pytest.raises(MetricError, match=message):
        metric.judge(model)
