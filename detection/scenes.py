"""Scenes for trying detectors without a download: scikit-learn's handwritten digits pasted on textured backgrounds."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from metricopt_ext.detection.records import Annotated
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import write_voc
from metricopt_ext.errors import DataError
from metricopt_ext.runtime.identity import claim

SPLITS = ("train", "val", "test")
SHARES = (0.6, 0.15, 0.25)  # of the 1,797 digits that each split pastes
CLASSES = tuple("0123456789")
INK = 0.35  # minimum opacity of a pixel that belongs to a digit
OVERLAP = 0.2  # maximum share of the smaller of two boxes that the other may cover
CONTRAST = 0.35  # minimum difference in brightness between a digit and the background under it
TRIES = 20

Array = npt.NDArray[np.float64]
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class SceneShift:
    """How the scenes of the splits val and test differ from those of train. The defaults change nothing.

    Attributes:
        contrast: Factor in (0, 1] on every value's distance from middle grey.
        noise_std: Standard deviation, 0 or more, of independent Gaussian noise on every value.
        scale: Factor above 0 on the size of the digits.

    Raises:
        DataError: For a value out of range.
    """

    contrast: float = 1.0
    noise_std: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, valid, wanted in (
            ("contrast", 0 < self.contrast <= 1, "in (0, 1]"),
            ("noise_std", 0 <= self.noise_std < math.inf, "finite and at least 0"),
            ("scale", 0 < self.scale < math.inf, "finite and above 0"),
        ):
            if not valid:
                raise DataError(f"a scene shift's {name} must be {wanted}, got {getattr(self, name)}")

    def __call__(self, image: Array, rng: np.random.Generator) -> Array:
        """Return a scene, ``size x size x 3`` in [0, 1], with other contrast and noise."""
        noise = self.noise_std * rng.standard_normal(image.shape)
        return np.clip(0.5 + self.contrast * (image - 0.5) + noise, 0, 1)


def write_scenes(
    folder: str | Path,
    *,
    images: tuple[int, int, int] = (600, 200, 400),
    size: int = 96,
    digits_per_scene: tuple[int, int] = (1, 4),
    scale: tuple[int, int] = (14, 36),
    seed: int = 0,
    shift: SceneShift | None = None,
) -> Path:
    """Write scenes in Pascal VOC's format with the splits train, val and test; returns the folder.

    The digits are the 8 x 8 scans of scikit-learn's ``load_digits``; no scan is pasted in two splits. A digit has a
    random size, place and colour, and a box that is tight around its ink; boxes overlap little. A scene depends
    only on the seed, its split and its position there. A folder finished with the same settings is left as it is.

    Args:
        folder: Receives the set.
        images: Number of scenes of each split, each at least 1.
        size: Width and height of a scene in pixels.
        digits_per_scene: Minimum, at least 1, and maximum number of digits; fewer are pasted if no space is left.
        scale: Minimum and maximum width of a pasted scan in pixels, margins included; at most ``size``.
        seed: Draws everything, at least 0.
        shift: How val and test differ from train.

    Raises:
        DataError: For impossible settings.
        FileFormatError: The folder holds a set with other settings.
    """
    folder = Path(folder)
    shift = shift or SceneShift()
    _check(images, size, digits_per_scene, scale, seed, shift)
    settings = {
        "images": [*images],
        "size": size,
        "digits_per_scene": digits_per_scene,
        "scale": scale,
        "seed": seed,
        "shift": asdict(shift),
    }
    finished = folder / "scenes.json"
    if finished.exists():
        claim(finished, settings)
        return folder
    for number, (split, scans) in enumerate(_scans(seed).items()):
        shifted = SceneShift() if split == "train" else shift
        sizes = (scale[0] * shifted.scale, scale[1] * shifted.scale)
        scenes = (
            _scene(f"{split}_{i:05d}", scans, size, digits_per_scene, sizes, shifted, _rng(seed, number + 1, i))
            for i in range(images[number])
        )
        write_voc(folder, scenes, CLASSES, split)
    claim(finished, settings)
    return folder


def _check(
    images: tuple[int, int, int],
    size: int,
    digits: tuple[int, int],
    scale: tuple[int, int],
    seed: int,
    shift: SceneShift,
) -> None:
    for name, value, valid, wanted in (
        ("images", images, len(images) == 3 and min(images) >= 1, "three numbers of at least 1"),
        ("digits_per_scene", digits, 1 <= digits[0] <= digits[1], "two numbers of at least 1, the smaller first"),
        ("scale", scale, 8 <= scale[0] <= scale[1] <= size, f"two numbers from 8 to the size {size}, smaller first"),
        ("seed", seed, seed >= 0, "at least 0"),
    ):
        if not valid:
            raise DataError(f"{name} must be {wanted}, got {value}")
    low, high = scale[0] * shift.scale, scale[1] * shift.scale
    if low < 8 or high > size:
        raise DataError(
            f"a scene shift's scale of {shift.scale} makes digits {low:g} to {high:g} pixels wide; allowed: 8 to {size}"
        )


def _rng(seed: int, *indices: int) -> np.random.Generator:
    return np.random.default_rng((seed, *indices, len(indices)))


def _scans(seed: int) -> dict[str, list[tuple[Tensor, int]]]:
    """The scans, ``8 x 8`` in [0, 1], with their classes, that each split may paste."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = _rng(seed).permutation(len(digits.target))
    ends = np.round(np.cumsum(SHARES) * len(order)).astype(int)
    parts = np.split(order, ends[:-1])
    return {
        split: [(torch.from_numpy(digits.images[i] / 16), int(digits.target[i])) for i in part]
        for split, part in zip(SPLITS, parts, strict=True)
    }


