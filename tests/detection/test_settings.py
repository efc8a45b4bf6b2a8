"""Settings of inference: the same as torchvision's own code where it has them, and a loop by hand where it has not."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")


from helpers.boxes import naive_iou
from helpers.detectors import SMALL_IMAGES as IMAGES
from helpers.detectors import small_detector as made
from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.detection.settings import PRESETS, detection_settings, set_on
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.kept_outputs import KeptOutputs

NAMES = ("FasterRCNN", "MaskRCNN", "RetinaNet", "FCOS", "SSD")
LOW = {"score_thresh": 0.0005, "detections": 300}


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


@torch.no_grad()
def found_by(model: nn.Module, images: list[Tensor] = IMAGES) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = model(list(images))
    assert sum(len(each["scores"]) for each in found) > 3 * len(images)
    return found


def assert_same(ours: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> None:
    for one, two in zip(ours, other, strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert torch.equal(one[key], two[key]), key


def owner_of(model: Any) -> Any:
    return getattr(model, "roi_heads", model)


def everything(model: nn.Module, **options: Any) -> Any:
    names = ["size", "score_thresh", "detections", "soft_nms", "flip", "multi_scale", "nms"]
    return detection_settings(model, names=names, **options)


ALL_AT_ONCE = {"size": 1.19, "score_thresh": 0.01, "detections": 40, "soft_nms": 0.3, "flip": True, "multi_scale": True}


def test_afterwards_everything_is_as_it_was(model: Any) -> None:
    expected, settings = found_by(model), everything(model)
    with settings.applied({}):
        assert_same(found_by(model), expected)
    with pytest.raises((RuntimeError, ValueError)), settings.applied(ALL_AT_ONCE):
        model([torch.zeros(5, 48, 64).double()])  # fails on the way
    assert_same(found_by(model), expected)


CHANGES: list[dict[str, Any]] = [
    {"score_thresh": 0.3},
    {"detections": 5},
    {"nms": 0.35},
    LOW,
    {"soft_nms": 0.2, **LOW},
    {"size": 1.41},
    {"size": 0.71, "soft_nms": 0.5},
    {"flip": True},
    {"flip": True, "nms": 0.7, **LOW},
    {"multi_scale": True, "size": 1.19},
    ALL_AT_ONCE,
]


@pytest.mark.slow
def test_what_is_found_by_kept_outputs_is_as_by_a_new_pass(model: Any) -> None:
    kept = KeptOutputs()
    ours, other = everything(model, kept=kept, boxes_only=True), everything(model)
    passes = []
    for each in CHANGES:
        with other.applied(each):
            anew = [{key: image[key] for key in ("boxes", "scores", "labels")} for image in found_by(model)]
        with ours.applied(each):
            assert_same(found_by(model), anew)
            passes.append(kept.passes)
    # A size or flip that is new takes one each; of the last two some were seen before.
    assert passes == [1, 1, 1, 1, 1, 2, 3, 4, 4, 5, 7]


def with_own(model: Any, values: dict[str, Any]) -> Any:
    """A copy whose own attributes are set."""
    stock = copy.deepcopy(model)
    owner, transform = owner_of(stock), stock.transform
    owner.score_thresh = values.get("score_thresh", owner.score_thresh)
    owner.detections_per_img = values.get("detections", owner.detections_per_img)
    owner.nms_thresh = values.get("nms", owner.nms_thresh)
    size = values.get("size", 1.0)
    transform.min_size, transform.max_size = (round(48 * size),), round(transform.max_size * size)
    if transform.fixed_size:
        transform.fixed_size = tuple(round(side * size) for side in transform.fixed_size)
    return stock


def test_what_attributes_say_is_what_torchvision_does_with_them(model: Any) -> None:
    settings = everything(model)
    for values in (*CHANGES[:4], {"size": 1.41}, {"size": 0.71}):
        expected = found_by(with_own(model, values))
        with settings.applied(values):
            assert_same(found_by(model), expected)
        mine = copy.deepcopy(model)
        assert set_on(mine, values) == ""
        assert_same(found_by(mine), expected)


def of_views(model: Any, scales: list[float], flips: list[bool], threshold: float) -> list[list[Any]]:
    """For each image ``[score, box, label]`` of all views, by copies of the model that suppress nothing."""
    seen: list[list[Any]] = [[] for _ in IMAGES]
    for scale in scales:
        stock = with_own(model, {"score_thresh": threshold, "nms": 1.0, "detections": 10**6, "size": scale})
        for flip in flips:
            for place, each in enumerate(found_by(stock, [image.flip(-1) if flip else image for image in IMAGES])):
                width, fields = IMAGES[place].shape[2], ("scores", "boxes", "labels")
                for score, box, label in zip(*(each[key].tolist() for key in fields), strict=True):
                    mirrored = [width - box[2], box[1], width - box[0], box[3]]
                    seen[place].append([score, mirrored if flip else box, label])
    return seen


def by_hand(candidates: list[Any], sigma: float, nms: float, threshold: float, most: int) -> list[Any]:
    kept: list[Any] = []
    rest = [list(each) for each in candidates]
    while rest and len(kept) < 400:
        rest.sort(key=lambda each: -each[0])
        best = rest.pop(0)
        if best[0] <= threshold:
            break
        kept.append(best)
        for each in rest:
            if each[2] == best[2]:
                overlap = naive_iou(best[1], each[1])
                each[0] *= math.exp(-(overlap**2) / sigma) if sigma else float(overlap <= nms)
    return kept[:most]


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"soft_nms": 0.2}], ids=["NMS", "soft-NMS"])
@pytest.mark.parametrize("name", ["FasterRCNN", "RetinaNet", "FCOS", "SSD"])
def test_views_are_merged_as_by_hand(name: str, values: dict[str, float]) -> None:
    model = made(name)
    options = {"score_thresh": 0.2, "detections": 15}
    with detection_settings(model).applied({**options, "flip": True, "multi_scale": True, **values}):
        found = found_by(model)
    sigma, nms = values.get("soft_nms", 0.0), owner_of(model).nms_thresh
    candidates = of_views(model, [1.0, 0.84, 1.19], [False, True], 0.2)
    for each, seen in zip(found, candidates, strict=True):
        expected = by_hand(seen, sigma, nms, 0.2, 15)
        assert len(seen) > 2 * len(expected) > 6
        scores, boxes, labels = ([row[i] for row in expected] for i in range(3))
        assert each["labels"].tolist() == labels
        torch.testing.assert_close(each["scores"], torch.tensor(scores, dtype=torch.float64), rtol=1e-9, atol=0)
        torch.testing.assert_close(each["boxes"], torch.tensor(boxes, dtype=torch.float64), rtol=0, atol=1e-6)


def test_changed_weights_buffers_and_phi_take_a_new_pass_and_the_old_ones_none() -> None:
    model = made("FasterRCNN")
    adapter = attach_film(model, ["backbone.body.1"], dim=2)
    kept = KeptOutputs()
    settings = detection_settings(model, kept=kept)
    phi = torch.tensor([0.02, -0.03], dtype=torch.float64)

    def passes() -> int:
        before = kept.passes
        with settings.applied({}):
            ours = found_by(model)
            assert_same(ours, found_by(model))
        assert_same(ours, found_by(model))
        return kept.passes - before

    assert [passes(), passes()] == [1, 0]
    with adapter.using(phi):
        assert [passes(), passes()] == [1, 0]
    with adapter.using(phi.clone()):  # the same numbers elsewhere
        assert passes() == 0
    with adapter.using(-phi):
        assert passes() == 1
    assert passes() == 0
    model.backbone.body[1].running_mean += 1e-3
    assert [passes(), passes()] == [1, 0]
    model.backbone.body[0].weight.data.mul_(1.001)  # which leaves no trace but in the numbers
    assert [passes(), passes()] == [1, 0]
    model.backbone.body[1].eps = 1.1e-5
    assert [passes(), passes()] == [1, 0]
    with settings.applied({"score_thresh": 0.5, "detections": 4}):
        found_by(model)
    assert passes() == 0


def test_a_copy_that_is_made_in_the_block_acts_so_too_with_weights_of_its_own() -> None:
    model = made("FasterRCNN")
    with detection_settings(model, kept=KeptOutputs()).applied({"flip": True}):
        expected = found_by(model)
        twin = copy.deepcopy(model)
        assert_same(found_by(twin), expected)
        with torch.no_grad():
            twin.roi_heads.box_predictor.cls_score.bias.add_(torch.tensor([0.0, 3, 0]))
        assert not torch.equal(found_by(twin)[0]["scores"], expected[0]["scores"])
        assert_same(found_by(model), expected)


def test_phi_of_a_box_head_shares_the_features_before_it() -> None:
    model = made("FasterRCNN")
    adapter = attach_film(model, ["roi_heads.box_head.*"], dim=2)
    kept, ran = KeptOutputs(), list[int]()
    settings, anew = everything(model, kept=kept), everything(model)
    model.backbone.register_forward_hook(lambda *_: ran.append(1))

    def runs(phi: Tensor, **values: Any) -> int:
        values |= LOW
        with adapter.using(phi):
            with anew.applied(values):
                expected = found_by(model)
            ran.clear()
            with settings.applied(values):
                assert_same(found_by(model), expected)
        return len(ran)

    a, b, c = torch.tensor([[0.02, -0.03], [0.04, 0.01], [-0.05, 0.02]], dtype=torch.float64)
    flip = {"flip": True, "soft_nms": 0.2}
    assert [runs(a), runs(b), runs(a, nms=0.4), runs(c)] == [1, 0, 0, 0]
    assert [runs(a, **flip), runs(b, **flip), runs(b, size=1.41), runs(c, size=1.41)] == [1, 0, 1, 0]
    model.backbone.body[1].running_mean += 1e-3
    assert [runs(a), runs(b)] == [1, 0]


def test_other_images_and_other_batches_are_others() -> None:
    model = made("FasterRCNN")
    kept, ran = KeptOutputs(), list[int]()
    model.backbone.register_forward_hook(lambda *_: ran.append(1))
    with detection_settings(model, kept=kept).applied({}), torch.no_grad():
        for images in (IMAGES, IMAGES[:1], [IMAGES[0] * 0.5], IMAGES):
            model(list(images))
    assert kept.passes == 1  # over all three
    assert len(ran) == 3  # padded together, images of different sizes are seen otherwise than alone


def test_there_is_what_inference_allows_and_what_is_free_for_an_average_precision() -> None:
    model = made("FasterRCNN")
    every, one, two = (detection_settings(model, inference=each) for each in (None, 1, 2))
    assert every.names == ("size", "score_thresh", "detections", "soft_nms", "flip", "multi_scale")
    assert every.presets == PRESETS
    assert one.names == ("size", "score_thresh", "detections", "soft_nms")
    assert one["size"].values == (0.71, 0.84, 1.0)
    assert list(one.presets) == ["soft_nms"]
    assert two["size"].values == (0.71, 0.84, 1.0, 1.19, 1.41)
    assert every.factor({"size": 1.41, "flip": True}) == pytest.approx(2 * 1.41**2)
    assert every.free == {}
    assert detection_settings(model, average_precision=True).free == LOW


OF_CLASSES = {"red": 1, "green": 2}


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("MaskRCNN", {"names": ["flips"]}, ("MaskRCNN", "flips", "multi_scale")),
        ("MaskRCNN", {"kept": KeptOutputs()}, ("MaskRCNN", "boxes_only=True")),
        ("FasterRCNN", {"names": ["flip"], "inference": 1}, ("flip", "inference=1")),
        ("FasterRCNN", {"class_thresholds": OF_CLASSES, "names": ["score_thresh[blue]"]}, ("score_thresh[blue]",)),
    ],
)
def test_what_can_not_be_is_refused(name: str, options: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: detection_settings(made(name), **options), ConfigError, *names)


def test_other_detectors_are_refused() -> None:
    assert_refused(lambda: detection_settings(nn.Linear(2, 2)), ConfigError, "Linear", "Faster", "Mask")


OWN = {"score_thresh[red]": 0.02, "score_thresh[green]": 0.4}


@pytest.mark.parametrize("more", [{}, {"flip": True, "soft_nms": 0.3}], ids=["NMS", "soft-NMS"])
def test_classes_have_score_thresholds_of_their_own(model: Any, more: dict[str, Any]) -> None:
    stock = copy.deepcopy(model)
    owner_of(stock).score_thresh, owner_of(stock).detections_per_img = 0.02, 10**6
    with detection_settings(stock, names=["flip", "soft_nms"], boxes_only=True).applied(more):
        every = found_by(stock)
    # Detectors of one stage find the background too, by the model's own threshold.
    own = {1: 0.02, 2: 0.4}
    least = [[own.get(label, owner_of(model).score_thresh) for label in each["labels"].tolist()] for each in every]
    chosen = [
        (each["scores"] > torch.tensor(above)).nonzero().flatten() for each, above in zip(every, least, strict=True)
    ]
    most = min(map(len, chosen))
    assert most > 3
    assert any(int(rows[most - 1]) >= most for rows in chosen)  # one that is left out is better than one that is not
    names = [*OWN, "detections", "flip", "soft_nms"]
    expected = found_by(model)
    for kept in (None, KeptOutputs()):
        settings = detection_settings(model, names=names, class_thresholds=OF_CLASSES, kept=kept, boxes_only=True)
        with settings.applied({}):
            assert [len(each["scores"]) for each in found_by(model)] == [len(each["scores"]) for each in expected]
        with settings.applied({**OWN, "detections": most, **more}):
            found = found_by(model)
        assert_same(found_by(model), expected)
        for ours, all_of_it, rows in zip(found, every, chosen, strict=True):
            for key in ("boxes", "scores", "labels"):
                assert torch.equal(ours[key], all_of_it[key][rows[:most]])


@pytest.mark.parametrize(
    ("values", "of_classes"), [({"size": 1.41, "flip": True, "soft_nms": 0.2, **LOW}, None), (OWN, OF_CLASSES)]
)
def test_what_no_attribute_says_is_told_with_code_that_does_it(values: dict[str, Any], of_classes: Any) -> None:
    model = made("FasterRCNN")
    settings = detection_settings(model, class_thresholds=of_classes)
    with settings.applied(values):
        expected = found_by(model)
    said, found = settings.set_on(model, values), list[Any]()
    code = said.split("`")[1].replace("model(images)", "found.extend(found_by(model))")
    exec(code, {"detection_settings": detection_settings, "model": model, "found": found, "found_by": found_by})
    assert_same(found, expected)
