"""The node METRICOPT: its keys are described and read, and impossible values are refused."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.config import CfgNode, get_cfg

from helpers.refusals import assert_refused
from metricopt_ext.detection.detectron2.config import (
    Settings,
    add_metricopt_config,
    metricopt_settings,
    read_config,
    show_config,
)
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from metricopt_ext.errors import ConfigError, MetricOptError

pytestmark = pytest.mark.detectron2

ROOT = Path(__file__).resolve().parents[3]


def defaults() -> Any:
    cfg = get_cfg()
    add_metricopt_config(cfg)
    return cfg


def keys(node: CfgNode, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, CfgNode):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_defaults_are_those_of_the_settings() -> None:
    assert metricopt_settings(defaults()) == Settings()


def test_the_documentation_lists_each_key_with_its_default() -> None:
    text = (ROOT / "docs" / "detection.md").read_text()
    listed = re.findall(r"^\| `([A-Z_.]+)` \| `(.*?)` \| \S", text, re.MULTILINE)
    assert listed == [(key, repr(default)) for key, default in keys(defaults().METRICOPT)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["METRIC.NAME", "AP"], r"METRICOPT\.METRIC\.NAME.*segm/AP"),
        (["FILM.DIM", 0], r"METRICOPT\.FILM\.DIM.*0; it.*least 1"),
        (["METRIC.DEFINITION", "best"], r"METRICOPT\.METRIC\.DEFINITION.*'coco'"),
        (["DATASETS.SCENES.SHIFT.NOISE_STD", -1.0], r"shift's.*finite and at least 0"),
        (["SEARCH.BATCH", 0], r"METRICOPT\.SEARCH.*least 1"),
        (["ENABLED", True, "METRICOPT.FILM.LAYERS", ("backbone", "necks")], "'necks'"),
    ],
)
def test_impossible_settings(options: list[Any], message: str, tiny_config: Any) -> None:
    first, *others = options
    with pytest.raises(MetricOptError, match=message):
        MetricOptTrainer.build_model(tiny_config("fpn", "BN", f"METRICOPT.{first}", *others))


EVAL = "MODEL:\n  ANCHOR_GENERATOR:\n    SIZES: !!python/object/apply:eval [{}]\n"


@pytest.mark.parametrize(
    "text",
    [
        "[[x, x * 2**(1.0/3), x * 2**(2.0/3) ] for x in [32, 64, 128, 256, 512 ]]",  # Detectron2's own
        "[[x] for x in (16, 32, 64)]",
        "[[x * y for y in [1, 1.5]] for x in [8 + 8, 2**5, 128 / 2]]",
        "[[32, 64], [2.5]]",
    ],
)
def test_lists_that_a_yaml_computes_are_read_as_by_detectron2(text: str, tmp_path: Path) -> None:
    file = tmp_path / "retina.yaml"
    file.write_text(EVAL.format(f'"{text}"'))
    (tmp_path / "mine.yaml").write_text("_BASE_: retina.yaml\n")
    own = get_cfg()
    own.merge_from_file(str(file), allow_unsafe=True)
    for each in (file, tmp_path / "mine.yaml"):
        read = read_config(each).MODEL.ANCHOR_GENERATOR.SIZES
        assert read == own.MODEL.ANCHOR_GENERATOR.SIZES
        assert f"SIZES: {read}  # config file" in show_config(each)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch ran')",
        "open('ran', 'w')",
        "[[x for x in range(9)]]",
        "[[9 ** 9 ** 9 ** 9]]",
        "[[x] for x in [1, 0] if 1 / x]",
        "[[1 / 0]]",
        "[[2] * 10 ** 9]",
        "[[x.real] for x in [1]]",
        "[[",
    ],
)
def test_what_else_a_yaml_would_run_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(EVAL.format(f'"{text}"'))
    for read in (read_config, show_config):
        assert_refused(partial(read, "mine.yaml"), ConfigError, "mine.yaml", "config.yaml", "OUTPUT_DIR")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("VERSION: 2\nMETRICOPT: {DIMENSION: 3}\n")
    with pytest.raises(ConfigError, match="DIMENSION"):
        read_config(tmp_path / "wrong.yaml")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        read_config(tmp_path / "nowhere.yaml")
    for content in ("VERSION: 2\nMETRICOPT: {FILM: [}\n", "VERSION: !!python/object:os.system 2\n"):
        (tmp_path / "wrong.yaml").write_text(content)
        with pytest.raises(ConfigError, match=r"wrong\.yaml: "):
            read_config(tmp_path / "wrong.yaml")


def test_all_keys_are_shown_with_their_origins(tmp_path: Path) -> None:
    file = ROOT / "configs" / "detection" / "detectron2" / "scenes.yaml"
    text = show_config(file, ["METRICOPT.SEARCH.QUERIES", "30"])
    lines = text.splitlines()
    assert len([line for line in lines if "  # " in line]) == len([*keys(read_config(file))])
    assert {"    QUERIES: 30  # command line", "    BATCH: 4  # default", "    DIM: 32  # config file"} <= set(lines)
    (tmp_path / "shown.yaml").write_text(text)
    again = read_config(tmp_path / "shown.yaml")
    assert again.METRICOPT == read_config(file, ["METRICOPT.SEARCH.QUERIES", "30"]).METRICOPT


def test_parts_of_ones_own_are_named_as_in_our_other_tools() -> None:
    file = ROOT / "configs" / "detection" / "detectron2" / "scenes.yaml"
    given = ["MODEL.DEVICE", "cpu", "data.train=a b/12", "SEED", "3", "data.test=7"]
    cfg = read_config(file, given)
    node = cfg.METRICOPT.DATASETS
    assert (node.TRAIN, node.VAL, node.TEST, cfg.SEED, cfg.MODEL.DEVICE) == ("a b/12", "", "7", 3, "cpu")
    assert "    TRAIN: a b/12  # command line" in show_config(file, given).splitlines()
    message = r"METRICOPT\.DATASETS\.TRAIN \(data\.train\) and DATASETS\.TRAIN both name the train part; leave one"
    with pytest.raises(ConfigError, match=message):
        read_config(file, [*given, "DATASETS.TRAIN", "('x',)"])
    with pytest.raises(ConfigError, match=r"data\.root=x"):
        read_config(file, ["data.root=x", "1"])
