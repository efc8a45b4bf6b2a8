"""A configuration that is shown: each key once, with its value and its origin, and the same when it is read again."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.utils.config import load_config, load_with_origins
from metricopt_ext.utils.shown_config import shown_config


@dataclass
class Extra:
    share: float = 0.5


@dataclass
class Inner:
    rate: float = 1e-5
    names: list[str] = field(default_factory=lambda: ["a, b", "007", "", "'", "\\t"])
    free: dict[str, Any] = field(default_factory=dict)
    extra: Extra | None = None


@dataclass
class Schema:
    inner: Inner = field(default_factory=Inner)
    limit: float | None = None
    title: str = "yes"
    loud: bool = False


def test_each_key_is_shown_with_its_value_and_its_origin(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("inner: {rate: 0.25, free: {margin: 0.1}}\nloud: true\n")
    overrides = {"command line": ["loud=false", "inner.free.kind=a"]}
    config, origins = load_with_origins(Schema, tmp_path / "config.yaml", overrides)
    assert shown_config(config, origins).splitlines() == [
        "inner:",
        "  rate: 0.25  # config file",
        """  names: ['a, b', '007', '', '''', \\t]  # default""",
        "  free: {margin: 0.1, kind: a}  # command line",
        "limit: null  # default",
        "title: 'yes'  # default",
        "loud: false  # command line",
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["title=${inner.rate}", "inner.rate=1e300", "limit=-1e-9"],
        ["title=# a: b"],
        [f"title={'long ' * 50}", "loud=true"],
    ],
)
def test_what_is_shown_makes_the_same_configuration(overrides: list[str], tmp_path: Path) -> None:
    config = load_config(Schema, None, overrides)
    config.inner.names, config.inner.free = ["${x}", " "], {"a": [1, "x", None], "b": {"c": "\\${d}"}}
    (tmp_path / "shown.yaml").write_text(shown_config(config, {}))
    assert load_config(Schema, tmp_path / "shown.yaml") == config
