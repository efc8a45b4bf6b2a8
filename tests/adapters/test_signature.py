"""Signatures: what a phi means, so that nothing that was learned for one adapter is used with another."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter, signature_of
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.modulation import GENERATOR
from metricopt_ext.adapters.signature import Outputs, Signature
from metricopt_ext.errors import AdapterError


def test_it_says_all_that_phi_depends_on(cnn: Callable[[], nn.Sequential]) -> None:
    film = attach_film(cnn(), ["1", "7"], dim=3, seed=5)
    assert film.signature == Signature("film", ("1", "7"), (4, 5), 5, 3, GENERATOR, None)
    bias = attach_input_bias(cnn(), dim=2)
    assert bias.signature == Signature("input_bias", ("6",), (5,), 0, 2, GENERATOR, None)
    both = attach_film(cnn(), "1", dim=3, outputs=Outputs(scale=2, temperature=True))
    assert both.signature == Signature("film", ("1", "6"), (4, 5), 0, 9, GENERATOR, Outputs("6", 2.0, True))
    alone = attach_outputs(cnn())
    assert alone.signature == Signature("outputs", ("6",), (5,), 0, 5, GENERATOR, Outputs("6"))


@pytest.mark.parametrize(
    ("change", "named"),
    [({"layers": "1"}, "layers channels"), ({"dim": 4}, "dim"), ({"seed": 1}, "seed")],
)
def test_another_adapter_differs(cnn: Callable[[], nn.Sequential], change: dict[str, Any], named: str) -> None:
    mine, other = attach_film(cnn(), dim=3).signature, attach_film(cnn(), **{"dim": 3, **change}).signature
    assert " ".join(name for name, _, _ in mine.differences(other)) == named
    assert not list(mine.differences(attach_film(cnn(), dim=3).signature))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (None, "layers channels dim outputs"),
        (Outputs("6", 2.0), "outputs"),
        (Outputs("6", 1.0, True), "dim outputs"),
        (Outputs("0"), "layers channels dim outputs"),
    ],
)
def test_other_outputs_differ(cnn: Callable[[], nn.Sequential], change: Outputs | None, named: str) -> None:
    mine = attach_film(cnn(), "4", dim=3, outputs=Outputs("6")).signature
    other = attach_film(cnn(), "4", dim=3, outputs=change).signature
    assert " ".join(name for name, _, _ in mine.differences(other)) == named
    assert not list(mine.differences(attach_film(cnn(), "4", dim=3, outputs=Outputs(scale=1)).signature))


@pytest.mark.parametrize("outputs", [None, Outputs("6", 2.5, True)])
def test_json_roundtrip(cnn: Callable[[], nn.Sequential], outputs: Outputs | None) -> None:
    signature = attach_film(cnn(), "1", dim=3, outputs=outputs).signature
    assert Signature.from_json(json.loads(json.dumps(signature.to_json()))) == signature
    assert Signature.from_json(None) is None


def test_json_without_the_outputs_is_refused(cnn: Callable[[], nn.Sequential]) -> None:
    content = attach_film(cnn(), dim=3).signature.to_json()
    del content["outputs"]
    assert_refused(lambda: Signature.from_json(content), ValueError, "Signature", "outputs")


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"layer": 3}, ("layer", "3")),
        ({"temperature": 1}, ("temperature", "1", "True", "False")),
    ],
)
def test_outputs_of_wrong_types(wrong: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: Outputs(**wrong), AdapterError, *names)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "2", True, None])
def test_outputs_without_a_positive_scale(scale: Any) -> None:
    assert_refused(lambda: Outputs(scale=scale), ValueError, "scale", repr(scale))


def test_what_an_optimizer_is_given_carries_it(cnn: Callable[[], nn.Sequential], tmp_path: Path) -> None:
    adapter = attach_film(cnn(), dim=3, seed=5)
    (phi,) = (parameter for parameter in adapter.model.parameters() if parameter.requires_grad)
    assert signature_of(phi) == adapter.signature
    assert signature_of(nn.Linear(2, 2).weight) is None
    (copied,) = Adapter(copy.deepcopy(adapter.model)).parameters()
    assert signature_of(copied) == adapter.signature

    other = attach_film(cnn(), dim=3, seed=6)
    other.save(tmp_path / "adapter.safetensors")
    adapter.load(tmp_path / "adapter.safetensors")  # its matrices are the file's now
    assert adapter.signature == replace(adapter.signature, seed=6) == other.signature
    assert signature_of(phi) == other.signature
