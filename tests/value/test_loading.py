"""Files of value functions of every kind: what is read is what was written, and what is no such file is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from helpers.tensors import rand32
from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.tasks.combine import Combination, Combine
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.loading import load_value_function
from metricopt_ext.value.value_function import NeuralValueFunction, Quality

SIGNATURE = Signature("film", ("a",), (8,), 3, 5, "normal/1", None)
GOOD = Quality(spearman=0.9, mae=0.01, constant_mae=0.1, points=100, trajectories=40, near_mae=0.01, headroom=0.1)
AHEAD = replace(GOOD, incumbent_mae=0.07)


def neural() -> NeuralValueFunction:
    torch.manual_seed(0)
    f = NeuralValueFunction(5, 3)
    f.cost_mean.fill_(0.4)
    f.cost_std.fill_(0.3)
    return f.eval()


def gp() -> GPValueFunction:
    return GPValueFunction.conditioned(rand32(8, 5), rand32(8, seed=3), torch.eye(5), 0.1)


def logsumexp(values: Tensor) -> Tensor:
    return values.logsumexp(-1)


each_kind = pytest.mark.parametrize("make", [neural, gp])


@each_kind
@pytest.mark.parametrize(("quality", "signature"), [(None, None), (GOOD, SIGNATURE), (AHEAD, None)])
def test_file_roundtrip(make: Any, quality: Quality | None, signature: Signature | None, tmp_path: Path) -> None:
    path, f, phi = tmp_path / "f.safetensors", make(), rand32(9, 5)
    f.set_domain(rand32(50, 5), centre=rand32(5, seed=6))
    f.quality, f.signature = quality, signature
    f.save(path)
    loaded = load_value_function(path)
    assert type(loaded) is type(f)
    assert loaded.state_dict().keys() == f.state_dict().keys()
    assert all(torch.equal(value, f.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert torch.equal(loaded.members(phi), f.members(phi))
    assert (loaded.radius, loaded.gradient_floor) == (f.radius, f.gradient_floor)
    assert (loaded.quality, loaded.signature) == (quality, signature)
    assert loaded.trusted == (quality is not None)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())


def of_outcomes(combine: Combine, sign: int) -> GPValueFunction:
    """f of three outcomes with noises, promises and a combination of their own."""
    phi, costs = rand32(12, 5), rand32(12, 3, seed=3)
    combination = Combination(combine, sign, ("a", "b", "c"))
    return GPValueFunction.conditioned(phi, costs, torch.eye(5), (0.1, 0.8, 0.1), combination, rand32(3, 5).double())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("combine", ["worst", "mean", logsumexp])
def test_how_outcomes_make_the_metric_is_kept(combine: Combine, sign: int, tmp_path: Path) -> None:
    """All but a function, which whoever loads it gives again."""
    path, f, phi = tmp_path / "f.safetensors", of_outcomes(combine, sign), rand32(9, 5, seed=8)
    f.save(path)
    given = {"combine": combine} if callable(combine) else {}
    loaded = load_value_function(path, **given)
    assert isinstance(loaded, GPValueFunction)
    assert loaded.combination == f.combination
    assert loaded.state_dict().keys() == f.state_dict().keys()
    assert all(torch.equal(value, f.state_dict()[key]) for key, value in loaded.state_dict().items())
    for found, expected in zip(answers(loaded, phi), answers(f, phi), strict=True):
        assert torch.equal(found, expected)


def answers(f: GPValueFunction, phi: Tensor) -> list[Tensor]:
    """What f says, also of chance, and what it draws."""
    sample = f.deviations(3, torch.Generator().manual_seed(0))(phi)
    noise = torch.tensor([f.noise_std(each) for each in phi])
    return [f.members(phi), f.outcomes(phi), f.std(phi), f.gradient(phi), noise, sample]


def test_a_function_that_combines_is_asked_for_and_one_too_many_refused(tmp_path: Path) -> None:
    paths = {}
    for name, f in {"function": of_outcomes(logsumexp, 1), "worst": of_outcomes("worst", 1), "one": gp()}.items():
        f.save(paths.setdefault(name, tmp_path / f"{name}.safetensors"))
    assert_refused(lambda: load_value_function(paths["function"]), ValueFunctionError, "combine=FUNCTION")
    given = {"combine": logsumexp}
    assert_refused(lambda: load_value_function(paths["worst"], **given), ValueFunctionError, "combine", "'worst'")
    assert_refused(lambda: load_value_function(paths["one"], **given), ValueFunctionError, "combine")


def test_another_adapter_is_refused() -> None:
    """The dimension alone does not tell: phi may act on other layers, or through other matrices."""
    f = neural()
    f.signature = SIGNATURE
    for change, names in (
        ({"seed": 4}, ("seed", "3", "4")),
        ({"layers": tuple("bcdefgh"), "channels": (9,) * 7}, ("layers", "a", "b")),
        ({"kind": "input_bias"}, ("film", "input_bias")),
    ):
        assert_refused(lambda change=change: f.check_fits(replace(SIGNATURE, **change)), ValueFunctionError, *names)
    f.signature = None
    f.check_fits(replace(SIGNATURE, seed=4))
