"""What phi changes in a network, against naive sums, and its gradient against differences."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from described_change import DescribedValueFunction, LayerChange, OutputChange
from metricopt_ext.adapters.attach import attach_film, attach_input_bias
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.value.value_function import RidgeValueFunction


def film_task(width: int = 5, outputs: int = 3) -> FinetuneTask:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs)).double()
    return FinetuneTask(attach_film(model, dim=3, seed=1), metric=Metric(lambda model: 0.0, maximize=True))


def inputs(n: int = 7) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


PHI = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)


@torch.no_grad()
def outputs_at(task: FinetuneTask, phi: Tensor, x: Tensor, layers: int) -> Tensor:
    with task.adapter.using(phi) as model:
        return model.eval()[:layers](x)  # type: ignore[index, no-any-return]


def test_layers_are_described_by_how_their_channels_move() -> None:
    task, x = film_task(), inputs()
    old, new = (outputs_at(task, phi, x, 2) for phi in (task.origin(), PHI))
    moved = [float((b.mean() - a.mean()) / a.std()) for a, b in zip(old.T, new.T, strict=True)]
    spread = [float((b.std() / a.std()).log()) for a, b in zip(old.T, new.T, strict=True)]
    half = [f(each) for each in (moved, spread) for f in (mean, rms)]
    found = LayerChange(task, x)(PHI)
    assert found.tolist() == pytest.approx([*half, *half], rel=1e-4, abs=1e-6)  # one layer is both halves of the depth
    assert LayerChange(film_task(9), x)(PHI).shape == found.shape
    assert LayerChange(task, x)(torch.stack([task.origin(), PHI])).abs().amax(1).tolist()[0] < 2e-6


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def rms(values: list[float]) -> float:
    return mean([value**2 for value in values]) ** 0.5


def test_a_bias_moves_means_alone() -> None:
    task = FinetuneTask(
        attach_input_bias(nn.Linear(4, 3).double(), dim=2), metric=Metric(lambda model: 0.0, maximize=True)
    )
    found = LayerChange(task, inputs())(torch.ones(2, dtype=torch.float64))
    assert found[1] > 0.01
    assert found[[2, 3, 6, 7]].abs().max() < 2e-6


@pytest.mark.parametrize("classes", [1, 3])
def test_classes_are_described_by_their_probabilities(classes: int) -> None:
    task, x = film_task(outputs=classes), inputs()
    logits = [outputs_at(task, phi, x, 4) for phi in (task.origin(), PHI)]
    if classes == 1:
        logits = [torch.cat([torch.zeros_like(each), each], 1) for each in logits]
    old, new = ([[float(e) for e in row.exp() / row.exp().sum()] for row in each] for each in logits)

    def entropy(p: list[float]) -> float:
        return -sum(value * torch.tensor(value).log().item() for value in p)

    def means(rows: list[list[float]]) -> list[float]:
        return [mean(list(column)) for column in zip(*rows, strict=True)]

    expected = [b - a for a, b in zip(means(old), means(new), strict=True)]
    expected.append(mean([entropy(p) for p in new]) - mean([entropy(p) for p in old]))
    expected.append(entropy(means(new)) - entropy(means(old)))
    expected.append(mean([max(p) for p in new]) - mean([max(p) for p in old]))
    pairs = [list(zip(p, q, strict=True)) for p, q in zip(old, new, strict=True)]
    expected.append(mean([sum(a * torch.tensor(a / b).log().item() for a, b in each) for each in pairs]))
    describe = OutputChange(task, x, embeds=False)
    assert describe(PHI).tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert not describe(task.origin()).any()


def test_embeddings_are_described_by_their_cosines() -> None:
    task, x = film_task(), inputs(5)
    cosines = []
    for phi in (task.origin(), PHI):
        out = outputs_at(task, phi, x, 4)
        rows = [[float(a @ b / a.norm() / b.norm()) for j, b in enumerate(out) if j != i] for i, a in enumerate(out)]
        cosines.append(torch.tensor(rows, dtype=torch.float64))
    old, new = cosines

    def told(c: Tensor) -> list[float]:
        ordered = c.sort(1, descending=True).values
        return [
            float(each) for each in (c.mean(), c.std(), ordered[:, 0].mean(), (ordered[:, 0] - ordered[:, 1]).mean())
        ]

    expected = [b - a for a, b in zip(told(old), told(new), strict=True)] + [float(((new - old) ** 2).mean())]
    assert OutputChange(task, x, embeds=True)(PHI).tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", ["layers", "outputs"])
def test_f_of_a_description_has_the_gradient_of_its_differences(kind: str) -> None:
    task, x = film_task(), inputs()
    describe: Any = LayerChange(task, x) if kind == "layers" else OutputChange(task, x, embeds=False)
    width = len(describe(PHI))
    inner = RidgeValueFunction(width, 2).double()
    inner.coefficients.normal_(generator=torch.Generator().manual_seed(4))
    scale = torch.linspace(0.5, 2, width, dtype=torch.float64)
    f = DescribedValueFunction(inner, describe, scale, radius=1.5).double()
    assert float(f(PHI)) == pytest.approx(float(inner(describe(PHI) / scale)))
    gradient = f.gradient(PHI)
    for i, step in enumerate(1e-5 * torch.eye(3, dtype=torch.float64)):
        with torch.no_grad():
            difference = float(f(PHI + step) - f(PHI - step)) / 2e-5
        assert float(gradient[i]) == pytest.approx(difference, rel=1e-4, abs=1e-6)
    assert float(f.radius) == 1.5
