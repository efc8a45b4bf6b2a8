"""A whitening merged into a model: the model alone gives what the post-processing gave, and the rest is said."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

pytest.importorskip("faiss")

import metricopt_ext as mo
from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.errors import AdapterError
from metricopt_ext.retrieval.merge_whitening import merge_whitening, whitening_layer
from metricopt_ext.retrieval.models import Conv4, Embedder
from metricopt_ext.retrieval.post_processing import PostProcessing, Whitening, post_processed

HALF = PostProcessing(whitening=0.5)
LENGTHS = "Lengths are left to the search: torch.nn.functional.normalize(model(x))."


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 5, bias=bias), nn.Identity()
    ).double()


def embedded(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [True, False])
def test_the_model_alone_gives_whitened_embeddings(bias: bool) -> None:
    model, x = network(bias), rand(12, 6, seed=1)
    whitening = Whitening.of(embedded(model, rand(60, 6, seed=0)))
    expected = whitening.applied(embedded(model, x), 0.75)
    modes = [module.training for module in model.train().modules()]
    assert merge_whitening(model, whitening, PostProcessing(whitening=0.75), x[:2]) == (LENGTHS,)
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(embedded(model, x), expected, rtol=1e-12, atol=1e-12)
    assert model[3].out_features == 5
    assert model[3].weight.requires_grad
    assert model(x).dtype == torch.float64
    assert not model[3]._forward_hooks


def test_appended_it_gives_the_same() -> None:
    torch.manual_seed(0)
    model, x = Embedder(Conv4(1, 8, 6, 4)).double().eval(), torch.rand(40, 1, 8, 8, dtype=torch.float64)
    whitening = Whitening.of(embedded(model, x))
    assert_refused(lambda: merge_whitening(model, whitening, HALF, x[:2]), AdapterError, "1", "nn.Sequential")
    appended = nn.Sequential(model, whitening_layer(whitening, 0.5))
    expected = whitening.applied(embedded(model, x), 0.5)
    torch.testing.assert_close(embedded(appended, x), expected, rtol=1e-11, atol=1e-11)
    # Once more, into what was appended.
    assert merge_whitening(appended, Whitening.of(expected), HALF, x[:2]) == (LENGTHS,)


def test_what_a_layer_can_t_do_is_said() -> None:
    model, x = network(), rand(12, 6, seed=1)
    whitening = Whitening.of(embedded(model, rand(60, 6, seed=0)))
    post = PostProcessing(whitening=0.5, augmentation=8)
    before = embedded(model, x)
    told = merge_whitening(model, whitening, post, x)
    assert told == (
        LENGTHS,
        "Database augmentation is of the gallery, once it is embedded: augmented(gallery, 8).",
    )
    expected = post_processed(before, PostProcessing(whitening=0.5), whitening)
    torch.testing.assert_close(normalize(embedded(model, x)), expected, rtol=1e-12, atol=1e-12)
    kept = embedded(model, x)
    assert merge_whitening(model, whitening, PostProcessing(augmentation=4), x) == (
        "Database augmentation is of the gallery, once it is embedded: augmented(gallery, 4).",
    )
    assert torch.equal(embedded(model, x), kept)


def positive() -> nn.Module:
    """Ends with a ReLU that does nothing, until a whitening is before it."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).double()
    with torch.no_grad():
        model[0].bias += 100
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(6, 6).double() for _ in range(2))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())  # type: ignore[no-any-return]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Tied(), ("weights",)),
        (Twice(), ("weights",)),
        (positive(), ("whitening",)),
        (nn.Sequential(network(), nn.Tanh()), ()),
    ],
)
def test_what_can_t_be_merged_is_refused(model: nn.Module, names: tuple[str, ...]) -> None:
    x = rand(60, 6, seed=0)
    before = embedded(model, x)
    assert_refused(lambda: merge_whitening(model, Whitening.of(before), HALF, x[:4]), AdapterError, *names)
    assert torch.equal(embedded(model, x), before)


def test_an_adapter_is_merged_first() -> None:
    model, x = network(), rand(60, 6, seed=0)
    whitening = Whitening.of(embedded(model, x))
    adapter: Any = mo.attach_film(model, ["3"], dim=3)
    assert_refused(lambda: merge_whitening(model, whitening, HALF, x), AdapterError, "phi")
    adapter.merge()
    wrong = Whitening.of(rand(60, 6, seed=5))
    assert_refused(lambda: merge_whitening(model, wrong, HALF, x), AdapterError, "whitening", "6", "outputs", "5")
    assert model[3].out_features == 5
