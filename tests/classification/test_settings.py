"""Settings of a classifier's inference, beside means over views made by hand, and what is kept meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("torchvision")

import metricopt_ext as mo
from helpers.networks import Counted
from metricopt_ext.classification.callable_metric import from_callable
from metricopt_ext.classification.metrics import METRICS
from metricopt_ext.classification.settings import classification_settings, view_of
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.named_model import tensor_of
from metricopt_ext.experiment.passes import Noticing
from metricopt_ext.tasks.metric import Metric

SIDE = 16


def images(n: int = 12, seed: int = 0) -> Tensor:
    return torch.rand(n, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Classifier(Counted):
    """Counts its runs; it looks at left and right differently."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3 * SIDE * SIDE, classes)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        logits: Tensor = self.head(self.norm(x).flatten(1))
        return logits.squeeze(1)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def crops_by_hand(x: Tensor) -> list[Tensor]:
    side = 14  # 7/8 of 16
    places = [(0, 0), (0, 2), (2, 0), (2, 2), (1, 1)]
    found = [x[..., top : top + side, left : left + side] for top, left in places]
    return [F.interpolate(each, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False) for each in found]


def test_views() -> None:
    x = images()
    assert view_of(x, "whole") is x
    assert torch.equal(view_of(x, "flipped whole"), x[..., torch.arange(SIDE - 1, -1, -1)])
    for number, expected in enumerate(crops_by_hand(x)):
        torch.testing.assert_close(view_of(x, str(number)), expected)
    for number, expected in enumerate(crops_by_hand(x.flip(-1))):
        torch.testing.assert_close(view_of(x, f"flipped {number}"), expected)
    assert view_of((255 * x).to(torch.uint8), "3").dtype == torch.uint8


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"flip": True},
        {"crops": 5},
        {"flip": True, "crops": 5, "temperature": 0.5},
        {"temperature": 3.0},
    ],
)
def test_logits_are_the_mean_over_the_views(values: dict[str, Any], classes: int) -> None:
    model, x = Classifier(classes), images()
    plain = logits(model, x)
    sides = [x, x.flip(-1)] if values.get("flip") else [x]
    views = [view for side in sides for view in (crops_by_hand(side) if values.get("crops") else [side])]
    expected = torch.stack([logits(model, view) for view in views]).mean(0) / values.get("temperature", 1.0)
    settings = classification_settings(model, temperature=True)
    with settings.applied(values):
        found = logits(model, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found, plain) == (not values)
    assert torch.equal(logits(model, x), plain)
    assert type(model) is Classifier


def test_what_was_seen_runs_no_model() -> None:
    model, x = Classifier(), images()
    settings = classification_settings(model, temperature=True)
    anew = {}
    tried: list[dict[str, Any]] = [
        {},
        {"temperature": 2.0},
        {"flip": True},
        {"flip": True, "temperature": 0.5},
        {"flip": True, "crops": 5},
    ]
    for number, values in enumerate(tried):
        with classification_settings(other := Classifier(), temperature=True).applied(values):
            anew[number] = logits(other, x)
    for _ in range(2):
        for number, values in enumerate(tried):
            with settings.applied(values):
                parts = torch.cat([logits(model, part) for part in x.split(len(x))])
                assert torch.equal(parts, anew[number])
    assert (model.runs, settings.passes) == (12, 12)  # whole, flipped, and five crops of both
    with settings.applied({"flip": True}):
        logits(model, images(seed=1))  # other inputs are the second part of the same passes
    assert (model.runs, settings.passes) == (14, 12)
    with torch.no_grad():
        model.norm.running_mean += 0.1
    with settings.applied({"temperature": 0.5}):
        assert torch.equal(logits(model, x) * 0.5, Classifier.forward(model, x).detach())
    assert settings.passes == 13


def test_phi_is_told_apart_and_a_loss_sees_the_model_as_it_is() -> None:
    model, x = Classifier(), images()
    adapter = mo.attach_film(model, ["norm"], dim=4)
    settings = classification_settings(model)
    for phi in (torch.zeros(4), torch.ones(4)):
        with adapter.using(phi.double().requires_grad_()):
            expected = (logits(model, x) + logits(model, x.flip(-1))) / 2
            with settings.applied({"flip": True}):
                torch.testing.assert_close(logits(model, x), expected, rtol=1e-12, atol=1e-12)
                assert not torch.allclose(model(x), expected)  # with gradients
                assert model(x).requires_grad
    assert settings.passes == 4


def test_a_metric_that_sees_probabilities_is_judged_by_the_temperature() -> None:
    model, x = Classifier().float(), images(40).float()
    y = logits(model, x).argmax(1)

    def surprise(labels: Any, probabilities: Any) -> float:
        return float(-torch.from_numpy(probabilities)[torch.arange(40), torch.from_numpy(labels)].log().mean())

    spec = from_callable(surprise, maximize=False, bounds=(0.0, 9.0), scores="probabilities")
    metric, accuracy = model_metric(spec, Split(x, y)), model_metric(METRICS["accuracy"], Split(x, y))
    noticing = Noticing(metric.function)
    metric = Metric(noticing, **metric.settings)
    settings, plain = classification_settings(model, images=False, temperature=True), logits(model, x).double()
    for temperature in (0.25, 0.5, 2.0, 4.0):
        with settings.applied({"temperature": temperature}):
            expected = float(F.cross_entropy(plain / temperature, y))
            assert metric.evaluate(model, "test").value == pytest.approx(expected, abs=1e-6)
            assert accuracy.evaluate(model, "test").value == 1
    assert noticing.runs == settings.passes == 1


def test_a_model_of_named_outputs_has_the_views_of_its_logits() -> None:
    """As a Hugging Face folder has, of whose outputs a hook takes the logits."""

    class Named(nn.Module):
        def __init__(self, plain: nn.Module) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=self.plain(x))

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)).eval()
    named, x, found = Named(plain).eval(), torch.rand(4, 3, 8, 8), []
    named.register_forward_hook(tensor_of)
    for model in (plain, named):
        with torch.no_grad(), classification_settings(model).applied({"flip": True, "crops": 5}):
            found.append(model(x))
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], plain(x))
