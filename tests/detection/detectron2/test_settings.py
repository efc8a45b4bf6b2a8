"""Settings of inference of Detectron2's detectors against the same detectors built by its config."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2")

import detectron2
from detectron2.modeling import GeneralizedRCNNWithTTA

from coco_files import write_coco
from metricopt_ext.detection.detectron2.settings import config_lines, detectron2_settings
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
from metricopt_ext.detection.metric import MeanAveragePrecision, detector_metric
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.detection.settings import USUAL
from metricopt_ext.detection.task import load_examples
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.kept_outputs import KeptOutputs

pytestmark = pytest.mark.detectron2

CASCADE = ("MODEL.ROI_HEADS.NAME", "CascadeROIHeads", "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", True)
RETINANET = (
    *("MODEL.META_ARCHITECTURE", "RetinaNet", "MODEL.BACKBONE.NAME", "build_retinanet_resnet_fpn_backbone"),
    *("MODEL.RESNETS.OUT_FEATURES", ["res3", "res4", "res5"], "MODEL.FPN.IN_FEATURES", ["res3", "res4", "res5"]),
    *("MODEL.RETINANET.NUM_CLASSES", 2, "MODEL.RETINANET.SCORE_THRESH_TEST", 0.005),
)
KINDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "fpn": ("fpn", ()),
    "c4": ("c4", ("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", 4, "MODEL.RESNETS.WIDTH_PER_GROUP", 8)),
    "cascade": ("fpn", CASCADE),
    "retinanet": ("fpn", RETINANET),
}
VALUES: list[dict[str, Any]] = [
    {"score_thresh": 0.34, "nms": 0.6},
    {"detections": 3},
    {"nms": 0.35},
    {"size": 1.41},
    {"size": 0.71, "detections": 300, "score_thresh": 0.0005},
    {"size": 1.19},
]
OF_VIEWS: list[dict[str, Any]] = [
    {"flip": True},
    {"multi_scale": True, "score_thresh": 0.15},
    {"flip": True, "multi_scale": True, "size": 1.41, "detections": 30, "nms": 0.4},
]
NAMES = ("size", "score_thresh", "detections", "soft_nms", "flip", "multi_scale", "nms")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made(kind: str, tiny_config: Callable[..., Any]) -> tuple[Detectron2Toolkit, Any]:
    """A tiny detector whose scores are spread."""
    base, options = KINDS[kind]
    toolkit = Detectron2Toolkit(tiny_config(base, "BN", *options))
    model: Any = toolkit.build(2, seed=0)
    spread(model)
    return toolkit, model


def spread(model: Any) -> None:
    """Scale and shift the logits of classes, of each output alike, so that no scores tie nearly."""
    heads = getattr(getattr(model, "roi_heads", None), "box_predictor", getattr(model, "head", None))
    rng = torch.Generator().manual_seed(0)
    image = torch.randint(256, (3, 64, 64), generator=rng, dtype=torch.uint8)
    for each in heads if isinstance(heads, torch.nn.ModuleList) else [heads]:
        seen: list[torch.Tensor] = []
        handle = each.cls_score.register_forward_hook(lambda module, args, output, to=seen: to.append(output))
        with torch.no_grad():
            model.eval()([{"image": image, "height": 64, "width": 64}])
            handle.remove()
            logits = seen[0].movedim(1, -1).flatten(0, -2)
            scale = 2 / logits.std(0)
            shape = (-1, *[1] * (each.cls_score.weight.dim() - 1))
            each.cls_score.weight.mul_(scale.view(shape))
            each.cls_score.bias.sub_(logits.mean(0)).mul_(scale)


@pytest.fixture
def batch(squares: Callable[..., DetectionSet]) -> list[Example]:
    """Images of two shapes, of which the padded ones are seen otherwise."""
    return [*load_examples(squares(1)), *load_examples(squares(1, width=80, seed=3))]


def detected(toolkit: Detectron2Toolkit, model: Any, batch: Any) -> list[torch.Tensor]:
    found = toolkit.detect(model, batch)
    return [part for each in found for part in (each.boxes, each.scores, each.labels)]


def same(ours: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, other))


def test_it_detects_as_what_the_config_s_lines_build(
    kind: str, tiny_config: Callable[..., Any], squares: Callable[..., DetectionSet]
) -> None:
    base, options = KINDS[kind]
    cfg = tiny_config(base, "BN", *options)
    toolkit = Detectron2Toolkit(cfg)
    model: Any = toolkit.build(2, seed=0)
    batch = load_examples(squares(2))
    expected = detected(toolkit, model, batch)
    assert len(expected[0])
    settings = detectron2_settings(toolkit, model, names=NAMES)
    different = 0
    for values in ({}, *VALUES[: -1 if kind == "retinanet" else None]):
        lines = config_lines(cfg, values)
        stock = Detectron2Toolkit(tiny_config(base, "BN", *options, *lines))
        theirs = detected(stock, stock.build(2, seed=0), batch)
        before, resize = dict(vars(model)), toolkit._resize
        with settings.applied(values):
            assert same(detected(toolkit, model, batch), theirs)
        assert vars(model) == before
        assert toolkit._resize is resize
        different += not same(theirs, expected)
    assert same(detected(toolkit, model, batch), expected)
    assert different >= 3
    with pytest.raises(KeyError), settings.applied(VALUES[0]):
        raise KeyError
    assert same(detected(toolkit, model, batch), expected)


def test_views_are_joined_as_by_detectron2_s_own_augmentation(
    tiny_config: Callable[..., Any], batch: list[Example], kind: str, made: tuple[Detectron2Toolkit, Any]
) -> None:
    if kind == "retinanet":
        pytest.skip("Detectron2 augments R-CNNs alone")
    toolkit, model = made
    settings = detectron2_settings(toolkit, model, names=NAMES)
    for values in OF_VIEWS:
        base, options = KINDS[kind]
        cfg = tiny_config(base, "BN", *options)
        cfg.merge_from_list(config_lines(toolkit.cfg, values))  # of Detectron2's own tools: ours refuse augmentation
        stock = Detectron2Toolkit(cfg)
        assert stock.cfg.TEST.AUG.ENABLED
        built = stock.build(2, seed=0).eval()
        built.load_state_dict(model.state_dict())
        other: Any = GeneralizedRCNNWithTTA(stock.cfg, built)
        with torch.no_grad():
            theirs = [each["instances"] for each in other(stock.inputs(other.model, batch))]
        with settings.applied(values):
            ours = toolkit.detect(model, batch)
        for one, two in zip(ours, theirs, strict=True):
            assert len(one) > 3
            assert same([one.boxes, one.scores, one.labels], [two.pred_boxes.tensor, two.scores, two.pred_classes])


CHANGES: list[dict[str, Any]] = [
    {},
    {"score_thresh": 0.3, "detections": 1000},
    {"detections": 5},
    {"nms": 0.35},
    {"soft_nms": 0.2, "score_thresh": 0.0005, "detections": 300},
    {"size": 1.41},
    {"size": 1.41, "soft_nms": 0.5},
    {"flip": True},
    {"flip": True, "soft_nms": 0.2, "nms": 0.7},
    {"multi_scale": True, "size": 1.19},
    {"flip": True, "multi_scale": True, "size": 1.19, "soft_nms": 0.3},
    {"flip": True, "multi_scale": True, "size": 1.19, "score_thresh": 0.2, "detections": 40},
]


class Recording(MeanAveragePrecision):
    """Keeps what was judged."""

    def judge(self, found: Any, truth: Any) -> Any:
        vars(self)["found"] = found
        return super().judge(found, truth)


def test_the_metric_from_kept_outputs_is_that_of_a_new_pass(
    batch: list[Example], kind: str, made: tuple[Detectron2Toolkit, Any]
) -> None:
    toolkit, model = made
    judge = Recording("AP50", "voc")
    metric = detector_metric(judge, toolkit, batch, ("red", "green"), halves=())
    kept = KeptOutputs()
    ours = detectron2_settings(toolkit, model, names=NAMES, kept=kept)
    other = detectron2_settings(toolkit, model, names=NAMES)
    different, passes = set(), []

    def judged(settings: Any, values: dict[str, Any]) -> tuple[float, list[torch.Tensor]]:
        with settings.applied(values):
            cost = metric.judge(model).cost
        return cost, [part for each in vars(judge)["found"] for part in (each.boxes, each.scores, each.labels)]

    for values in CHANGES:
        cost, found = judged(other, values)
        for _ in range(2):
            again, seen = judged(ours, values)
            assert again == cost
            assert same(seen, found)
        passes.append(kept.passes)
        different.add(str([each.tolist() for each in found]))
    assert len(different) >= len(CHANGES) - 2
    # A new size or flip takes one each; what is seen in another company is seen anew, as its padding is.
    assert passes == [1, 1, 1, 1, 1, 2, 2, 4, 4, 7, 13, 13]


@pytest.mark.parametrize("more", [{}, {"soft_nms": 0.3}, {"flip": True}], ids=["NMS", "soft-NMS", "flip"])
def test_classes_have_score_thresholds_of_their_own(
    more: dict[str, Any], batch: list[Example], kind: str, made: tuple[Detectron2Toolkit, Any]
) -> None:
    toolkit, model = made
    numbers = {"red": 0, "green": 1}
    with detectron2_settings(toolkit, model, names=["score_thresh", "detections", *more]).applied(
        {"score_thresh": 0.1, "detections": 1000, **more}
    ):
        every = toolkit.detect(model, batch)
    scores = torch.cat([each.scores for each in every])
    least = (0.1, float(scores.median()) + 1e-4)
    values = {"score_thresh[red]": least[0], "score_thresh[green]": least[1], "detections": 4, **more}
    expected = detected(toolkit, model, batch)
    for kept in (None, KeptOutputs()):
        settings = detectron2_settings(toolkit, model, names=[*values], class_thresholds=numbers, kept=kept)
        with settings.applied(values):
            found = toolkit.detect(model, batch)
        assert same(detected(toolkit, model, batch), expected)
        for ours, all_of_it in zip(found, every, strict=True):
            rows = (all_of_it.scores > torch.tensor(least)[all_of_it.labels]).nonzero().flatten()
            assert 0 < len(rows) < len(all_of_it.scores)
            for key in ("boxes", "scores", "labels"):
                assert torch.equal(getattr(ours, key), getattr(all_of_it, key)[rows[:4]])


SETS = """
import runpy, sys
from detectron2.data.datasets import register_coco_instances

