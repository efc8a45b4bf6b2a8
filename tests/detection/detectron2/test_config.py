"""The node METRICOPT: its keys are described and read, and impossible values are refused."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.config import CfgNode, get_cfg

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
