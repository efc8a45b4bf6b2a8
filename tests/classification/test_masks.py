"""Segmentation by the tool: images and label maps from folders, networks of torchvision, mean IoU and boundaries."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as skm
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.models import ResNet
from torchvision.models.resnet import Bottleneck
from torchvision.models.segmentation import fcn

from helpers.refusals import assert_refused, having
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.classification.classifier import built, classifier
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.classification.masks import load_masks
from metricopt_ext.classification.offsets import tune_offsets
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.segmentation import boundary_f, boundary_f_metric, mean_iou_metric
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.splits import load_splits, train_subset
from metricopt_ext.classification.target_metrics import target_metric
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.cli import run_and_report
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint


def write(folder: Path, count: int = 20, size: int = 32) -> Path:
    """Write images of a bright square on a dark ground, with masks in a palette; the outermost pixels don't count."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(count):
        mask = np.zeros((size, size), np.uint8)
        top, left = rng.integers(2, size // 2, 2)
        mask[top : top + size // 3, left : left + size // 3] = 1 + i % 2
        pixels = rng.integers(0, 90, (size, size, 3)) + np.stack([90 * (mask == 1), 90 * (mask == 2), 0 * mask], -1)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{i:02d}.png")
        mask[0], mask[-1] = 255, 255
        shown = Image.fromarray(mask, "P")
        shown.putpalette([7 * j % 256 for j in range(768)])
        shown.save(folder / "masks" / f"{i:02d}.png")
    return folder


def config_of(folder: Path, *more: str) -> ClassificationConfig:
    settings = [
        *("data.name=segmentation", "data.kind=segmentation", f"data.root={folder}", "data.fractions=[0.5,0.25,0.25]"),
        *("model.name=lraspp_mobilenet_v3_large", "model.epochs=2", "model.batch_size=5", "batch_size=2", "seeds=1"),
        *("adapter.dim=2", "population=2", "queries=14", "finetune.steps=2", "best_evals=2", "pictures=false"),
        *("metric.name=mean_iou", "device=cpu", "starts=[loss_finetune]"),
    ]
    return load_config(ClassificationConfig, None, [*settings, *more])


def test_label_maps_keep_their_numbers(tmp_path: Path) -> None:
    data = load_masks(write(tmp_path / "set"))
    assert (data.x.shape, data.y.shape) == ((20, 3, 32, 32), (20, 32, 32))
    assert data.class_names == ("0", "1", "2")
    assert data.y[3].unique().tolist() == [0, 2, 255]
    assert (data.y[:, 0] == 255).all()
    small = load_masks(tmp_path / "set", 16)
    assert set(small.y.unique().tolist()) <= {0, 1, 2, 255}  # nothing between them
    assert (small.x.shape, small.y.shape) == ((20, 3, 16, 16), (20, 16, 16))


def test_vocs_folders_are_found_and_images_without_a_map_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "set")
    (folder / "images").rename(folder / "JPEGImages")
    (folder / "masks").rename(folder / "SegmentationClass")
    (folder / "SegmentationClass" / "07.png").unlink()
    with pytest.warns(UserWarning, match=having("1", "07.png")):
        assert len(load_masks(folder)) == 19
    (folder / "JPEGImages" / "03.png").unlink()
    assert_refused(lambda: load_masks(folder), DataError, "1", "03.png")


def test_maps_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", 4)
    assert_refused(lambda: load_masks(folder / "images"), DataError, "images", "JPEGImages")
    mask = folder / "masks" / "02.png"
    Image.new("RGB", (32, 32)).save(mask)
    assert_refused(lambda: load_masks(folder), DataError, "02.png", "RGB")
    Image.new("L", (16, 32)).save(mask)
    assert_refused(lambda: load_masks(folder), DataError, "02.png", "16 x 32", "32 x 32")
    for file in (folder / "masks").iterdir():
        Image.new("L", (32, 32)).save(file)
    assert_refused(lambda: load_masks(folder), DataError, "0")


def test_a_lossy_map_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", 1)
    mask = folder / "masks" / "00.png"
    with Image.open(mask) as image:
        image.convert("L").save(mask.with_suffix(".jpg"))
    mask.unlink()
    assert_refused(lambda: load_masks(folder, None), DataError, "00.jpg", "JPEG", "PNG")


@pytest.mark.parametrize("image_size", [None, 16])
def test_maps_of_another_size_than_their_image_are_refused(tmp_path: Path, image_size: int | None) -> None:
    folder = write(tmp_path / "set", 1)
    bright = np.zeros((32, 48), np.uint8)
    bright[:4] = 1
    stored = Image.fromarray(255 * bright)
    stored.save(folder / "images" / "00.png")
    Image.fromarray(bright.T.copy()).save(folder / "masks" / "00.png")
    assert_refused(lambda: load_masks(folder, image_size), DataError, "masks/00.png", "32 x 48", "48 x 32")
    turn = Image.Exif()
    turn[274] = 5  # the stored rows are the columns to be seen
    stored.save(folder / "images" / "00.png", exif=turn)
    data = load_masks(folder, image_size)
    assert torch.equal(data.x[0, 0] > 127, data.y[0] == 1)
    assert data.y[0, 0].unique().tolist() == [0, 1]
    mask = Image.fromarray(bright)
    mask.save(folder / "masks" / "00.png")
    assert_refused(lambda: load_masks(folder, image_size), DataError, "48 x 32", "32 x 48", "EXIF")
    mask.save(folder / "masks" / "00.png", exif=turn)
    assert torch.equal(load_masks(folder, image_size).y, data.y)


def test_losses_and_metrics_leave_out_what_does_not_count() -> None:
    rng = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(4, 3, 8, 9, generator=rng), torch.randint(0, 3, (4, 8, 9), generator=rng)
    labels[torch.rand(labels.shape, generator=rng) < 0.2] = 255
    labels[3] = 255
    counts = labels != 255
    each = torch.nn.functional.cross_entropy(logits, labels.clamp(max=2), reduction="none")
    expected = torch.stack([each[i][counts[i]].mean() if counts[i].any() else torch.tensor(0.0) for i in range(4)])
    torch.testing.assert_close(Target("segmentation", 3).losses(logits, labels), expected)
    predicted, true = logits.argmax(1)[counts], labels[counts]
    reference: dict[str, Any] = {
        "mean_iou": skm.jaccard_score(true, predicted, average="macro"),
        "pixel_accuracy": skm.accuracy_score(true, predicted),
        "boundary_f": boundary_f(logits.argmax(1), labels, 3),
    }
    for name, value in reference.items():
        assert target_metric(name, "segmentation").function(logits, labels) == pytest.approx(value)
    assert_refused(lambda: target_metric("mean_iou", "segmentation").function(logits[3:], labels[3:]), DataError)


@pytest.mark.slow
def test_the_report_has_what_the_written_networks_do(tmp_path: Path) -> None:
    config = config_of(write(tmp_path / "set"))
    run_and_report(ClassificationExperiment, config, tmp_path / "run", resume=False)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    splits = load_splits(config, 0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [10, 5, 5]
    assert content["methods"]["class_offsets"]["queries_total"] == 14
    for name, file in (("pretrained", "model"), ("metricopt", "tuned")):
        model = built(config, splits)
        load_checkpoint(model, tmp_path / "run" / "seed-0" / f"{file}.safetensors")
        metric = mean_iou_metric(list(splits.test.x), list(splits.test.y), 3)
        assert content["methods"][name]["test"] == [pytest.approx(1 - metric.judge(model.eval()).cost, abs=1e-3)]
        with torch.no_grad():
            maps = predict(model, splits.test.x).argmax(1)
        of_maps = boundary_f(maps, splits.test.y, 3)
        by_model = boundary_f_metric(list(splits.test.x), list(splits.test.y), 3).judge(model)
        assert of_maps == pytest.approx(1 - by_model.cost, abs=0.02)  # one by one, other kernels round
    assert len(train_subset(splits, 0)) == 5


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["metric.name=accuracy"], ("mean_iou", "boundary_f")),
        (["data.kind=classes"], ("data.kind=classes",)),
        (["adapter.outputs=true"], ("adapter.keep_before",)),
        (["model.augment=true"], ("shift.kind=image",)),
        (["model.name=resnet18"], ("model.name='resnet18'",)),
        (["methods=[sl_r]"], ("data.kind=segmentation",)),
    ],
)
def test_what_segmentation_has_not_is_refused(tmp_path: Path, more: list[str], names: tuple[str, ...]) -> None:
    assert_refused(
        lambda: run_and_report(ClassificationExperiment, config_of(tmp_path, *more), tmp_path / "run", resume=False),
        ConfigError,
        *names,
    )