def _scene(
    name: str,
    scans: list[tuple[Tensor, int]],
    size: int,
    digits_per_scene: tuple[int, int],
    scale: tuple[float, float],
    shift: SceneShift,
    rng: np.random.Generator,
) -> Example:
    image = _background(size, rng)
    boxes: list[Box] = []
    labels = []
    for _ in range(rng.integers(digits_per_scene[0], digits_per_scene[1] + 1)):
        scan, label = scans[rng.integers(len(scans))]
        opacity = _enlarge(scan, round(rng.uniform(*scale)))
        placed = next(_free_places(opacity.shape, size, boxes, rng), None)
        if placed is not None:
            left, top, right, bottom = placed
            under = image[top:bottom, left:right]
            colour = _colour_against(under.mean(), rng)
            image[top:bottom, left:right] = under + opacity[..., None] * (colour - under)
            boxes.append(placed)
            labels.append(label)
    pixels = torch.from_numpy(np.round(shift(image, rng) * 255).astype(np.uint8)).permute(2, 0, 1)
    flags = torch.zeros(len(boxes), dtype=torch.bool)
    truth = Annotated(
        image_id=name,
        path=Path(f"{name}.png"),
        width=size,
        height=size,
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.tensor(labels, dtype=torch.int64),
        difficult=flags,
        crowd=flags,
    )
    return Example(pixels, truth)


def _background(size: int, rng: np.random.Generator) -> Array:
    """A gradient between two colours and noise at several scales, ``size x size x 3`` in [0, 1]."""
    angle = rng.uniform(0, 2 * math.pi)
    x, y = np.meshgrid(np.linspace(-1, 1, size), np.linspace(-1, 1, size))
    along = (1 + (x * math.cos(angle) + y * math.sin(angle)) / math.sqrt(2)) / 2
    first, second = rng.uniform(0.1, 0.9, (2, 3))
    image: Array = first + along[..., None] * (second - first)
    for octave in range(4):
        coarse = torch.from_numpy(rng.uniform(-1, 1, (1, 3, 3 * 2**octave, 3 * 2**octave)))
        fine = interpolate(coarse, (size, size), mode="bicubic", align_corners=False)[0]
        image = image + 0.12 / 1.5**octave * fine.permute(1, 2, 0).numpy()
    return image.clip(0, 1)


def _enlarge(scan: Tensor, width: int) -> Array:
    """A scan's opacity at another width, cropped to its ink: pixels outside show the background."""
    large = interpolate(scan[None, None], (width, width), mode="bicubic", align_corners=False)[0, 0].clamp(0, 1).numpy()
    rows, columns = (np.flatnonzero((large >= INK).any(axis)) for axis in (1, 0))
    return np.asarray(large[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1], dtype=np.float64)


def _free_places(shape: tuple[int, ...], size: int, taken: list[Box], rng: np.random.Generator) -> Iterator[Box]:
    """Random places for a digit of this shape, height first, that overlap no box by much."""
    height, width = shape
    for _ in range(TRIES):
        left, top = (int(rng.integers(size - side + 1)) for side in (width, height))
        place = (left, top, left + width, top + height)
        if all(_overlap(place, other) <= OVERLAP for other in taken):
            yield place


def _overlap(a: Box, b: Box) -> float:
    """The share of the smaller box that the other covers; never less than their intersection over union."""
    common = max(min(a[2], b[2]) - max(a[0], b[0]), 0) * max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    return common / min((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))


def _colour_against(background: float, rng: np.random.Generator) -> Array:
    """A random colour whose brightness, the mean of its channels, differs enough from the background's."""
    while True:
        colour: Array = rng.uniform(0, 1, 3)
        if abs(colour.mean() - background) >= CONTRAST:
            return colour
