import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.classification.build import classification_loss, model_metric
from metricopt_ext.classification.metrics import METRICS, MetricSpec, expected_cost
from metricopt_ext.classification.models import TabularMLP
from metricopt_ext.classification.threshold import tune_threshold
from metricopt_ext.data.labelled import Split
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def task_of(model: nn.Module, part: Split, metric: MetricSpec) -> FinetuneTask:
    return FinetuneTask(
        attach_input_bias(model, dim=3),
        loss=classification_loss,
        batches=lambda seed, task, step: (part.x, part.y),
        metric=model_metric(metric, part),
    )


@pytest.mark.parametrize(
    "spec",
    [METRICS["mcr"], METRICS["f1"], METRICS["jaccard"], expected_cost([[0, 1], [5, 0]])],
    ids=lambda spec: spec.name,
)
def test_finds_the_best_of_all_candidate_thresholds(spec: MetricSpec) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    part = Split(x, ((x @ torch.tensor([1.0, -1.0, 0.5, 0.0]) + torch.randn(300)) > 1).long())
    model = TabularMLP(4).eval()
    with torch.no_grad():
        logits = model(x)
    task = task_of(model, part, spec)
    tuned = tune_threshold(task, x, evals=50)
    assert isinstance(tuned, nn.Module)
    assert task.metric.ledger.spent_on == {"threshold": 50}

    quantiles = [float(logits.quantile(i / 50)) for i in range(1, 50)]
    values = [spec.function(logits - t, part.y) for t in [0.0, *quantiles]]
    best = max(values) if spec.maximize else min(values)
    with torch.no_grad():
        assert spec.function(tuned(x), part.y) == pytest.approx(best, abs=1e-9)


def test_starts_from_phi_zero_whatever_the_adapter_holds() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(50, 4), torch.randint(2, (50,))
    task = task_of(TabularMLP(4).eval(), Split(x, y), METRICS["mcr"])
    before = tune_threshold(task, x, evals=5)
    task.adapter.set_phi(torch.ones(3))
    after = tune_threshold(task, x, evals=5)
    assert isinstance(before, nn.Module)
    assert isinstance(after, nn.Module)
    with torch.no_grad():
        assert torch.equal(before(x), after(x))


def test_another_start_is_merged_into_the_model() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(50, 4), torch.randint(2, (50,))
    task = task_of(TabularMLP(4).eval(), Split(x, y), METRICS["mcr"])
    start = torch.ones(3)
    tuned = tune_threshold(task, x, evals=5, start=start)
    assert tuned is not None
    with torch.no_grad(), task.adapter.using(start) as model:
        torch.testing.assert_close(tuned(x), model(x) - tuned.threshold)
    assert not task.adapter.phi.any()


def test_several_logits_have_no_threshold_and_cost_no_query() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)  # type: ignore[no-any-return]

    asked: list[int] = []
    task = FinetuneTask(
        attach_input_bias(Counted(), dim=2),
        loss=classification_loss,
        batches=lambda seed, task, step: None,
        metric=Metric(lambda: asked.append(1) or 0.0, maximize=False),
    )
    assert tune_threshold(task, torch.randn(5, 4)) is None
    assert asked == []