register_coco_instances("tiny", {}, sys.argv[1], sys.argv[2])
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_stock_train_net_gives_the_tuned_number(
    tmp_path: Path, tiny_config: Callable[..., Any], squares: Callable[..., DetectionSet]
) -> None:
    script = Path(detectron2.__file__).parents[1] / "tools" / "train_net.py"
    if not script.is_file():
        pytest.skip("needs tools/train_net.py of Detectron2's source tree")
    toolkit = Detectron2Toolkit(tiny_config())
    model: Any = toolkit.build(2, seed=0)
    spread(model)
    images = squares(4)
    values = {"size": 1.41, "flip": True, "multi_scale": True, "score_thresh": 0.01, "detections": 300, "nms": 0.6}
    settings = detectron2_settings(toolkit, model, names=["nms", *USUAL], kept=KeptOutputs())
    with settings.applied({**values, "detections": 30}):
        found = toolkit.detect(model, load_examples(images))
    for image, each in zip(images.images, found, strict=True):  # some of it, a little aside: an AP50 between 0 and 1
        beside = each.boxes[::4] + 0.15 * (each.boxes[::4, 2:] - each.boxes[::4, :2]).repeat(1, 2)
        none = torch.zeros(len(beside), dtype=torch.bool)
        vars(image).update(boxes=beside.round(), labels=each.labels[::4], difficult=none, crowd=none)
    metric = detector_metric(
        MeanAveragePrecision("AP50", "coco"), toolkit, load_examples(images), images.classes, halves=()
    )
    expected = []
    for each in ({}, {**values, "flip": False, "multi_scale": False}, values):
        with settings.applied(each):
            expected.append(100 * metric.judge(model).value)
    assert len({round(value, 3) for value in expected}) == 3
    assert all(1 < value < 99 for value in expected)

    truth = write_coco(tmp_path / "truth.json", images)
    (tmp_path / "run.py").write_text(SETS)
    cfg = toolkit.cfg.clone()
    cfg.pop("METRICOPT")
    cfg.DATASETS.TEST = ("tiny",)
    (tmp_path / "stock.yaml").write_text(cfg.dump())
    torch.save({"model": model.state_dict()}, tmp_path / "model.pth")

    def evaluated(tuned: float) -> "subprocess.CompletedProcess[str]":
        said = [["bbox", "AP50", expected[1], 1e-9], ["bbox_TTA", "AP50", tuned, 1e-9]]
        command = [sys.executable, "run.py", str(truth), str(tmp_path), str(script), "--eval-only"]
        command += ["--config-file", "stock.yaml", "MODEL.WEIGHTS", "model.pth", "OUTPUT_DIR", "stock"]
        command += [*config_lines(toolkit.cfg, values), "TEST.EXPECTED_RESULTS", repr(said)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    right, wrong = evaluated(expected[2]), evaluated(expected[2] + 1e-6)
    assert "Results verification passed." in right.stdout, right.stdout[-2000:] + right.stderr[-2000:]
    assert right.returncode == 0
    assert wrong.returncode == 1
    assert "Result verification failed!" in wrong.stdout


def test_lines_are_keys_and_values_in_turns(tiny_config: Callable[..., Any]) -> None:
    cfg = tiny_config("fpn", "BN", "INPUT.MIN_SIZE_TEST", 800)
    assert config_lines(cfg, {"size": 1.41, "detections": 300, "score_thresh": 0.0005}) == [
        *("MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0005", "TEST.DETECTIONS_PER_IMAGE", "300"),
        *("INPUT.MIN_SIZE_TEST", "1128", "INPUT.MAX_SIZE_TEST", "1880"),
    ]
    views = {"flip": True, "multi_scale": True, "size": 1.19, "soft_nms": 0.0}
    assert config_lines(cfg, views) == [
        *("INPUT.MIN_SIZE_TEST", "952", "INPUT.MAX_SIZE_TEST", "1586", "TEST.AUG.ENABLED", "True"),
        *("TEST.AUG.MIN_SIZES", "(800, 952, 1128)", "TEST.AUG.MAX_SIZE", "1880", "TEST.AUG.FLIP", "True"),
    ]
    with pytest.raises(ConfigError, match=r"Detectron2's.*score_thresh"):
        config_lines(cfg, {"flips": True})
    with pytest.raises(ConfigError, match=r"GeneralizedRCNN.*soft_nms.*detectron2_"):
        config_lines(cfg, {"flip": True, "soft_nms": 0.2})
    with pytest.raises(ConfigError, match=r"RetinaNet has no key for flip: detect .*names=\['flip'\]\).applied\({"):
        config_lines(tiny_config("fpn", "BN", *RETINANET), {"flip": True})
