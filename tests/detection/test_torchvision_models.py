"""What phi relies on in each of torchvision's detectors, in double precision, where no two boxes tie."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

from torchvision.models import get_model, get_model_weights
from torchvision.ops import FrozenBatchNorm2d

from helpers.detectors import thin_detectors
from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.records import Annotated
from metricopt_ext.detection.task import detection_loss
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.torchvision_models import FROZEN_NORMS, ONE_STAGE, SSD, STANDARD
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.errors import ConfigError

CLASSES = 3
PHI = torch.tensor([0.3, -0.2, 0.1, 0.2], dtype=torch.float64)
RNG = torch.Generator().manual_seed(0)
TRUTH = Annotated(
    image_id=0,
    path=Path("none"),
    width=64,
    height=64,
    boxes=torch.tensor([[4.0, 6.0, 30.0, 28.0], [31.0, 20.0, 60.0, 58.0]]),
    labels=torch.tensor([0, 2]),
    difficult=torch.zeros(2, dtype=torch.bool),
    crowd=torch.zeros(2, dtype=torch.bool),
)
BATCH = [Example(torch.randint(256, (3, 64, 64), generator=RNG, dtype=torch.uint8), TRUTH)]

# Each detector where its own parts are, and what phi acts on there. Norms of a ResNet are in RetinaNet's "early".
PLACES: list[Any] = [
    ("fasterrcnn_resnet50_fpn", "rpn", {nn.Conv2d}),
    ("fasterrcnn_resnet50_fpn", "roi_head", {nn.Linear}),
    ("fasterrcnn_resnet50_fpn_v2", "roi_head", {nn.BatchNorm2d, nn.Linear}),
    ("maskrcnn_resnet50_fpn", "mask_head", {nn.Conv2d}),
    ("maskrcnn_resnet50_fpn_v2", "mask_head", {nn.BatchNorm2d}),
    ("fasterrcnn_mobilenet_v3_large_fpn", "backbone", {nn.BatchNorm2d, nn.Conv2d}),
    ("retinanet_resnet50_fpn", "head", {nn.Conv2d}),
    ("retinanet_resnet50_fpn_v2", "head", {nn.GroupNorm}),
    ("fcos_resnet50_fpn", "fpn", {nn.Conv2d}),
    ("fcos_resnet50_fpn", "head", {nn.Conv2d, nn.GroupNorm}),
    ("ssd300_vgg16", "head", {nn.Conv2d}),
    ("ssdlite320_mobilenet_v3_large", "backbone", {nn.BatchNorm2d, nn.Conv2d}),
]


@pytest.fixture(autouse=True)
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `thin_detectors`."""
    thin_detectors(monkeypatch)


def toolkit_of(name: str, **settings: Any) -> TorchvisionToolkit:
    return TorchvisionToolkit(name, min_size=64, max_size=64, score_threshold=0.0, **settings)


@functools.cache
def built(name: str) -> nn.Module:
    """A detector as torchvision makes it, its norms with values that they are not born with."""
    torch.manual_seed(0)
    options: dict[str, Any] = {} if name in SSD else {"min_size": 64, "max_size": 64}
    if name in ONE_STAGE:
        options |= {"score_thresh": 0.0, "detections_per_img": 20}
    else:
        options |= {"box_score_thresh": 0.0, "box_detections_per_img": 2}
        options |= {"rpn_post_nms_top_n_test": 6, "rpn_post_nms_top_n_train": 6}
    model = get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES + 1, **options)
    return lived_in(model).double().eval()


def lived_in(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "running_var"):
            for name, low in (("weight", 0.5), ("bias", -0.3), ("running_mean", -0.3), ("running_var", 0.7)):
                tensor: Any = getattr(module, name)
                tensor.data.copy_(low + 0.6 * torch.rand(tensor.shape))
    return model


@torch.no_grad()
def outputs(model: nn.Module) -> dict[str, Tensor]:
    """All that a detector finds in an image: boxes, scores, labels, masks."""
    found: dict[str, Tensor] = model([BATCH[0].image.double() / 255])[0]
    assert len(found["scores"]) > 1
    return found


@torch.no_grad()
def unsorted(model: Any) -> dict[str, Tensor]:
    """What a detector of one stage computes before it sorts boxes; what one of two stages finds, where none tie."""
    if not hasattr(model, "head"):
        return outputs(model)
    return model.head(list(features_of(model).values()))  # type: ignore[no-any-return]


