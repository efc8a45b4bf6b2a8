"""Pascal VOC's format: what is read is what was written, and what a file lacks is said by name."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused, assert_warned, having

pytest.importorskip("PIL")

from metricopt_ext.detection.records import Annotated, inside
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import read_voc, write_voc
from metricopt_ext.errors import DataError

CLASSES = ("bird", "cat")
SIZE = "<size><width>{}</width><height>{}</height></size>"


def example(name: str, boxes: list[list[float]], labels: list[int], difficult: list[bool]) -> Example:
    image = torch.randint(256, (3, 30, 40), generator=torch.Generator().manual_seed(len(boxes)), dtype=torch.uint8)
    flags = torch.tensor(difficult, dtype=torch.bool)
    truth = Annotated(
        image_id=name,
        path=Path("unused"),
        width=40,
        height=30,
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.tensor(labels, dtype=torch.int64),
        difficult=flags,
        crowd=torch.zeros_like(flags),
    )
    return Example(image, truth)


EXAMPLES = (
    example("a1", [[0, 0, 40, 30], [3, 4, 10.25, 9.1]], [1, 0], [False, True]),
    example("a2", [], [], []),
    example("a3", [[5, 6, 17, 28]], [1], [False]),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A set below VOCdevkit/VOC2007 with the splits train (a1, a2) and test (a3)."""
    inner = tmp_path / "VOCdevkit" / "VOC2007"
    write_voc(inner, EXAMPLES[:2], CLASSES, "train")
    write_voc(inner, EXAMPLES[2:], CLASSES, "test")
    return tmp_path


