"""What models gave, kept within a limit, by all that they compute with."""

import copy

import torch
from torch import Tensor, nn

import metricopt_ext as mo
from metricopt_ext.tasks.kept_by_model import SMALL, Digest, KeptByModel, digest_of


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 80), nn.BatchNorm1d(80), nn.Linear(80, 80))  # one tensor of 6,400 entries


def test_the_latest_are_kept_within_the_limit() -> None:
    kept, made = KeptByModel(limit=3 * 40), list[str]()

    def make(name: str, size: int = 10) -> Tensor:
        made.append(name)
        return torch.full((size,), float(len(made)))

    for name in "abcab":
        kept.of(name, lambda name=name: make(name))
    assert made == ["a", "b", "c"]
    kept.of("d", lambda: make("d"))  # c is the oldest
    for name in "abd":
        kept.of(name, lambda name=name: make(name))
    assert made == ["a", "b", "c", "d"]
    kept.of("c", lambda: (make("c", 5), {"more": make("c", 5)}))  # 40 bytes in a tuple and a dict
    assert kept.of("c", lambda: (make("no"), {}))[0].tolist() == [5.0] * 5
    kept.of("a", lambda: make("a"))
    assert made == ["a", "b", "c", "d", "c", "c", "a"]
    for _ in range(2):
        assert len(kept.of("large", lambda: make("large", 31))) == 31  # 124 bytes: never kept, and nothing else is lost
    kept.of("a", lambda: make("a"))
    assert made[-3:] == ["a", "large", "large"]
    assert kept.passes == 8
    assert kept.of("aside", lambda: 1, passes=0) == 1
    kept.clear()
    kept.of("a", lambda: make("a"))
    assert kept.passes == 9


def test_the_digest_tells_whatever_a_model_computes_with() -> None:
    model = network()
    assert model[2].weight.numel() > SMALL > model[0].weight.numel()
    adapter = mo.attach_film(model, ["1"], dim=3)
    digest, seen = Digest(model), list[str]()

    def changed() -> None:
        assert digest() == digest()
        for told in (digest(), digest_of(model)):
            assert told not in seen
            seen.append(told)

    changed()
    with torch.no_grad():
        model[2].weight[5, 5] += 1  # of a large tensor
        changed()
        model[0].bias[0] += 1
        changed()
        model[1].running_mean[3] += 1
        changed()
        model[2].weight.data += 1  # leaves no trace
        changed()
    adapter.set_phi(torch.ones(3))
    changed()
    with adapter.using(torch.tensor([1.0, 2.0, 3.0])):
        changed()
    assert seen[-4] == digest()
    assert digest_of(model) == digest_of(copy.deepcopy(model))
    model[2].weight = nn.Parameter(model[2].weight.detach() + 1)
    changed()
    assert digest_of(model, nn.Identity()) != digest_of(model, nn.Linear(2, 2))
