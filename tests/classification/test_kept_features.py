"""Classifiers whose first layers stay as trained compute what whole ones do."""

import copy

import pytest
import torch
import torchvision
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film, attach_outputs
from metricopt_ext.classification.kept_features import Rest
from metricopt_ext.classification.models import CifarResNet, SmallCNN, TabularMLP
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import ConfigError
from metricopt_ext.methods.starts import reestimate_batchnorm

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
LAYERS = {"conv3": ["norm3"], "stage3": ["stage3.*.norm2"]}


def model_of(first: str) -> nn.Module:
    torch.manual_seed(0)
    model = SmallCNN(3, 4) if first == "conv3" else CifarResNet(8, 4)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return model.eval()


@pytest.fixture
def splits() -> Splits:
    x = torch.rand(13, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    part = Split(x, torch.arange(13) % 4)
    return Splits(part.take(torch.arange(6)), part.take(torch.arange(6, 9)), part, ("a", "b", "c", "d"))


@pytest.mark.parametrize("first", LAYERS)
def test_logits_and_gradient_are_those_of_the_whole_model(first: str, splits: Splits) -> None:
    model = model_of(first)
    rest = Rest(model_of(first), first)
    kept = rest.features(splits)
    found = []
    for each, part in ((model, splits.test), (rest, kept.test)):
        adapter = attach_film(each, LAYERS[first], dim=5, seed=3)
        adapter.set_phi(torch.linspace(-1, 1, 5))
        loss = nn.functional.cross_entropy(each(part.x), part.y)
        loss.backward()
        found.append((each(part.x), adapter.phi.grad, adapter.merged_state_dict()))
    (whole, gradient, weights), (logits, other_gradient, other_weights) = found
    assert torch.equal(logits, whole)
    assert torch.equal(gradient, other_gradient)
    assert gradient.abs().min() > 0
    assert weights.keys() == other_weights.keys()  # the tuned part is written as a whole model
    assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


def test_features_take_the_place_of_inputs_in_every_part(splits: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metricopt_ext.data.parts.CPU_BYTES", 4 * 3 * 16 * 16 * 4)  # of four images
    model = model_of("stage3")
    kept = Rest(model, "stage3").features(splits)
    for name in ("train", "validation", "test"):
        part, before = getattr(kept, name), getattr(splits, name)
        assert torch.equal(part.y, before.y)
        torch.testing.assert_close(part.x, nn.Sequential(*list(model)[:5])(before.x))
    assert kept.class_names == splits.class_names


def test_layers_before_are_frozen_and_not_run(splits: Splits) -> None:
    model = model_of("conv3").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rest = Rest(model, "conv3")
    kept = rest.features(splits)
    assert model.training  # and batch norm's statistics are those of training
    rest(kept.train.x).sum().backward()
    trained = {name for name, weight in rest.named_parameters() if weight.requires_grad}
    assert trained == {"conv3.weight", "norm3.weight", "norm3.bias", "head.weight", "head.bias"}
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"norm3.running_mean", "norm3.running_var", "norm3.num_batches_tracked"}


def test_a_batchnorm_start_changes_only_what_runs(splits: Splits) -> None:
    rest = Rest(model_of("stage3"), "stage3")
    before = copy.deepcopy(rest.state_dict())
    other = reestimate_batchnorm(rest, [rest.features(splits).test.x])
    changed = {name for name, value in other.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"stage3.0.norm{i}.{of}" for i in (1, 2) for of in STATISTICS}


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=4).eval()


@pytest.mark.parametrize("first", ["layer4", "layer4.1", "avgpool", "fc"])
def test_a_model_that_is_no_sequential_is_cut_too(first: str, splits: Splits) -> None:
    model, rest = resnet(), Rest(resnet(), first)
    kept = rest.features(splits)
    found = []
    for each, part in ((model, splits.test), (rest, kept.test)):
        adapter = attach_outputs(each) if first in ("fc", "avgpool") else attach_film(each, "layer4.1.bn2", dim=5)
        adapter.set_phi(torch.linspace(-1, 1, adapter.dim))
        found.append((each(part.x).detach(), adapter.merged_state_dict()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert found[0][1].keys() == found[1][1].keys()
    assert rest.runs("layer4.1.bn2") == (first in ("layer4", "layer4.1"))
    assert not rest.runs("layer3.0.bn1")
    assert rest.runs("fc")


@pytest.mark.parametrize("classes", [1, 3])
def test_a_table_is_kept_too(classes: int) -> None:
    torch.manual_seed(0)
    model, x = TabularMLP(4, outputs=classes).eval(), torch.rand(9, 4)
    part = Split(x, torch.arange(9) % 3)
    kept = (rest := Rest(model, "head")).features(Splits(part, part, part, ("a", "b", "c"))).test.x
    assert torch.equal(rest(kept), model(x))


def test_a_cut_model_is_copied_with_its_layers(splits: Splits) -> None:
    rest = Rest(resnet(), "layer4")
    kept = rest.features(splits).test.x
    copied = copy.deepcopy(rest)
    assert torch.equal(copied(kept), rest(kept))
    with torch.no_grad():
        copied.fc.bias.add_(1)
    torch.testing.assert_close(copied(kept), rest(kept) + 1)


def test_what_cannot_be_kept_is_refused() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.c(self.b(h.relu()) + h)

    assert_refused(lambda: Rest(Skips(), "b"), ConfigError, "adapter.keep_before=b")

    class Branches(Skips):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(x) if x.sum() > 0 else x

    assert_refused(lambda: Rest(Branches(), "c"), ConfigError, "adapter.keep_before=c")
    assert_refused(lambda: Rest(CifarResNet(8), "stage4"), ConfigError, "stage4")
    assert_refused(lambda: Rest(CifarResNet(8), "conv"), ConfigError, "conv")


def test_features_have_a_row_for_each_example(splits: Splits) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).mean((0, 2, 3)))

    assert_refused(lambda: Rest(Mixing(), "head").features(splits), ConfigError, "adapter.keep_before=head")
