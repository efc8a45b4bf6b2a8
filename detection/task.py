"""Detectors in a `FinetuneTask`: examples in memory, batches of them, and a loss that can be replayed."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.data.streamed import Reading, threads
from metricopt_ext.detection.records import Annotated, DetectionSet
from metricopt_ext.detection.toolkit import Example, Toolkit
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.batches import IndexSampler
from metricopt_ext.utils.seeding import seeded_streams

KEPT = 16  # images on disk that are kept once read: a batch's are looked at several times


class ImagesOnDisk:
    """Images that are read whenever they are asked for; the last `KEPT` are kept.

    Args:
        read: Returns an image by its place; called in any thread.
    """

    def __init__(self, read: Callable[[int], Tensor]) -> None:
        self._reading = Reading(read)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()

    def begin(self, place: int) -> None:
        """Begin to read an image in another thread, where the machine has the processors."""
        if threads() > 1 and place not in self._kept:
            self._reading.begin([place])

    def __getitem__(self, place: int) -> Tensor:
        """Return an image, read now unless it is kept or was begun."""
        if place not in self._kept:
            pixels = self._reading.result(place)
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            self._kept[place] = pixels
        self._kept.move_to_end(place)
        return self._kept[place]


class ExampleOnDisk(Example):
    """An image that is read whenever it is asked for, with its ground truth.

    Args:
        images: The images of its set.
        place: Its place there.
        truth: Its ground truth, in pixels of the image as it is returned.
    """

    def __init__(self, images: ImagesOnDisk, place: int, truth: Annotated) -> None:
        self.__dict__.update(truth=truth, images=images, place=place)

    @property
    def image(self) -> Tensor:
        """``3 x h x w``, uint8 RGB."""
        pixels: Tensor = self.__dict__["images"][self.__dict__["place"]]
        return pixels

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the image, which is not read."""
        return self.truth.height, self.truth.width

    def begin(self) -> None:
        """Begin to read the image."""
        self.__dict__["images"].begin(self.__dict__["place"])


class InputsOnDisk(Sequence[Any]):
    """What is computed of parts of the data, each whenever it is asked for.

    Args:
        parts: The parts.
        compute: What is computed of one.
    """

    def __init__(self, parts: Sequence[Any], compute: Callable[[Any], Any]) -> None:
        self._parts, self._compute = parts, compute

    def __len__(self) -> int:
        """Number of parts."""
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        """Compute it of a part."""
        return self._compute(self._parts[index])


def load_examples(dataset: DetectionSet, size: int | None = None, *, stream: bool = False) -> list[Example]:
    """Read images into memory, or leave them on disk.

    Args:
        dataset: The images with their boxes.
        size: Longer side in pixels, at least 1; larger images are scaled down to it, and their boxes with them. None
            leaves all unchanged.
        stream: Whether images are read whenever they are asked for (`ExampleOnDisk`); an image that can't be decoded
            is found when it is.

    Raises:
        DataError: An image can't be read.
    """
    if size is not None and size < 1:
        raise ConfigError(f"images can't be scaled to size={size}; it must be at least 1 pixel")
    images = [truth.with_size() for truth in dataset.images]
    if stream:

        def read(place: int) -> Tensor:
            truth = images[place]
            return _within(Example(truth.load(), truth), size).image

        on_disk = ImagesOnDisk(read)
        return [ExampleOnDisk(on_disk, place, _scaled_truth(truth, size)) for place, truth in enumerate(images)]
    return [_within(Example(truth.load(), truth), size) for truth in images]


def _scaled(truth: Annotated, size: int | None) -> tuple[int, int]:
    """The width and height of an image in memory."""
    longer = max(truth.width, truth.height)
    if size is None or longer <= size:
        return truth.width, truth.height
    return max(1, round(truth.width * size / longer)), max(1, round(truth.height * size / longer))


def _scaled_truth(truth: Annotated, size: int | None) -> Annotated:
    """The boxes in pixels of an image in memory."""
    width, height = _scaled(truth, size)
    if (width, height) == (truth.width, truth.height):
        return truth
    scale = truth.boxes.new_tensor([width / truth.width, height / truth.height] * 2)
    areas = None if truth.areas is None else truth.areas * scale[:2].prod()
    if truth.shapes is not None:
        raise ConfigError(
            "masks are as large as their images, which are not scaled down: leave data.size (size) out;"
            " model.max_size scales what the detector sees, and data.stream=true spares the memory"
        )
    return replace(truth, width=width, height=height, boxes=truth.boxes * scale, areas=areas)


def _within(example: Example, size: int | None) -> Example:
    truth, scaled = example.truth, _scaled_truth(example.truth, size)
    width, height = scaled.width, scaled.height
    if (width, height) == (truth.width, truth.height):
        return example
    pixels = F.interpolate(example.image[None].float(), (height, width), mode="bilinear", antialias=True)[0]
    return Example(pixels.round().clamp(0, 255).to(example.image.dtype), scaled)


class ExampleBatches:
    """Batches of examples in memory, drawn with replacement: lists of ``batch_size``.

    Args:
        examples: The examples, at least one.
        batch_size: Examples per batch.
    """

    def __init__(self, examples: Sequence[Example], batch_size: int) -> None:
        self.examples = examples
        self.sample = IndexSampler(len(examples), batch_size)

    def __call__(self, seed: int, task: int, step: int) -> list[Example]:
        """Return the batch of a step."""
        return [self.examples[index] for index in self.sample(seed, task, step).tolist()]


def detection_loss(toolkit: Toolkit) -> Callable[[nn.Module, Sequence[Example]], Tensor]:
    """Return a toolkit's loss as the surrogate loss of a `FinetuneTask` with ``population=1``.

    The anchors and proposals that it samples are drawn from the same seed each time, so a step can be replayed.
    """

    def loss(model: nn.Module, batch: Sequence[Example]) -> Tensor:
        with seeded_streams(0, next(model.parameters()).device):
            return toolkit.loss(model, batch)

    return loss


def jittered(batch: Sequence[Example], rng: torch.Generator) -> list[Example]:
    """Return examples with other contrast, brightness and noise; their boxes stay."""
    found = []
    for example in batch:
        x, draws = example.image.float(), torch.rand(3, generator=rng).tolist()
        noise = torch.randn(x.shape, generator=rng).to(x.device)
        mean = x.mean()
        x = mean + (0.7 + 0.6 * draws[0]) * (x - mean) + 40 * (draws[1] - 0.5) + 12 * draws[2] * noise
        found.append(Example(x.round().clamp(0, 255).to(example.image.dtype), example.truth))
    return found
