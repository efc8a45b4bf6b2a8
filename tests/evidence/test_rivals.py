"""What a user could do instead of MetricOpt, against naive loops."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.evidence.rivals import reestimate_batchnorm, reestimated_statistics, usual_methods
from metricopt_ext.evidence.run_config import RecipeConfig, RunConfig
from metricopt_ext.methods.tuning import FRESH
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.tasks.batches import TensorBatches


def statistics(norm: nn.Module) -> tuple[Tensor, Tensor]:
    return norm.running_mean, norm.running_var


@pytest.mark.parametrize("batches", [1, 4])
def test_batchnorm_statistics_are_those_of_the_inputs(batches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.3), nn.ReLU(), nn.Linear(5, 2)).eval()
    adapter = attach_film(model, dim=4)
    adapter.set_phi(torch.full((4,), 0.7))
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(40, 3) * 2 + 1
    other = reestimate_batchnorm(model, x.split(40 // batches))
    with torch.no_grad():
        inputs = torch.nn.functional.linear(x, model[0].weight, model[0].bias).view(batches, -1, 5)
    mean, var = statistics(other[1])
    torch.testing.assert_close(mean, inputs.mean(1).mean(0))
    torch.testing.assert_close(var, inputs.var(1).mean(0))
    assert (mean - before["1.running_mean"]).abs().min() > 0.01
    assert not hasattr(other, "metricopt")  # the copy is the model without phi
    assert other[1].momentum == 0.3
    assert not any(module.training for module in other.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(adapter.phi, torch.full((4,), 0.7))
    with torch.no_grad():
        expected = model[3](torch.relu((inputs.flatten(0, 1) - mean) / (var + 1e-5).sqrt()))
    torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-5)


def test_statistics_are_named_as_in_the_adapted_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).eval()
    x = torch.randn(40, 3)
    expected = reestimate_batchnorm(model, [x])
    attach_film(model, dim=4)
    found = reestimated_statistics(model, [x])
    assert found is not None
    assert set(found) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert set(found) <= set(dict(model.named_buffers()))
    assert torch.equal(found["1.running_mean"], expected[1].running_mean)
    assert reestimated_statistics(nn.Linear(3, 5), [x]) is None


def test_batchnorm_statistics_of_images_and_of_a_model_in_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).train()
    x = torch.randn(6, 2, 8, 8)
    mean, var = statistics(reestimate_batchnorm(model, [x])[1])
    h = model[0](x).detach().movedim(1, 0).flatten(1)
    torch.testing.assert_close(mean, h.mean(1))
    torch.testing.assert_close(var, h.var(1))
    assert model.training
    assert int(model[1].num_batches_tracked) == 0


def test_batchnorm_statistics_are_taken_without_dropout_and_without_random_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.BatchNorm1d(5))
    x, state = torch.randn(30, 3), torch.get_rng_state()
    mean, var = statistics(reestimate_batchnorm(model, [x])[2])
    torch.testing.assert_close(mean, model[0](x).detach().mean(0))
    torch.testing.assert_close(var, model[0](x).detach().var(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_no_batchnorm_nothing_to_reestimate() -> None:
    assert reestimate_batchnorm(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), [torch.randn(4, 3)]) is None


def test_finetuning_on_labels_uses_their_batches(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    examples = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = TensorBatches(examples, examples, batch_size=1)
    phi = torch.zeros(4, dtype=torch.float64)
    for step in range(6):
        x, _ = batches(5, FRESH, step)
        phi = phi - 0.2 * task.curvature * (phi - task.centre - x[0])
    config = RunConfig(recipe=RecipeConfig(steps=6, lr=0.2))
    usual = usual_methods(config, 5, inputs=[], batches=lambda seed, index, step: batches(seed, index, step)[0][0])
    on_labels, on_loss = (usual[name](task, {}) for name in ("loss_finetune_validation", "loss_finetune"))
    assert on_labels is not None
    assert on_loss is not None
    torch.testing.assert_close(on_labels.reached[-1].end, phi)
    assert not torch.allclose(on_loss.reached[-1].end, phi)
    assert task.queries == 0


def test_searches_run_where_they_are_given_queries(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    config = RunConfig(recipe=RecipeConfig(steps=6, lr=0.2))
    assert not {"guided_es", "cma_es", "refined"} & set(usual_methods(config, 5, inputs=[], batches=task.batches))
    config = RunConfig(recipe=RecipeConfig(steps=6, lr=0.2), search_queries=30, refine_queries=20)
    usual = usual_methods(config, 5, inputs=[], batches=task.batches)
    for name, search in (("guided_es", GuidedES(lr=0.2)), ("cma_es", CMAES())):
        fresh = task.judged_by(task.metric.with_new_ledger())
        result = usual[name](fresh, {})
        assert result is not None
        (reached,) = result.reached
        assert reached.queries == reached.queries_per_start == fresh.metric.ledger.spent == 30
        assert torch.equal(reached.end, search(task, task.origin(), 30, seed=5).phi)
    assert "refined" in usual