def thin_resnet(replace_stride_with_dilation: Any = None, **options: Any) -> nn.Module:
    """A ResNet-50 of one block for each stage, a quarter as wide within: files of it stay small."""
    dilated = {"replace_stride_with_dilation": replace_stride_with_dilation}
    return ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=16, **dilated)


@pytest.mark.slow
@pytest.mark.parametrize("auxiliary", [True, False])
@pytest.mark.parametrize("name", ["fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"])
def test_state_dicts_are_read_as_torchvision_publishes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, auxiliary: bool
) -> None:
    if name.startswith("lraspp") and auxiliary:
        pytest.skip("LR-ASPP has no auxiliary classifier")
    monkeypatch.setattr(fcn, "resnet50", thin_resnet)
    torch.manual_seed(0)
    options = {} if name.startswith("lraspp") else {"aux_loss": auxiliary}
    theirs = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=21, **options)
    torch.save({"model": theirs.state_dict(), "epoch": 1}, tmp_path / "published.pth")  # as its references save it
    given = [f"model.name={name}", f"model.weights={tmp_path / 'published.pth'}"]
    folder = write(tmp_path / "set", 12)
    config = config_of(folder, *given, "data.classes=21")
    splits = load_splits(config, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = classifier(config, splits, 0, tmp_path / "run")
    said = [str(each.message) for each in caught if "auxiliary classifier" in str(each.message)]
    assert len(said) == auxiliary
    with torch.no_grad():
        x = splits.test.x[:1]
        torch.testing.assert_close(model.eval()(x)["out"], theirs.eval()(x)["out"], rtol=0, atol=0)
    fewer = config_of(folder, *given)
    assert_refused(
        lambda: classifier(fewer, load_splits(fewer, 0), 0, tmp_path / "other"), DataError, "data.classes=21"
    )
    assert_refused(lambda: load_splits(config_of(folder, "data.classes=2"), 0), DataError, "2")


def test_a_network_of_fewer_classes_is_refused(tmp_path: Path) -> None:
    small = torchvision.models.get_model("lraspp_mobilenet_v3_large", weights_backbone=None, num_classes=2)
    torch.save(small.state_dict(), tmp_path / "small.pth")
    config = config_of(write(tmp_path / "set", 12), f"model.weights={tmp_path / 'small.pth'}")
    assert_refused(lambda: classifier(config, load_splits(config, 0), 0, tmp_path / "run"), DataError, "2", "3", "maps")


class Biased(nn.Module):
    """A network that knows the class of each pixel, but prefers class 0 by far."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.norm(x) + torch.tensor([2.0, 0.0, 0.0]).view(3, 1, 1), "aux": x}


def test_offsets_of_classes_are_found_for_pixels() -> None:
    labels = torch.randint(0, 3, (6, 5, 7), generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).float()
    calls = []

    class Counted(Biased):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            calls.append(len(x))
            return super().forward(x)

    task = FinetuneTask(
        attach_film(Counted().eval(), dim=2),
        metric=model_metric(target_metric("mean_iou", "segmentation"), Split(x, labels)),
    )
    tuned = tune_offsets(task, x, budget=60)
    assert tuned is not None
    with torch.no_grad():
        assert torch.equal(predict(tuned, x).argmax(1), labels)
        assert tuned(x)["aux"].shape == x.shape  # in the network's own form
        assert (predict(task.adapter.model, x).argmax(1) == 0).all()
    assert 1 < task.metric.ledger.spent <= 60
    assert len(calls) < 6  # the network's outputs are kept


def test_the_report_has_the_baseline_of_pixels(tmp_path: Path) -> None:
    config = config_of(write(tmp_path / "set"))
    baselines = ClassificationExperiment.baselines(config)
    assert "class_offsets" in baselines
    assert "class_offsets" not in ClassificationExperiment.baselines(
        load_config(
            ClassificationConfig, None, ["data.name=diabetes", "data.kind=regression", "model.name=tabular_mlp"]
        )
    )
