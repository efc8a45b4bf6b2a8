"""Make the deployments of a published network: CIFAR-10's test images as they are, of other classes, or corrupted.

    python benchmarks/published_cifar.py --images FOLDER --output-dir out/published
    python benchmarks/published_cifar.py --images FOLDER --output-dir out/published3500 --count 3500

``--images`` holds train and test, folders of ``<class>/<image>``. Each file that is written has 500
training images, which the loss sees, under x_train and y_train; and a pool of test images, which the network never saw,
under x_val and y_val, for each seed to divide into validation and test. What a deployment does, it does to all of them.
``--toy`` writes a few random images of each class in place of CIFAR-10's. The comparisons are in configs/published.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.data.images import load_image_folder
from metricopt_ext.data.labelled import Labelled
from metricopt_ext.data.shift import ImageShift
from metricopt_ext.errors import DataError
from metricopt_ext.utils.seeding import generator

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
VEHICLES = ("airplane", "automobile", "ship", "truck")
TRAINING = 50  # images of each class
TAIL = 20  # times as many of the first class as of the last
FOG, EXPONENT = 1.5, 1.8  # how thick it is, and how its spectrum falls: CIFAR-10-C's at severity 5, about

# How pixels in [0, 1] are corrupted, by the deployment's name; noise and contrast as in CIFAR-10-C at severity 5.
CORRUPTED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "noise": lambda x, seed: ImageShift(noise_std=0.1)(x, seed),
    "contrast": lambda x, seed: ImageShift(contrast=0.15)(x, seed),
    "fog": lambda x, seed: fog(x, seed),
}


def main() -> None:
    """Parse the command line, read the images, write a file for each deployment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="folder with train and test")
    parser.add_argument("--output-dir", required=True, type=Path, help="receives clean.npz, noise.npz, ...")
    parser.add_argument("--count", type=int, default=2000, help="test images of a deployment (default: 2000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="which of them, and the draws of noise and fog (default: 0)"
    )
    parser.add_argument("--toy", action="store_true", help="random images: do the comparisons run? They mean nothing")
    arguments = parser.parse_args()
    if arguments.toy == (arguments.images is not None):
        parser.error("give either --images FOLDER or --toy")
    train, test = (_toy(seed) for seed in range(2)) if arguments.toy else _read(arguments.images)
    count = len(test) // 2 if arguments.toy else arguments.count
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for name, (x, y) in deployments(test, count, arguments.seed).items():
        file = arguments.output_dir / f"{name}.npz"
        names = {f"y_{part}": np.array(CLASSES)[each.numpy()] for part, each in (("train", train.y), ("val", y))}
        np.savez(file, x_train=train.x.numpy(), x_val=x.numpy(), **names)
        print(f"{file}: {len(train)} training images, {len(y)} of the deployment")


def deployments(test: Labelled, count: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the images, ``m x 3 x h x w`` uint8, and classes, ``m``, of each deployment, by name.

    Args:
        test: The images to choose from, of the classes `CLASSES`.
        count: How many to choose; fewer where a class has no more.
        seed: Seed of the choice and of what is drawn besides.

    Raises:
        DataError: The classes are others.
    """
    if tuple(test.class_names) != CLASSES:
        raise DataError(f"the images must be of the classes {', '.join(CLASSES)}, got {', '.join(test.class_names)}")
    few = [0.04 if name in VEHICLES else 0.14 for name in CLASSES]
    tail = [TAIL ** (-place / (len(CLASSES) - 1)) for place in range(len(CLASSES))]
    shares = {"clean": [1.0] * len(CLASSES), "prior_shift": few, "long_tail": tail}
    rows = {name: chosen(test.y, each, count, seed) for name, each in shares.items()}
    found = {name: (test.x[each], test.y[each]) for name, each in rows.items()}
    x, y = found["clean"]
    for index, (name, corrupt) in enumerate(CORRUPTED.items()):
        changed = corrupt(x.float() / 255, generator(seed, "corruption", index).initial_seed() % 2**31)
        found[name] = (changed * 255).round().to(torch.uint8), y
    return found


def chosen(y: Tensor, shares: Sequence[float], count: int, seed: int) -> Tensor:
    """Return the places of at most so many examples, drawn at random so that classes have these shares.

    Args:
        y: Classes, ``n``.
        shares: Of each class, in any unit.
        count: How many examples; fewer, if a class has not enough.
        seed: Seed of the draws.
    """
    counts, parts = y.bincount(minlength=len(shares)).double(), torch.tensor(shares, dtype=torch.float64)
    kept = (parts * min(count / float(parts.sum()), float((counts / parts).min()))).round().long()
    order = torch.randperm(len(y), generator=generator(seed, "deployment"))
    return torch.cat([order[y[order] == label][:most] for label, most in enumerate(kept.tolist())]).sort().values


def fog(x: Tensor, seed: int) -> Tensor:
    """Return images behind a fog of their own: random fields whose spectrum falls with frequency.

    Args:
        x: Images, ``n x c x h x w``, in [0, 1].
        seed: Seed of the fields.
    """
    n, _, height, width = x.shape
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    frequency = (rows.square() + columns.square()).sqrt()
    frequency[0, 0] = torch.inf  # no constant
    drawn = torch.randn(n, height, width, generator=generator(seed, "fog"))
    field = torch.fft.irfft2(torch.fft.rfft2(drawn) * frequency**-EXPONENT, s=(height, width))
    low, high = (each(field, dim=(1, 2), keepdim=True) for each in (torch.amin, torch.amax))
    brightest = x.amax((1, 2, 3), keepdim=True)
    foggy: Tensor = (x + FOG * ((field - low) / (high - low))[:, None]) * brightest / (brightest + FOG)
    return foggy


def _read(folder: Path) -> tuple[Labelled, Labelled]:
    return load_image_folder(folder / "train", limit_per_class=TRAINING), load_image_folder(folder / "test")


def _toy(seed: int) -> Labelled:
    y = torch.arange(len(CLASSES)).repeat_interleave(40)
    x = torch.randint(256, (len(y), 3, 32, 32), generator=generator(seed, "toy"), dtype=torch.uint8)
    return Labelled(x, y, CLASSES)


if __name__ == "__main__":
    main()
