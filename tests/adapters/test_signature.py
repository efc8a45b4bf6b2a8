"""Signatures: what a phi means, so that nothing that was learned for one adapter is used with another."""

import copy
from collections.abc import Callable
from pathlib import Path

from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter, signature_of
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.moves import GENERATOR
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


def test_what_an_optimizer_is_given_carries_it(cnn: Callable[[], nn.Sequential], tmp_path: Path) -> None:
    adapter = attach_film(cnn(), dim=3, seed=5)
    (phi,) = (parameter for parameter in adapter.model.parameters() if parameter.requires_grad)
    assert signature_of(phi) == adapter.signature
    assert signature_of(nn.Linear(2, 2).weight) is None
    (copied,) = Adapter(copy.deepcopy(adapter.model)).parameters()
    assert signature_of(copied) == adapter.signature


def test_a_file_of_another_is_refused(cnn: Callable[[], nn.Sequential], tmp_path: Path) -> None:
    adapter = attach_film(cnn(), dim=3, seed=5)
    attach_film(cnn(), dim=3, seed=6).save(tmp_path / "adapter.safetensors")
    assert_refused(
        lambda: adapter.load(tmp_path / "adapter.safetensors"), AdapterError, "seed", "6", "5", "load_adapter"
    )
