"""Embeddings from kept features are those of whole passes, to the last bit, and what is kept is within bounds."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import having
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.parts import part_size
from metricopt_ext.retrieval.config import MetricConfig
from metricopt_ext.retrieval.kept_features import KeptFeatures, embed
from metricopt_ext.retrieval.models import Embedder
from metricopt_ext.retrieval.named_metric import build_metric

CALLS: list[int] = []
FLOATS = 4 * 16 * 16  # features of an image before the last convolution


class Counted(nn.Conv2d):
    """Notes how many images it is called on."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        return super().forward(x)


class Trunk(nn.Module):
    """Two convolutions with norms, and a linear layer."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.conv1, self.norm1 = Counted(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.middle, self.head = middle, nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.norm1(self.conv1(x)))
        return self.head(self.norm2(self.conv2(x)).relu().mean((2, 3)))


IMAGES = torch.randint(256, (200, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def made() -> Callable[..., Any]:
    """Make an embedder with phi in some of its layers."""
    CALLS.clear()

    def make(*layers: str, middle: nn.Module | None = None) -> Any:
        torch.manual_seed(0)
        model = Embedder(Trunk(middle or nn.ReLU()), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)).eval()
        return attach_film(model, list(layers), dim=2)

    return make


@torch.no_grad()
def assert_same(adapter: Any, kept: KeptFeatures, queries: int = 3, seed: int = 0) -> None:
    """Check embeddings at several phi, each of which has others, against whole passes."""
    rng, seen = torch.Generator().manual_seed(seed), list[Tensor]()
    for _ in range(queries):
        with adapter.using(torch.randn(2, generator=rng)) as model:
            seen.append(kept.embed(model))
            assert torch.equal(seen[-1], embed(model, kept.x))
    assert not torch.equal(seen[0], seen[1])


def calls_of(act: Callable[[], Any]) -> int:
    """How often all images went through the first convolution, besides the whole passes of `assert_same`."""
    CALLS.clear()
    act()
    return sum(each for each in CALLS if each > 1) // len(IMAGES)


def test_what_is_before_phi_is_computed_once(made: Callable[..., Any]) -> None:
    adapter, kept = made("trunk.norm2"), KeptFeatures(IMAGES, 1.0)
    assert 1 < len(IMAGES) / part_size(IMAGES) < 3
    assert calls_of(lambda: assert_same(adapter, kept)) == 1 + 3
    assert kept.nbytes == 4 * FLOATS * len(IMAGES)
    with torch.no_grad():  # phi of the parameter, as it is judged at the end
        assert torch.equal(kept.embed(adapter.model), embed(adapter.model, IMAGES))
    assert kept.nbytes == 4 * FLOATS * len(IMAGES)


def test_other_weights_or_statistics_before_phi_have_it_computed_anew(made: Callable[..., Any]) -> None:
    adapter, kept = made("trunk.norm2"), KeptFeatures(IMAGES, 1.0)
    assert_same(adapter, kept)
    trunk = adapter.model.trunk
    for tensor in (trunk.conv1.weight, trunk.norm1.running_mean, adapter.model.mean):
        tensor.detach().add_(0.1)
        assert calls_of(lambda: assert_same(adapter, kept)) == 1 + 3
    trunk.head.weight.detach().add_(0.1)  # after phi
    assert calls_of(lambda: assert_same(adapter, kept)) == 0 + 3


def test_memory_is_bounded_and_one_warning_says_so(made: Callable[..., Any]) -> None:
    part = 4 * FLOATS * part_size(IMAGES)
    adapter, kept = made("trunk.norm2"), KeptFeatures(IMAGES, 1.2 * part / 2**30)
    with pytest.warns(UserWarning, match=having("keep_gib")) as told:
        assert_same(adapter, kept)
    assert len(told) == 1
    assert kept.nbytes == part
    adapter.model.trunk.conv1.weight.detach().add_(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(adapter, kept)  # what other weights gave makes room
    assert kept.nbytes == part


@pytest.mark.parametrize("reason", ["torch.fx", "hooks"])
def test_a_model_that_can_t_be_cut_is_told_of_once(reason: str, made: Callable[..., Any]) -> None:
    adapter, kept = made("trunk.norm2"), KeptFeatures(IMAGES[:8], 1.0)
    trunk = adapter.model.trunk
    if reason == "torch.fx":
        trunk.__class__ = type("Branched", (Trunk,), {"forward": branched})
    else:
        trunk.norm1.register_forward_hook(lambda module, inputs, output: output + 1)
    names = {"torch.fx": ("trunk.norm2", "torch.fx"), "hooks": ("BatchNorm2d", "hooks")}
    with pytest.warns(UserWarning, match=having(*names[reason], "adapter.keep_gib=0")) as told:
        assert_same(adapter, kept)
    assert len(told) == 1
    assert kept.nbytes == 0


def branched(trunk: Any, x: Tensor) -> Tensor:
    """The trunk's forward pass, whose way depends on its input."""
    return Trunk.forward(trunk, x if x.sum() > 0 else -x)


def test_features_that_are_changed_in_place_are_not_kept(made: Callable[..., Any]) -> None:
    middle = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    adapter, kept = made("trunk.middle.2", "trunk.norm2", middle=middle), KeptFeatures(IMAGES, 1.0)
    assert_same(adapter, kept)
    moved = made("trunk.middle", middle=InPlace())
    kept = KeptFeatures(IMAGES, 1.0)
    with pytest.warns(UserWarning, match=r"not kept.*changed in place afterwards") as told:
        assert_same(moved, kept)
    assert len(told) == 1
    assert kept.nbytes == 0


class InPlace(nn.BatchNorm2d):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


def test_a_metric_has_the_same_values(made: Callable[..., Any]) -> None:
    adapter = made("trunk.norm2")
    part = Split(IMAGES, torch.arange(200) % 20)
    whole, kept = (build_metric(MetricConfig(ks=[1]), part, keep_gib=gib) for gib in (0.0, 1.0))
    values = []
    for _ in range(3):
        with adapter.using(torch.randn(2)) as model:
            values.append([float(each.judge(model).cost) for each in (whole, kept)])
            assert values[-1][0] == values[-1][1]
    assert calls_of(lambda: kept.judge(adapter.model)) == 0
