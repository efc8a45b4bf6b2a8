"""Files of images' labels as people have them, and those that may mean another."""

from pathlib import Path

import pytest

from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.errors import DataError
from metricopt_ext.utils.config import load_config
from testers.loader import paint, painted

NAMES = ("cloudy", "primary", "road", "water")


def labels_of(number: int) -> list[str]:
    """What image ``number`` has: its digits to base two, so that no two of a set have the same by chance."""
    return [name for place, name in enumerate(NAMES) if number >> place & 1]


def read(*more: str) -> Splits:
    settings = ["data.name=image_folder", "data.kind=multilabel", "model.name=small_cnn", "metric.name=macro_f1"]
    config = load_config(ClassificationConfig, None, [*settings, "data.fractions=[0.5,0.25,0.25]", *more])
    config.check()
    splits = load_splits(config, 0)
    for name in PARTS:
        part = getattr(splits, name)
        for image, row in zip(part.x, part.y.tolist(), strict=True):
            assert [name for name, has in zip(splits.class_names, row, strict=True) if has] == labels_of(painted(image))
    return splits


@pytest.mark.parametrize(("between", "quote"), [(" ", ""), (", ", '"'), ("|", ""), (" | ", ""), (";", "")])
def test_a_column_that_lists_the_labels(tmp_path: Path, between: str, quote: str) -> None:
    for number in range(1, 48):
        paint(tmp_path / "train-jpg" / f"img_{number}.png", number)
    rows = [f"img_{number},{quote}{between.join(labels_of(number))}{quote}" for number in range(1, 48)]
    (tmp_path / "train_v2.csv").write_text("\n".join(["image_name,tags", *rows, ""]))
    splits = read(f"data.root={tmp_path / 'train_v2.csv'}")
    assert splits.class_names == NAMES
    assert sum(len(getattr(splits, name)) for name in PARTS) == 47


def test_files_of_the_parts_may_share_a_folder(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Paths may be those of another machine; a picture without a row is named."""
    for name, numbers, above in (("train", range(1, 16), "images/"), ("val", range(16, 32), "/kaggle/input/images/")):
        lines = [",".join(["filename", *NAMES])]
        for number in numbers:
            paint(tmp_path / "images" / f"{number}.png", number)
            lines.append(",".join([f"{above}{number}.png", *(str(number >> place & 1) for place in range(4))]))
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    paint(tmp_path / "images" / "200.png", 200)
    parts = [f"data.train={tmp_path / 'train.csv'}", f"data.val={tmp_path / 'val.csv'}"]
    splits = read(*parts)
    assert len(splits.train) == 15
    assert sum("images/200.png" in str(each.message) for each in recwarn) == 1
    (tmp_path / "val.csv").write_text((tmp_path / "val.csv").read_text().replace("water", "ice"))
    with pytest.raises(DataError, match="'ice'"):
        read(*parts)


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (
            'filename,tags\nimg_1,"a|b"\nimg_2,"a,b"\n',
            [],
            r"parted by ',' or '\|', as in 'a|b' in row 2",
        ),
        ("filename,tags\nimg_1,hot dog\nimg_2,hot dog cat\nimg_3,cat\n", [], "'hot' and 'dog' are always side by side"),
        ("filename,tags\nimg_1,a b\nimg_2,A\n", [], r"'A' and 'a'.*write them alike"),
        ("filename,a,b\nimg_1,1,0\nimg_2,,1\n", [], r"column 'a'.*1 or 0.*'' in row 3"),
        ("filename,a,b\nimg_1,1,0\n", ["data.targets=[c,a]"], "has no column 'c' of data.targets"),
    ],
)
def test_what_may_mean_another_is_refused(tmp_path: Path, text: str, more: list[str], message: str) -> None:
    for number in range(1, 9):
        paint(tmp_path / f"img_{number}.png", number)
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read(f"data.root={tmp_path / 'labels.csv'}", *more)