def annotation(tree: Path, name: str = "a3") -> Path:
    return tree / "VOCdevkit" / "VOC2007" / "Annotations" / f"{name}.xml"


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def assert_same(image: Annotated, written: Example) -> None:
    truth = written.truth
    assert (image.image_id, image.width, image.height) == (truth.image_id, truth.width, truth.height)
    for ours, theirs in (
        (image.boxes, truth.boxes),
        (image.labels, truth.labels),
        (image.difficult, truth.difficult),
        (image.crowd, truth.crowd),
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_reads_what_was_written(tree: Path) -> None:
    data = read_voc(tree)
    assert data.classes == CLASSES
    for image, written in zip(data.images, EXAMPLES, strict=True):
        assert_same(image, written)
        assert torch.equal(image.load(), written.image)


def test_splits_have_the_same_labels_with_and_without_given_classes(tree: Path) -> None:
    # The split test has no bird.
    (image,) = read_voc(tree, "test").images
    assert image.labels.tolist() == [1]
    assert read_voc(tree, "test", classes=("cat",)).images[0].labels.tolist() == [0]


def test_pixels_counted_from_one_become_edges(tree: Path) -> None:
    text = annotation(tree).read_text()
    assert [int(re.search(f"<{end}>(.*)</{end}>", text)[1]) for end in ("xmin", "ymin", "xmax", "ymax")] == [
        6,
        7,
        17,
        28,
    ]


@pytest.mark.parametrize(
    ("text", "difficult"),
    [("", False), ("0", False), (" 0.0 ", False), ("1.0", True)],
)
def test_difficult_may_be_written_in_several_ways(tree: Path, text: str, difficult: bool) -> None:
    replace(annotation(tree), "<difficult>0<", f"<difficult>{text}<")
    assert read_voc(tree, "test").images[0].difficult.tolist() == [difficult]


def test_objects_without_the_flag_are_not_difficult(tree: Path) -> None:
    replace(annotation(tree, "a1"), "difficult>", "pose>")
    assert read_voc(tree, "train").images[0].difficult.tolist() == [False, False]


def split_file(tree: Path) -> Path:
    return next(tree.rglob("test.txt"))


@pytest.mark.parametrize("content", ["\ufeffa3\n", "\ufeffa3 -1\r\n\r\n"])
def test_a_split_may_have_a_byte_order_mark_flags_and_empty_lines(tree: Path, content: str) -> None:
    split_file(tree).write_bytes(content.encode())
    assert [image.image_id for image in read_voc(tree, "test").images] == ["a3"]


def test_a_split_may_name_files_with_spaces(tree: Path) -> None:
    for file in (annotation(tree), next(tree.rglob("a3.png"))):
        file.rename(file.with_stem("my image 1"))
    split_file(tree).write_text("a1 1\nmy image 1\n")
    data = read_voc(tree, "test")
    assert [image.image_id for image in data.images] == ["a1", "my image 1"]
    assert torch.equal(data.images[1].load(), EXAMPLES[2].image)


def test_the_stem_names_the_image_rather_than_a_stale_filename(tree: Path) -> None:
    replace(annotation(tree), "<filename>a3.png", "<filename>a1.png")
    assert read_voc(tree, "test").images[0].path.name == "a3.png"


def test_one_warning_says_which_boxes_are_outside_and_they_stay_as_annotated(tree: Path) -> None:
    replace(annotation(tree, "a1"), "<xmax>40</xmax>", "<xmax>45</xmax>")  # partly outside
    replace(annotation(tree, "a1"), "<ymin>5</ymin>", "<ymin>41</ymin>")  # wholly outside
    replace(annotation(tree, "a1"), "<ymax>9.1", "<ymax>48.1")
    with pytest.warns(UserWarning, match="boxes in") as caught:
        data = read_voc(tree)
    (warning,) = caught
    for text in (
        "1 outside the image, left out of training (a1.xml)",
        "1 partly outside the image, clipped for training (a1.xml)",
        "an evaluation counts them as they are",
    ):
        assert text in str(warning.message)
    first = data.images[0]
    assert first.boxes.tolist() == [[0, 0, 45, 30], pytest.approx([3, 40, 10.25, 48.1])]
    clipped, within = inside(first.boxes, first.width, first.height)
    assert clipped[within].tolist() == [[0, 0, 40, 30]]


def test_a_box_of_one_pixel_has_equal_ends(tree: Path) -> None:
    replace(annotation(tree), "<xmax>17</xmax>", "<xmax>6</xmax>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_voc(tree, "test").images[0].boxes.tolist() == [[5, 6, 6, 28]]


@pytest.mark.parametrize(("old", "new"), [("<xmax>17<", "<xmax>5<"), ("<ymin>7<", "<ymin>28.5<")])
def test_corners_in_the_wrong_order_are_left_out_with_a_warning(tree: Path, old: str, new: str) -> None:
    replace(annotation(tree), old, new)
    with pytest.warns(UserWarning, match=having("1", "a3.xml")):
        assert not len(read_voc(tree, "test").images[0].boxes)


@pytest.mark.parametrize(
    "size",
    [
        "",
        "<size/>",
        "<size><width></width></size>",
        "<size><width>40</width></size>",
        SIZE.format(0, 0),
        SIZE.format(0, 30),
    ],
)
def test_an_image_without_an_annotated_size_has_its_own(tree: Path, size: str) -> None:
    whole = re.search("<size>.*</size>", annotation(tree).read_text(), re.DOTALL)
    assert whole is not None
    replace(annotation(tree), whole[0], size)
    (image,) = read_voc(tree, "test").images
    assert_same(image, EXAMPLES[2])
    next(tree.rglob("a3.png")).unlink()
    (alone,) = read_voc(tree, "test", images=False).images
    assert (alone.width, alone.height, alone.boxes.tolist()) == (0, 0, [[5, 6, 17, 28]])


def test_boxes_are_read_without_images(tree: Path) -> None:
    for file in list(tree.rglob("*.png")):
        file.unlink()
    next(tree.rglob("JPEGImages")).rmdir()
    for image, written in zip(read_voc(tree, images=False).images, EXAMPLES, strict=True):
        assert_same(image, written)


def test_suffixes_may_be_in_upper_case(tree: Path) -> None:
    for file in [*tree.rglob("a?.xml"), *tree.rglob("a?.png")]:
        file.rename(file.with_suffix(file.suffix.upper() if file.stem != "a1" else file.suffix.title()))
    for image, written in zip(read_voc(tree).images, EXAMPLES, strict=True):
        assert_same(image, written)
        assert torch.equal(image.load(), written.image)


def test_the_folder_annotations_stands_for_its_tree(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = annotation(tree).parent
    (tree / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for root in (folder, tree / "link", Path()):
        for image, written in zip(read_voc(root).images, EXAMPLES, strict=True):
            assert_same(image, written)
        assert len(read_voc(root, "train")) == 2


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: split_file(tree).write_text(LONG),
        lambda tree: split_file(tree).write_text(f"{LONG} 1\n{LONG} 1"),
        lambda tree: replace(annotation(tree), "<name>cat", f"<name>{LONG}"),
        lambda tree: replace(annotation(tree), "<difficult>0", f"<difficult>{'2' * 100_000}"),
        lambda tree: replace(annotation(tree), "<xmin>6", f"<xmin>{LONG}"),
        lambda tree: replace(annotation(tree), "<width>40", f"<width>{LONG}"),
        lambda tree: annotation(tree).write_text(f"<{LONG}/>"),
        lambda tree: (replace(annotation(tree), "a3.png", LONG), next(tree.rglob("a3.png")).unlink()),
        lambda tree: (
            [split_file(tree).with_name(f"{i}{'y' * 200}.txt").touch() for i in range(200)]
            and split_file(tree).unlink()
        ),
        lambda tree: (
            [(tree / f"{i}{'y' * 200}" / "Annotations").mkdir(parents=True) for i in range(50)]
            and (tree / "VOCdevkit").rename(tree.parent / "elsewhere")
        ),
    ],
)
def test_messages_are_cut(tree: Path, damage: Callable[[Path], None]) -> None:
    damage(tree)
    with pytest.raises(DataError) as caught:
        read_voc(tree, "test", classes=CLASSES)
    assert 30 < len(str(caught.value)) < 1900


def test_warnings_are_cut(tree: Path) -> None:
    replace(annotation(tree), "<xmax>17<", "<xmax>170<")
    for i in range(30):
        copy = f"{i}{'z' * 200}"
        annotation(tree, copy).write_text(annotation(tree).read_text())
    with pytest.warns(UserWarning, match="boxes in") as caught:
        read_voc(tree, images=False)
    (said,) = [str(each.message) for each in caught]
    assert "and 26 more files" in said
    assert len(said) < 900


def test_sound_boxes_are_not_warned_of(tree: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_voc(tree)


def test_annotations_in_folders_below_are_warned_of(tree: Path) -> None:
    folder = annotation(tree).parent
    (folder / "more").mkdir()
    annotation(tree, "a3").rename(folder / "more" / "a9.xml")
    found = assert_warned(lambda: read_voc(tree), "Annotations", "XML")
    assert "a9" not in {image.image_id for image in found.images}


@pytest.mark.parametrize("encoding", ["iso-8859-1", "utf-16"])
def test_annotations_in_the_encoding_that_they_declare(encoding: str, tree: Path) -> None:
    file = annotation(tree)
    name = "ä" if encoding == "iso-8859-1" else "中"
    text = file.read_text().replace("<object>", f"<!-- {name} --><object>")
    before = read_voc(tree)
    file.write_bytes(f'<?xml version="1.0" encoding="{encoding}"?>\n{text}'.encode(encoding))
    assert str(read_voc(tree)) == str(before)


def swapped(xml: str, *words: str) -> Callable[[Path], None]:
    """Replace words, each by the one after it."""

    def change(tree: Path) -> None:
        for old, new in zip(words[::2], words[1::2], strict=True):
            replace(annotation(tree, xml), old, new)

    return change


BROKEN = {
    "truncated XML": (lambda tree: annotation(tree).write_text(annotation(tree).read_text()[:200]), ("a3.xml",)),
    "a negative width": (swapped("a3", "<width>40<", "<width>-1<"), ("a3.xml", "-1", "30")),
    "half a pixel": (swapped("a3", "<width>40<", "<width>39.5<"), ("a3.xml", "39.5", "30")),
    "another format": (lambda tree: annotation(tree).write_text("<svg/>"), ("a3.xml", "Pascal", "VOC")),
    "two XML files": (lambda tree: annotation(tree, "a3").with_suffix(".XML").touch(), ("a3",)),
    "no name": (swapped("a3", "name>", "label>"), ("a3.xml",)),
    "too large": (swapped("a3", "<xmin>6<", "<xmin>-1e31<"), ("a3.xml", "-1e31", "bndbox/xmin")),
    "Python's number": (swapped("a3", "<xmax>17<", "<xmax>1_7<"), ("a3.xml", "1_7", "bndbox/xmax")),
    "a name of a control code": (lambda tree: split_file(tree).write_text("a\x1b[31m"), ("a\\x1b[31m",)),
    "no number": (swapped("a3", "<xmin>6<", "<xmin>nan<"), ("a3.xml", "nan", "bndbox/xmin")),
    "no image": (lambda tree: next(tree.rglob("a3.png")).unlink(), ("a3.xml",)),
    "empty split": (lambda tree: split_file(tree).write_text("\n"), ("test.txt",)),
    "Latin-1 split": (
        lambda tree: split_file(tree).write_bytes(b"\xe4\n"),
        ("test.txt", "utf-8", "0xe4"),
    ),
    "Latin-1 without a word": (
        lambda tree: annotation(tree).write_bytes("<annotation>ä</annotation>".encode("latin-1")),
        ("a3.xml", "XML"),
    ),
    "an encoding of several bytes a character": (
        lambda tree: annotation(tree).write_text('<?xml version="1.0" encoding="gb2312"?><annotation/>'),
        ("a3.xml", "XML", "encodings"),
    ),
    "no such encoding": (
        lambda tree: annotation(tree).write_text('<?xml version="1.0" encoding="klingon"?><annotation/>'),
        ("a3.xml", "XML"),
    ),
    "double name": (lambda tree: split_file(tree).write_text("a2\na3\na1 1\na3 1\na1\n"), ("test.txt", "a3")),
    "unknown flag": (swapped("a3", "difficult>0<", "difficult>2<"), ("a3.xml", "'2'", "0", "1")),
    "a word as a flag": (swapped("a3", "difficult>0<", "difficult>Unspecified<"), ("a3.xml", "Unspecified", "0", "1")),
    "a suffix in a list": (lambda tree: split_file(tree).write_text("a3.png\n"), ("a3.png", "test")),
    "no split": (lambda tree: split_file(tree).unlink(), ("test",)),
    "no annotation": (lambda tree: annotation(tree).unlink(), ("a3.xml", "test")),
    "two sets": (lambda tree: (tree / "VOCdevkit/VOC2012/Annotations").mkdir(parents=True), ()),
    "two names in a line": (
        lambda tree: split_file(tree).write_text("a2 a3\n"),
        ("test.txt", "a2", "a3"),
    ),
    "an object in another": (
        swapped("a3", "<object>", "<objects><object>", "</object>", "</object></objects>"),
        ("a3.xml", "1"),
    ),
    "two boxes": (swapped("a3", "</bndbox>", "</bndbox><bndbox/>"), ("a3.xml",)),
    "normalised corners": (
        swapped("a3", ">6<", ">0.1<", ">7<", ">0.2<", ">17<", ">0.5<", ">28<", ">1<"),
        ("VOC2007", "bbox", "0", "1"),
    ),
    "no set": (lambda tree: (tree / "VOCdevkit/VOC2007/Annotations").rename(tree / "x"), ("Annotations",)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(tree: Path, case: str) -> None:
    damage, names = BROKEN[case]
    damage(tree)
    assert_refused(lambda: read_voc(tree, "test"), DataError, *names)


def test_an_unknown_class_is_named_with_the_known_ones(tree: Path) -> None:
    assert_refused(
        lambda: read_voc(tree, "test", classes=("dog", "cow")), DataError, "a3.xml", "cat", "classes", "dog", "cow"
    )


def test_a_class_given_twice_is_refused(tree: Path) -> None:
    assert_refused(lambda: read_voc(tree, "test", classes=("cat", "cow", "cat")), DataError, "classes", "cat")


def test_tags_may_be_in_upper_case(tree: Path) -> None:
    annotation(tree, "a1").write_text(re.sub(r"</?\w+", lambda tag: tag[0].upper(), annotation(tree, "a1").read_text()))
    assert_same(read_voc(tree, "train").images[0], EXAMPLES[0])


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "set.zip").write_bytes(b"PK")
    assert_refused(lambda: read_voc(tmp_path / "set.zip"), DataError, "set.zip", "unpack")
    (tmp_path / "set.txt").write_bytes(b"")
    assert_refused(lambda: read_voc(tmp_path / "set.txt"), DataError, "set.txt")
    assert_refused(lambda: read_voc(tmp_path / "missing"), DataError, "missing")


def test_a_truncated_image_is_noticed_when_it_is_loaded(tree: Path) -> None:
    file = next(tree.rglob("a3.png"))
    file.write_bytes(file.read_bytes()[:200])
    (image,) = read_voc(tree, "test").images
    assert_refused(image.load, DataError, "a3.png")


def test_an_image_of_another_size_is_noticed_when_it_is_loaded(tree: Path) -> None:
    replace(annotation(tree), "<height>30<", "<height>29<")
    (image,) = read_voc(tree, "test").images
    assert_refused(image.load, DataError, "a3.png", "40 x 30", "40 x 29")


def with_truth(**fields: str | Tensor) -> Example:
    truth = EXAMPLES[2].truth
    return Example(EXAMPLES[2].image, Annotated(**{**vars(truth), **fields}))


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        (with_truth(image_id="../x"), ()),
        (with_truth(crowd=torch.tensor([True])), ("crowd",)),
        (with_truth(boxes=torch.tensor([[3.0, 3.0, 3.5, 9.0]])), ()),
    ],
)
def test_what_voc_can_not_hold_is_not_written(tmp_path: Path, bad: Example, names: tuple[str, ...]) -> None:
    assert_refused(lambda: write_voc(tmp_path, [bad], CLASSES, "all"), DataError, *names)
