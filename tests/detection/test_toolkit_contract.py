"""What the tools rely on in each toolkit, the kept features included: in double precision, where no two boxes tie."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

from helpers.boxes import CLASSES, example
from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.frozen import FrozenFeatures
from metricopt_ext.detection.records import Detections
from metricopt_ext.detection.toolkit import Toolkit, told_inference
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.state_dict import load_checkpoint

PHI = torch.tensor([0.3, -0.2, 0.1, 0.2], dtype=torch.float64)


BATCH = [example(2, seed=1), example(3, seed=2), example(1, seed=3)]
SIZES = [example(2, 48, 56, seed=4), example(0, 120, 90, seed=5), example(1, 30, 64, seed=6)]


@dataclass
class Case:
    """A toolkit, and a detector of its with FiLM in the box head."""

    toolkit: Toolkit
    adapter: Adapter

    @property
    def model(self) -> Any:
        return self.adapter.model


def adapted(toolkit: Toolkit) -> Adapter:
    model = toolkit.build(CLASSES, seed=0).double()
    adapter = attach_film(model, toolkit.film_layers(model, ["roi_head"]), dim=4)
    adapter.set_phi(PHI)
    return adapter


def detectron2(kind: str, make_config: Callable[..., Any]) -> Case:
    from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit

    toolkit = Detectron2Toolkit(make_config(kind, "BN", "MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0))
    return Case(toolkit, adapted(toolkit))


def torchvision(kept: bool) -> Case:
    toolkit = TorchvisionToolkit(min_size=64, max_size=64, width=16, head=32)
    adapter = adapted(toolkit)
    model: Any = adapter.model
    model.roi_heads.fg_bg_sampler.batch_size_per_image = 8  # fewer than there are proposals: some are drawn
    whole_or_kept = FrozenFeatures(toolkit, adapter) if kept else toolkit
    return Case(whole_or_kept, adapter)


@pytest.fixture(
    params=[
        *("torchvision", "torchvision, features kept"),
        *(pytest.param(f"detectron2, {kind}", marks=pytest.mark.detectron2) for kind in ("fpn", "c4")),
    ]
)
def case(request: pytest.FixtureRequest) -> Case:
    toolkit, _, kind = request.param.partition(", ")
    if toolkit == "torchvision":
        return torchvision(kept=bool(kind))
    request.getfixturevalue("double_nms")
    return detectron2(kind, request.getfixturevalue("tiny_config"))


def mixed(model: nn.Module) -> dict[str, bool]:
    """Set some modules to training and others to evaluation, and return which."""
    model.eval()
    for child in list(model.children())[::2]:
        child.train()
    return modes(model)


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def assert_same(ours: list[Detections], others: list[Detections]) -> None:
    for found, other in zip(ours, others, strict=True):
        assert len(found) > 0
        assert torch.equal(found.labels, other.labels)
        torch.testing.assert_close(found.scores, other.scores, rtol=0, atol=1e-9)
        torch.testing.assert_close(found.boxes, other.boxes, rtol=0, atol=1e-4)


def assert_inside(boxes: Tensor, image: Tensor) -> None:
    height, width = image.shape[1:]
    assert (boxes >= 0).all()
    assert (boxes <= torch.tensor([width, height, width, height]) + 1e-4).all()
    assert (boxes[:, 2:] >= boxes[:, :2]).all()


def test_weights_are_drawn_from_the_seed_and_the_global_stream_is_left_alone(case: Case) -> None:
    before = torch.random.get_rng_state()
    first = case.toolkit.build(CLASSES, seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    again, other = (case.toolkit.build(CLASSES, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_loss_is_a_scalar_that_the_global_seed_replays(case: Case) -> None:
    before = mixed(case.model)

    def loss(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        value = case.toolkit.loss(case.model, BATCH)
        return value.detach(), torch.autograd.grad(value, case.adapter.phi)[0]

    (value, gradient), (again, same), (other, _) = loss(0), loss(0), loss(1)
    assert modes(case.model) == before
    assert value.dim() == 0
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient.norm() > 0
    assert torch.equal(value, again)
    assert torch.equal(gradient, same)
    assert not torch.equal(value, other)  # it samples


def test_a_loss_on_images_without_boxes_is_finite(case: Case) -> None:
    value = case.toolkit.loss(case.model, [example(0), example(0, seed=4)])
    (gradient,) = torch.autograd.grad(value, case.adapter.phi)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_detections_are_within_their_ranges(case: Case) -> None:
    before = mixed(case.model)
    for found, each in zip(case.toolkit.detect(case.model, SIZES), SIZES, strict=True):
        assert len(found) > 0
        assert not any(tensor.requires_grad for tensor in (found.boxes, found.scores))
        assert_inside(found.boxes, each.image)
        assert found.scores.diff().le(0).all()
        assert found.scores.min() >= 0
        assert found.scores.max() <= 1
        assert set(found.labels.tolist()) <= set(range(CLASSES))
    assert modes(case.model) == before


def test_an_image_s_detections_do_not_depend_on_its_batch(case: Case) -> None:
    whole = case.toolkit.detect(case.model, BATCH)
    assert_same(whole, [case.toolkit.detect(case.model, [each])[0] for each in BATCH])
    assert case.toolkit.detect(case.model, BATCH[:2])[0].scores.shape == whole[0].scores.shape


def test_an_unknown_placement_is_refused_with_the_known_ones(case: Case) -> None:
    assert_refused(
        lambda: case.toolkit.film_layers(case.model, ["roi_head", "necks"]), ConfigError, "necks", "backbone"
    )


def test_inputs_are_what_forward_takes(case: Case) -> None:
    with torch.no_grad():
        outputs = case.model.eval()(case.toolkit.inputs(case.model, SIZES))
    assert len(outputs) == len(SIZES)


def test_an_exported_detector_detects_the_same(case: Case, tmp_path: Path) -> None:
    expected = case.toolkit.detect(case.model, BATCH)
    case.toolkit.export(case.model, tmp_path / "tuned.pth")
    assert torch.equal(case.adapter.phi.detach(), PHI)  # the model is left as it was
    fresh = case.toolkit.build(CLASSES, seed=1).double()
    load_checkpoint(fresh, tmp_path / "tuned.pth")
    assert_same(case.toolkit.detect(fresh, BATCH), expected)


def test_a_phi_of_0_changes_nothing(case: Case) -> None:
    tuned = case.toolkit.detect(case.model, BATCH)
    case.adapter.set_phi(torch.zeros(4, dtype=torch.float64))
    plain = case.toolkit.detect(case.toolkit.build(CLASSES, seed=0).double(), BATCH)
    assert_same(case.toolkit.detect(case.model, BATCH), plain)
    assert any(len(a) != len(b) or not torch.equal(a.scores, b.scores) for a, b in zip(tuned, plain, strict=True))


def test_what_detections_depend_on_is_told(case: Case) -> None:
    settings = case.toolkit.inference(case.model)
    assert settings.keys() == {"score_thresh", "detections", "min_size", "max_size"}
    found = case.toolkit.detect(case.model, BATCH)
    assert max(map(len, found)) <= settings["detections"]
    assert min(float(each.scores.min()) for each in found if len(each)) >= settings["score_thresh"]
    assert told_inference(settings).startswith(f"with score_thresh {settings['score_thresh']:g}, at most ")
