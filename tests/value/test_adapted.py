"""The correction of a value function against scikit-learn's Gaussian process."""

from pathlib import Path

import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

from helpers.refusals import assert_refused
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.value.adapted import AdaptedValueFunction
from metricopt_ext.value.value_function import NeuralValueFunction, Quality, RidgeValueFunction, ValueFunction


def fitted(f: ValueFunction) -> ValueFunction:
    f.set_domain(torch.randn(30, f.dim, generator=torch.Generator().manual_seed(1)))
    f.quality = Quality(spearman=0.8, mae=0.1, constant_mae=0.2, points=30, trajectories=10, near_mae=0.1, headroom=0.2)
    return f


def ridge() -> ValueFunction:
    f = RidgeValueFunction(3, 2)
    torch.nn.init.normal_(f.coefficients, generator=torch.Generator().manual_seed(0))
    return fitted(f)


def neural() -> ValueFunction:
    torch.manual_seed(0)
    return fitted(NeuralValueFunction(3, 2))


@pytest.mark.parametrize("f", [ridge(), neural()], ids=["ridge", "neural"])
def test_correction_is_the_posterior_of_the_errors(f: ValueFunction) -> None:
    rng = torch.Generator().manual_seed(2)
    phi, cost, elsewhere = torch.randn(6, 3, generator=rng), torch.randn(6, generator=rng), torch.randn(9, 3)
    adapted = AdaptedValueFunction(f, phi, cost)
    reference = GaussianProcessRegressor(RBF(float(f.radius)), alpha=0.1, optimizer=None)
    reference.fit(phi.numpy(), (cost - f(phi)).numpy())
    expected = f(elsewhere) + torch.tensor(reference.predict(elsewhere.numpy())).float()
    assert torch.allclose(adapted(elsewhere), expected, atol=1e-5)
    assert torch.allclose(adapted(elsewhere.view(3, 3, 3)), expected.view(3, 3), atol=1e-5)
    assert adapted.members(elsewhere).shape == (9, 2)
    assert (adapted(phi) - cost).abs().mean() < 0.7 * (f(phi) - cost).abs().mean()


def test_far_away_it_is_f_itself() -> None:
    f, phi = ridge(), torch.zeros(1, 3)
    adapted = AdaptedValueFunction(f, phi, f(phi) + 1)
    far = 20 * f.radius * torch.ones(1, 3)
    assert torch.equal(adapted(far), f(far))
    assert torch.equal(adapted.gradient(far), f.gradient(far))
    assert float(adapted(phi) - f(phi)) == pytest.approx(1 / 1.1, rel=1e-5)


def test_domain_and_quality_are_those_of_f_and_f_is_left_alone() -> None:
    f = neural()
    before = {name: value.clone() for name, value in f.state_dict().items()}
    adapted = AdaptedValueFunction(f, torch.randn(4, 3), torch.randn(4))
    assert adapted.trusted
    assert (adapted.radius, adapted.gradient_floor) == (f.radius, f.gradient_floor)
    assert not any(parameter.requires_grad for parameter in adapted.parameters())
    assert all(torch.equal(value, before[name]) for name, value in f.state_dict().items())


def test_what_no_file_could_bring_back_is_not_saved(tmp_path: Path) -> None:
    adapted = AdaptedValueFunction(neural(), torch.randn(4, 3), torch.randn(4))
    assert_refused(lambda: adapted.save(tmp_path / "f.safetensors"), ValueFunctionError, "adapted")
    assert list(tmp_path.iterdir()) == []
