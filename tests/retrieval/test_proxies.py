"""Losses with weights for each class, or with a memory: of the model's embeddings, and constants for phi."""

from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.loss_and_miner_utils import get_all_pairs_indices, remove_self_comparisons
from torch.nn.functional import normalize

from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.retrieval import proxies
from metricopt_ext.retrieval.build import train
from metricopt_ext.retrieval.config import LossConfig, RetrievalConfig
from metricopt_ext.retrieval.named_loss import build_loss
from metricopt_ext.retrieval.proxies import ProxyLoss, fitted_proxies
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.seeding import generator

NAMES = [
    "proxy_anchor",
    "proxy_nca",
    "arc_face",
    "cos_face",
    "normalized_softmax",
    "soft_triple",
    "sub_center_arc_face",
]


def drawn(classes: list[int], n: int = 60) -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(classes[0])
    y = torch.tensor(classes)[torch.arange(n) % len(classes)]
    return normalize(torch.randn(n, 5, generator=draw) + 2 * torch.eye(5)[y % 5]), y


def test_labels_of_each_part_have_the_proxies_of_their_classes() -> None:
    (x, y), (other, theirs) = drawn([7, 2, 40]), drawn([5, 11])
    loss = ProxyLoss(lambda c, d: losses.ProxyAnchorLoss(c, d), [y, theirs], 5, seed=3)
    sizes = [tuple(each.proxies.shape) for each in loss.losses]
    assert sizes == [(3, 5), (2, 5)]
    numbers = torch.tensor([[2, 7, 40].index(label) for label in y.tolist()])
    assert loss(x, y) == loss.losses[0](x, numbers)
    assert loss(other, theirs) == loss.losses[1](other, (theirs == 11).long())
    assert_refused(lambda: loss(torch.cat([x, other]), torch.cat([y, theirs])), DataError, "2", "5", "7", "11", "40")
    again = ProxyLoss(lambda c, d: losses.ProxyAnchorLoss(c, d), [y, theirs], 5, seed=3)
    assert again(x, y) == loss(x, y)


def test_proxies_lie_where_the_loss_is_least() -> None:
    x, y = drawn([0, 1, 2, 3])
    loss = fitted_proxies(lambda c, d: losses.NormalizedSoftmaxLoss(c, d, temperature=0.5), [(x, y)], seed=0)
    assert not any(weight.requires_grad for weight in loss.parameters())
    weights = loss.losses[0].W.clone().requires_grad_()  # a convex function of the scaled proxies has one minimum
    logits = x @ normalize(weights, dim=0) / 0.5
    gradient = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), weights)[0]
    start = torch.stack([x[y == each].mean(0) for each in range(4)], 1).requires_grad_()
    before = torch.nn.functional.cross_entropy(x @ normalize(start, dim=0) / 0.5, y)
    assert gradient.norm() < 0.01
    assert torch.nn.functional.cross_entropy(logits, y) < before


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_with_proxies_leads_phi(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "STEPS", 3)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 5)
    parts = [Split(*drawn(classes)) for classes in ([0, 1, 2], [3, 4])]
    before = [weight.clone() for weight in model.parameters()]
    loss = build_loss(LossConfig(name), model, parts, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for part in parts:
        loss(model, (part.x, part.y)).backward()
        assert model.weight.grad.norm() > 0


def test_an_embedder_is_trained_together_with_its_proxies() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 5)
    x, y = drawn([0, 1, 2])
    overrides = ["data.name=digits", "model.name=conv4", "model.epochs=8", "model.lr=0.02"]
    overrides += ["loss.name=normalized_softmax", "loss.classes=3", "loss.samples=4"]
    config = load_config(RetrievalConfig, None, overrides)
    loss = build_loss(config.loss, model, [Split(x, y)])
    before = float(loss(model, (x, y)).detach())
    train(model, Split(x, y), config, seed=0)
    assert not any("loss" in name for name in model.state_dict())
    after = build_loss(config.loss, model, [Split(x, y)])
    assert float(after(model, (x, y)).detach()) < before


def test_a_memory_has_the_model_s_embeddings_of_the_first_part() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 5)
    parts = [Split(*drawn(classes)) for classes in ([0, 1, 2], [3, 4])]
    config = LossConfig("cross_batch_memory", {"loss": "contrastive", "memory_size": 48}, classes=3, samples=4)
    loss = build_loss(config, model, parts, seed=1)
    x, y = parts[0].x[:12], parts[0].y[:12]
    value = loss(model, (x, y))
    assert loss(model, (x, y)) == value  # it stays as it was
    with torch.no_grad():
        order = torch.randperm(60, generator=generator(1, "memory"))[:48]
        memory, labels = model(parts[0].x)[order].clone(), parts[0].y[order].clone()
        memory[:12], labels[:12] = model(x), y  # a step's batch takes the place of the oldest
        pairs = get_all_pairs_indices(y, labels)
        own = remove_self_comparisons(pairs, torch.arange(12), 48)
    assert value == losses.ContrastiveLoss()(model(x), y, own, memory, labels)
    value.backward()
    assert model.weight.grad.norm() > 0


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({}, ("cross_batch_memory", "loss.params", "memory_size", "1024")),
        ({"loss": "contrastive", "memory_size": 63}, ("memory_size", "63", "64")),
        ({"loss": "contrastive", "size": 9}, ("loss", "memory_size", "size")),
        ({"loss": "proxy_anchor"}, ("proxy_anchor",)),
        ({"loss": "fast_ap"}, ("fast_ap",)),
        ({"loss": "contrastive", "params": {"margin": 1}}, ("contrastive", "margin", "1")),
    ],
)
def test_memories_that_can_not_be_are_refused(params: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: build_loss(LossConfig("cross_batch_memory", params)), ConfigError, *names)