def features_of(model: Any) -> dict[str, Tensor]:
    images, _ = model.transform([BATCH[0].image.double() / 255])
    return model.backbone(images.tensors)  # type: ignore[no-any-return]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert value.shape == second[key].shape
        assert (value - second[key]).abs().max() < 1e-8 * (1 + value.abs().max()), key


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "kinds"), PLACES)
def test_phi_leaves_changes_merges_and_goes(name: str, place: str, kinds: set[type[nn.Module]], tmp_path: Path) -> None:
    model, toolkit = copy.deepcopy(built(name)), toolkit_of(name)
    bare, state = outputs(model), copy.deepcopy(model.state_dict())
    adapter = attach_film(model, toolkit.film_layers(model, [place]), dim=4)
    assert {type(model.get_submodule(layer)) for layer in adapter.layers} == kinds
    assert same(outputs(model), bare)

    adapter.set_phi(PHI)
    tuned = unsorted(model)
    assert not same(outputs(model), bare)
    toolkit.export(model, tmp_path / "tuned.pth")
    stock = copy.deepcopy(built(name))
    for parameter in stock.parameters():
        nn.init.zeros_(parameter)
    stock.load_state_dict(torch.load(tmp_path / "tuned.pth", weights_only=True), strict=True)
    assert_close(unsorted(stock), tuned)

    assert same(outputs(adapter.remove()), bare)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", STANDARD)
def test_the_toolkit_s_loss_is_torchvision_s_and_moves_phi(name: str) -> None:
    model, toolkit = copy.deepcopy(built(name)), toolkit_of(name)
    targets = [{"boxes": TRUTH.boxes.double(), "labels": TRUTH.labels + 1}]
    adapter = attach_film(model, toolkit.film_layers(model, ["backbone"]), dim=4)  # which keeps norms from updating
    loss = detection_loss(toolkit)(model, BATCH)
    (gradient,) = torch.autograd.grad(loss, adapter.phi)
    assert gradient.isfinite().all()
    assert gradient.abs().min() > 0
    if name.startswith("mask"):  # whose own loss needs masks
        return
    torch.manual_seed(5)
    theirs = model.train()([BATCH[0].image.double() / 255], targets)
    torch.manual_seed(5)
    torch.testing.assert_close(toolkit.loss(model, BATCH), sum(theirs.values()))


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], tuple[nn.Module, Path]]:
    """Make torchvision build a detector from published weights, which are drawn here; also returns their file."""

    def make(name: str) -> tuple[nn.Module, Path]:
        weights: Any = get_model_weights(name)["DEFAULT"]
        torch.manual_seed(1)
        classes = len(weights.meta["categories"])
        state = lived_in(get_model(name, weights=None, weights_backbone=None, num_classes=classes)).state_dict()
        if name in FROZEN_NORMS:
            state = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
        torch.save(state, tmp_path / "published.pth")
        monkeypatch.setattr(type(weights), "get_state_dict", lambda self, *args, **kwargs: state)
        sizes = {} if name in SSD else {"min_size": 64, "max_size": 64}
        return get_model(name, weights=weights, **sizes).double().eval(), tmp_path / "published.pth"

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", STANDARD)
def test_published_weights_compute_what_they_do_in_torchvision(
    name: str, publish: Callable[[str], tuple[nn.Module, Path]]
) -> None:
    theirs, path = publish(name)
    classes = len(get_model_weights(name)["DEFAULT"].meta["categories"])
    ours = toolkit_of(name, weights=str(path), strict_weights=True).build(classes - 1, seed=0).double().eval()
    frozen = [type(module) for module in ours.modules() if isinstance(module, FrozenBatchNorm2d)]
    assert bool(frozen) == (name in FROZEN_NORMS)
    assert frozen == [type(module) for module in theirs.modules() if isinstance(module, FrozenBatchNorm2d)]
    with torch.no_grad():
        features = [features_of(model) for model in (ours, theirs)]
    for mine, other in zip(*(each.values() for each in features), strict=True):
        assert (mine - other).abs().max() < 1e-4 * other.abs().max()  # the weights are of single precision
    fewer = toolkit_of(name, weights=str(path)).build(CLASSES, seed=0)
    kept = {key for key, value in theirs.state_dict().items() if value.shape != fewer.state_dict()[key].shape}
    assert kept
    assert all(key.startswith(("head.class", "roi_heads.box_predictor", "roi_heads.mask_predictor")) for key in kept)


def test_what_one_stage_lacks_is_refused() -> None:
    for settings in ({"proposals": 5}, {"classification_loss": "ap"}):
        with pytest.raises(ConfigError, match="retinanet_resnet50_fpn"):
            toolkit_of("retinanet_resnet50_fpn", **settings)
    model, toolkit = built("retinanet_resnet50_fpn_v2"), toolkit_of("retinanet_resnet50_fpn_v2")
    assert_refused(lambda: toolkit.film_layers(model, ["roi_head"]), ConfigError, "placement='roi_head'")
