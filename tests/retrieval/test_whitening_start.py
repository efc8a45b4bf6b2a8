"""A whitening as a start: the same embeddings as by the setting at 1, and refused where no layer can take it."""

import pytest
import torch
from torch import nn

pytest.importorskip("faiss")

from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.attach import attach_film, attach_outputs
from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.retrieval.models import Conv4, Embedder
from metricopt_ext.retrieval.post_processing import PostProcessing, Whitening, post_processed
from metricopt_ext.retrieval.whitening_start import lda_whitening_start, whitened, whitening_start
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def task_of(model: nn.Module) -> FinetuneTask:
    return FinetuneTask(attach_film(model, dim=3), metric=Metric(lambda model: 0.0, maximize=True))


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 5, bias=bias)).double().eval()


@torch.no_grad()
def test_it_is_the_setting_at_one() -> None:
    task, x, others = task_of(network()), rand(12, 6, seed=1), rand(60, 6, seed=0)
    before = {name: value.clone() for name, value in task.adapter.model.state_dict().items()}
    plain, whitening = task.adapter.model(x), Whitening.of(task.adapter.model(others))
    start = whitening_start(task, iter(others.split(20)))
    assert start.parameters.keys() == {"3.weight", "3.bias"}
    assert not start.phi.any()
    with task.adapter.applied(start) as model:
        found = model(x)
        spread = torch.cov(model(others).T)
    torch.testing.assert_close(found, whitening.applied(plain, 1.0), rtol=1e-10, atol=1e-10)
    of_one = post_processed(plain, PostProcessing(whitening=1.0), whitening)
    torch.testing.assert_close(nn.functional.normalize(found), of_one, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(spread, torch.eye(5).double(), rtol=0, atol=1e-10)
    assert all(torch.equal(value, before[name]) for name, value in task.adapter.model.state_dict().items())


@torch.no_grad()
def test_directions_without_variance_become_zero() -> None:
    model = network()
    model[3].weight[4] = model[3].weight[0]
    model[3].bias[4] = 1.0
    task, others = task_of(model), rand(60, 6, seed=0)
    start = whitening_start(task, [others])
    with task.adapter.applied(start):
        spread = torch.cov(task.adapter.model(others).T)
    torch.testing.assert_close(spread, torch.diag(torch.tensor([1.0, 1, 1, 1, 0])).double(), rtol=0, atol=1e-9)


def test_where_no_layer_can_take_it_the_reason_is_said() -> None:
    assert_refused(lambda: whitening_start(task_of(network(bias=False)), [rand(60, 6, seed=0)]), AdapterError)
    images = torch.rand(40, 1, 8, 8, dtype=torch.float64)
    embedder = task_of(Embedder(Conv4(1, 8, 6, 4)).double().eval())
    assert_refused(lambda: whitening_start(embedder, [images]), AdapterError, "1")
    assert_refused(
        lambda: whitening_start(
            task_of(nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9)).double().eval()), [rand(60, 6, seed=0)]
        ),
        AdapterError,
    )
    assert_refused(lambda: whitening_start(task_of(network()), [rand(5, 6, seed=0)]), DataError)
    assert_refused(lambda: whitening_start(task_of(network()), []), DataError)
    assert_refused(
        lambda: whitening_start(task_of(network()), [(rand(60, 6, seed=0), torch.zeros(60))]), DataError, "0"
    )


@torch.no_grad()
def test_one_within_classes_is_merged_alike() -> None:
    task, x = task_of(network()), rand(60, 6, seed=0)
    labels = torch.arange(60) % 4
    plain = task.adapter.model(x)
    start = lda_whitening_start(task, x.split(20), labels)
    with task.adapter.applied(start) as model:
        found = model(x)
    torch.testing.assert_close(found, Whitening.within(plain, labels).applied(plain, 1.0), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_any_model_is_whitened_by_a_layer_behind_it() -> None:
    task, x = task_of(nn.Sequential(network(), nn.Softmax(1)).eval()), rand(60, 6, seed=0)
    plain, labels, post = task.adapter.model(x), torch.arange(60) % 4, PostProcessing(whitening=1.0)
    for given, whitening in ((None, Whitening.of(plain)), (labels, Whitening.within(plain, labels))):
        model = whitened(task, x.split(20), given)
        torch.testing.assert_close(model(x), post_processed(plain, post, whitening), rtol=1e-8, atol=1e-8)
    assert torch.equal(task.adapter.model(x), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_keeps_all_directions(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype).eval()
    model.weight.copy_(torch.diag(torch.tensor([1.0, 0.9, 0.8, 0.7])))
    adapter = attach_outputs(model)
    task = FinetuneTask(adapter, metric=Metric(lambda model: 0.0, maximize=True))
    x = rand(2000, 4, seed=0).to(dtype)
    with adapter.applied(whitening_start(task, x.split(500))) as whitened_model:
        spread = whitened_model(x).float().std(0)
    torch.testing.assert_close(spread, torch.ones(4), rtol=0, atol=0.05)


@torch.no_grad()
def test_labels_may_be_a_list() -> None:
    task, x = task_of(network()), rand(60, 6, seed=0)
    labels = [index % 3 for index in range(60)]
    listed, given = (lda_whitening_start(task, [x], each) for each in (labels, torch.tensor(labels)))
    assert listed.digest == given.digest
