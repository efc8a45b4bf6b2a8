"""Examples in memory, their batches, a detector in a finetuning task, and its training from scratch."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from helpers.refusals import assert_refused

pytest.importorskip("torchvision")

from metricopt_ext.data import training_state
from metricopt_ext.detection.records import Annotated, DetectionSet
from metricopt_ext.detection.shapes import masks_from
from metricopt_ext.detection.task import ExampleBatches, jittered, load_examples
from metricopt_ext.detection.toolkit import Example, images_in
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.detection.train import train_detector
from metricopt_ext.errors import ConfigError, DataError, FileFormatError

TOOLKIT = TorchvisionToolkit(min_size=64, max_size=64, width=16, head=64)


def annotated(path: Path, width: int, height: int, boxes: list[list[float]]) -> Annotated:
    no = torch.zeros(len(boxes), dtype=torch.bool)
    labels = torch.arange(len(boxes)) % 2
    return Annotated(path.stem, path, width, height, torch.tensor(boxes).view(-1, 4), labels, no, no)


def squares(n: int) -> list[Example]:
    """One bright square on dark noise in each image, red for class 0 and green for class 1."""
    rng = torch.Generator().manual_seed(0)
    made = []
    for i in range(n):
        left, top, side = (int(torch.randint(low, 32, (), generator=rng)) for low in (0, 0, 20))
        image = torch.randint(60, (3, 64, 64), generator=rng, dtype=torch.uint8)
        image[i % 2, top : top + side, left : left + side] = 250
        truth = annotated(Path("none"), 64, 64, [[left, top, left + side, top + side]])
        truth.labels[:] = i % 2
        made.append(Example(image, truth))
    return made


def test_larger_images_are_scaled_down_with_their_boxes(tmp_path: Path) -> None:
    Image.new("RGB", (80, 40), (10, 20, 30)).save(tmp_path / "wide.png")
    Image.new("RGB", (16, 32), (10, 20, 30)).save(tmp_path / "tall.png")
    wide = annotated(tmp_path / "wide.png", 80, 40, [[20.0, 10.0, 60.0, 40.0]])
    wide = replace(wide, areas=torch.tensor([800.0], dtype=torch.float64))
    tall = annotated(tmp_path / "tall.png", 16, 32, [])
    first, second = load_examples(DetectionSet(("a", "b"), [wide, tall]), size=40)
    assert first.image.shape == (3, 20, 40)
    assert first.image.dtype == torch.uint8
    assert first.image[:, 10, 20].tolist() == [10, 20, 30]
    assert (first.truth.width, first.truth.height) == (40, 20)
    assert first.truth.boxes.tolist() == [[10.0, 5.0, 30.0, 20.0]]
    assert first.truth.areas is not None
    assert first.truth.areas.tolist() == [200.0]
    assert second.image.shape == (3, 32, 16)
    assert second.truth is tall
    assert load_examples(DetectionSet(("a", "b"), [wide]))[0].image.shape == (3, 40, 80)


def test_batches_hold_examples_and_can_be_replayed() -> None:
    examples = squares(20)
    batches = ExampleBatches(examples, batch_size=6)
    batch = batches(1, 2, 3)
    assert len(batch) == 6
    assert all(any(item is example for example in examples) for item in batch)
    assert [id(item) for item in batch] == [id(item) for item in batches(1, 2, 3)]
    assert [id(item) for item in batch] != [id(item) for item in batches(1, 2, 4)]
    assert_refused(lambda: ExampleBatches([], 2), DataError)


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, settings = ExampleBatches(squares(8), 2), {"steps": 12, "lr": 0.05, "warmup": 3}
    checkpoint = tmp_path / "training.safetensors"
    monkeypatch.setattr(training_state, "KEEP_EVERY", 0.0)

    def killed(seed: int, task: int, step: int) -> list[Example]:
        if step == 8:
            raise KeyboardInterrupt
        return batches(seed, task, step)

    straight = TOOLKIT.build(2, seed=0)
    losses = train_detector(TOOLKIT, straight, batches, **settings)
    torch.rand(7)
    with pytest.raises(KeyboardInterrupt):
        train_detector(TOOLKIT, TOOLKIT.build(2, seed=0), killed, checkpoint=checkpoint, **settings)
    resumed = TOOLKIT.build(2, seed=1)
    assert train_detector(TOOLKIT, resumed, batches, checkpoint=checkpoint, **settings) == losses
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
    others = {**settings, "lr": 0.1}
    assert_refused(
        lambda: train_detector(TOOLKIT, resumed, batches, checkpoint=checkpoint, **others),
        FileFormatError,
        "training.safetensors",
        "0.1",
    )


class Slope:
    """A toolkit whose loss has slope 1, and another at the third step; NaN for a loss that fails there."""

    def __init__(self, slope: float) -> None:
        self.steps, self.slope = 0, slope

    def build(self, classes: int, seed: int) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: Sequence[Example]) -> Tensor:
        self.steps += 1
        weight: Any = model.weight
        if self.steps == 3:
            if math.isnan(self.slope):
                raise FloatingPointError("the detector's loss_classifier is nan")
            return weight.sum() * self.slope
        return weight.sum()

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Any]:
        return []


@pytest.mark.parametrize(("slope", "names"), [(float("nan"), ("2", "loss_classifier")), (float("inf"), ("2",))])
def test_a_loss_or_gradient_that_is_not_finite_is_said_with_its_step(slope: float, names: tuple[str, ...]) -> None:
    toolkit = Slope(slope)
    assert_refused(
        lambda: train_detector(toolkit, toolkit.build(1, 0), ExampleBatches(squares(2), 1), steps=4, lr=0.1),
        FloatingPointError,
        *names,
    )


def test_the_rate_rises_and_then_falls_to_0_and_long_gradients_are_clipped() -> None:
    toolkit = Slope(50.0)
    model: Any = toolkit.build(1, 0)
    model.bias.requires_grad_(False)
    seen: list[float] = []

    def batches(seed: int, task: int, step: int) -> list[Example]:
        seen.append(model.weight.item())
        return []

    train_detector(toolkit, model, batches, steps=6, lr=0.1, warmup=4, momentum=0.0, weight_decay=0.0, clip=2.0)
    rates = [0.1 * min(1, (t + 1) / 4) * (1 + math.cos(math.pi * t / 6)) / 2 for t in range(5)]
    assert max(rates) == rates[2]
    moved = [before - after for before, after in itertools.pairwise(seen)]
    assert moved == pytest.approx([rate * (2 if t == 2 else 1) for t, rate in enumerate(rates)], abs=1e-6)


def test_sizes_that_can_not_be_and_missing_images_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (80, 40), (10, 20, 30)).save(tmp_path / "wide.png")
    plain = annotated(tmp_path / "wide.png", 80, 40, [[20.0, 10.0, 60.0, 40.0]])
    masked = replace(plain, shapes=masks_from(np.ones((1, 40, 80), dtype=bool)))
    assert_refused(lambda: load_examples(DetectionSet(("a",), [masked]), size=20), ConfigError, "masks", "data.size")
    load_examples(DetectionSet(("a",), [masked]), size=80)  # as it is
    missing = DetectionSet(("a",), [annotated(tmp_path / "missing.png", 8, 8, [])])
    assert_refused(lambda: load_examples(missing, size=0), ConfigError, "size=0")
    assert_refused(lambda: load_examples(missing), DataError, "missing.png")


@pytest.mark.parametrize("size", [None, 40])
def test_images_on_disk_are_those_in_memory_and_few_are_kept(
    squares: Callable[..., DetectionSet], size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, read = squares(24, width=70), list[Any]()
    load, memory = Annotated.load, load_examples(data, size)
    monkeypatch.setattr(Annotated, "load", lambda self, *limits: read.append(self.image_id) or load(self, *limits))
    disk = load_examples(data, size, stream=True)
    for one, other in zip(disk, memory, strict=True):
        assert torch.equal(one.truth.boxes, other.truth.boxes)
        assert one.size == other.size
    assert read == []
    assert all(torch.equal(one.image, other.image) for one, other in zip(disk, memory, strict=True))
    assert len(read) == 24
    assert disk[23].image is disk[23].image  # one of the last few
    assert len(read) == 24
    assert torch.equal(disk[0].image, memory[0].image)  # which is no longer there
    assert len(read) == 25
    for one, other in zip(images_in(disk[:20]), images_in(memory[:20]), strict=True):  # more than are kept
        assert torch.equal(one, other)


def test_jittered_examples_are_bytes_in_other_light_with_the_same_boxes() -> None:
    batch = squares(3)
    first, again = (jittered(batch, torch.Generator().manual_seed(1)) for _ in range(2))
    for old, new, same in zip(batch, first, again, strict=True):
        assert new.truth is old.truth
        assert (new.image.dtype, new.image.shape) == (torch.uint8, old.image.shape)
        assert torch.equal(new.image, same.image)
        assert not torch.equal(new.image, old.image)
        both = torch.stack([old.image.float().flatten(), new.image.float().flatten()])
        assert float(torch.corrcoef(both)[0, 1]) > 0.9
