"""A configuration that is shown: each key once, with its value and its origin, and the same when it is read again."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.utils.config import load_config
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


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["title=${inner.rate}", "inner.rate=1e300", "limit=-1e-9"],
        [f"title={'long ' * 50}", "loud=true"],
    ],
)
def test_what_is_shown_makes_the_same_configuration(overrides: list[str], tmp_path: Path) -> None:
    config = load_config(Schema, None, overrides)
    config.inner.names, config.inner.free = ["${x}", " "], {"a": [1, "x", None], "b": {"c": "\\${d}"}}
    (tmp_path / "shown.yaml").write_text(shown_config(config, {}))
    assert load_config(Schema, tmp_path / "shown.yaml") == config
