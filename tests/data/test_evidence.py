"""Data that a metric is judged on: none of it trained on, and the same each time that it is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.data.evidence import check_evidence
from metricopt_ext.errors import DataError

torchvision = pytest.importorskip("torchvision")
from torchvision import transforms  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

X = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(100) % 3
ORDER = torch.randperm(100, generator=torch.Generator().manual_seed(1))
PLAIN, FLIPPED = (transforms.Compose([*more, transforms.ToTensor()]) for more in ([], [transforms.RandomCrop(8, 4)]))
SOMETIMES = v2.Compose([v2.RandomApply([v2.ColorJitter(0.5)], p=0.3), PLAIN])


class Own(Dataset[Any]):
    """Points and their labels, perhaps drawn anew whenever one is read."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, noise: float = 0.0) -> None:
        self.x, self.y, self.noise = x, y, noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> Any:
        return self.x[place] + self.noise * torch.randn(6), self.y[place]


class Pictures(Dataset[Any]):
    """As torchvision's CIFAR10: an array, of which transforms make the items."""

    def __init__(self, transform: Any) -> None:
        self.data = np.random.default_rng(0).integers(0, 255, (60, 8, 8, 3)).astype(np.uint8)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> Any:
        return self.transform(Image.fromarray(self.data[place])), place % 3


class Wrapped(Dataset[Any]):
    """Another dataset with a transform of its own."""

    def __init__(self, data: Any) -> None:
        self.inner = data

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, place: int) -> Any:
        x, y = self.inner[place]
        return x + torch.randn_like(x), y


class View(Dataset[Any]):
    """Rows, whose words perhaps come in an order drawn anew."""

    def __init__(self, rows: list[Any], shuffled: bool) -> None:
        self.rows, self.shuffled = rows, shuffled

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        return {**self.rows[place], "input_ids": torch.randperm(50).tolist() if self.shuffled else [place]}


WHOLE = Own(X, Y)
FIRST, LAST = Subset(WHOLE, range(60)), Subset(WHOLE, range(60, 100))
ROWS = [{"input_ids": [i, i % 7], "labels": i % 2} for i in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Any]:
    """Write pictures of two classes, drawn from a seed, and return them as torchvision's folder."""

    def write(name: str, seed: int, transform: Any = PLAIN, form: str = "{}.png") -> Any:
        for of in ("cat", "dog"):
            (tmp_path / name / of).mkdir(parents=True, exist_ok=True)
            for i in range(8):
                pixels = np.random.default_rng((seed, i, of == "cat")).integers(0, 255, (8, 8, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / name / of / form.format(i))
        return torchvision.datasets.ImageFolder(str(tmp_path / name), transform)

    return write


@pytest.mark.parametrize(
    ("train", "judged", "names"),
    [
        (WHOLE, WHOLE, ("val",)),
        (WHOLE, Subset(WHOLE, range(5)), ("5 of 5",)),
        (FIRST, Subset(WHOLE, range(30, 80)), ("30 of 50",)),
        (Wrapped(FIRST), WHOLE, ("60 of 100",)),
        (ConcatDataset([FIRST, LAST]), LAST, ("40 of 40",)),
        (FIRST, ConcatDataset([LAST, FIRST]), ("60 of 100",)),
        (WHOLE, Own(X.clone(), Y), ("100 of 100",)),
        (WHOLE, Own(X[ORDER], 2 - Y[ORDER]), ("100 of 100",)),
        (Own(X, Y, noise=1.0), WHOLE, ("100 of 100",)),
        (TensorDataset(X, Y), TensorDataset(X[ORDER], Y[ORDER]), ("100 of 100",)),
        (ROWS, [{**row} for row in reversed(ROWS)], ("20 of 20",)),
        (Pictures(FLIPPED), Pictures(PLAIN), ("60 of 60",)),
        (View(ROWS, True), View(ROWS, False), ("20 of 20",)),
    ],
    ids=[
        *("itself", "a part", "parts that overlap", "a wrapper's part", "a part of two", "both parts", "a copy"),
        *("shuffled, other labels", "augmented", "tensors", "rows", "one array, two transforms", "one list, two views"),
    ],
)
def test_what_was_trained_on_is_refused(train: Any, judged: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: check_evidence(train, judged, "val"), DataError, "val", *names)


@pytest.mark.parametrize(
    ("train", "judged", "count"),
    [
        (FIRST, Subset(WHOLE, range(55, 100)), "5 of 45"),
        (FIRST, ConcatDataset([LAST, Subset(WHOLE, range(10))]), "10 of 50"),
        (ROWS[:12], [{**row} for row in ROWS[10:]], "2 of 10"),
        (Own(X[:60], Y[:60]), Own(X[50:], Y[50:]), "10 of 50"),
    ],
)
def test_what_was_trained_on_too_is_counted(train: Any, judged: Any, count: str) -> None:
    assert_warned(lambda: check_evidence(train, judged, "val"), "val", count)


def test_a_file_is_known_by_its_path_and_its_content(folder: Callable[..., Any], tmp_path: Path) -> None:
    train, judged = folder("train", 0, FLIPPED), folder("val", 1)
    (tmp_path / "link").symlink_to(tmp_path / "train")
    link = torchvision.datasets.ImageFolder(str(tmp_path / "link"), PLAIN)
    for each in (folder("train", 0), folder("copy", 0, form="x{}.png"), link):
        assert_refused(lambda each=each: check_evidence(train, each, "val"), DataError, "16 of 16")
    again = folder("train", 0)
    assert_warned(lambda: check_evidence(Subset(train, range(10)), Subset(again, range(8, 16)), "val"), "val", "2 of 8")
    check_evidence(train, judged, "val")


@pytest.mark.parametrize("transform", [FLIPPED, SOMETIMES], ids=["crop", "sometimes"])
def test_random_transforms_are_found_in_whatever_holds_them(folder: Callable[..., Any], transform: Any) -> None:
    train, judged = folder("train", 0, FLIPPED), folder("val", 1, transform)
    for each in (judged, Subset(judged, range(12)), ConcatDataset([Subset(judged, range(12)), folder("more", 2)])):
        assert_warned(lambda each=each: check_evidence(train, each, "val"), "val", "differ")


def test_a_batch_made_at_random_is_found() -> None:
    def masked(rows: list[Any]) -> Any:
        return {"input_ids": torch.tensor([row["input_ids"] for row in rows]) * torch.randint(0, 2, (1, 2))}

    assert_warned(lambda: check_evidence(ROWS[:10], ROWS[10:], "val", masked), "val", "differ")


@pytest.mark.parametrize(
    ("train", "judged"),
    [
        (FIRST, LAST),
        (Wrapped(FIRST), LAST),
        (Own(X, Y), Own(X + 1, Y)),
        (Subset(Pictures(FLIPPED), range(40)), Subset(Pictures(PLAIN), range(40, 60))),
        (ROWS[:10], ROWS[10:]),
        (iter(ROWS), ROWS),
        (None, ROWS),
    ],
)
def test_other_data_pass_without_a_word(train: Any, judged: Any, recwarn: pytest.WarningsRecorder) -> None:
    check_evidence(train, judged, "val")
    assert not list(recwarn)
