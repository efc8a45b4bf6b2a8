"""Outputs are made once, bounded in memory; a model's digest tells all that its modules hold."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.utils.kept_outputs import KeptOutputs, digest_of, digest_of_model

GIB = 2**30


def numbers(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def test_what_is_kept_if_there_is_room_pushes_nothing_out_and_stays() -> None:
    kept, made = KeptOutputs(gib=250 / GIB), list[str]()

    def ask(key: str, if_room: bool = False) -> None:
        kept.of(key, lambda: made.append(key) or numbers(100), if_room=if_room)  # type: ignore[func-returns-value]

    for key, if_room in (("a", True), ("b", True), ("c", False), ("a", True)):
        ask(key, if_room)
    assert made == ["a", "b", "c"]  # b would fill more than half
    assert [kept.get(key) is not None for key in "cba"] == [True, False, True]
    ask("d")  # c was used longest ago
    assert [kept.get(key) is not None for key in "acd"] == [True, False, True]
    whole = KeptOutputs(gib=250 / GIB, room=1.0)
    for key in "abc":
        whole.of(key, lambda: numbers(100), if_room=True)
    assert [whole.get(key) is not None for key in "abc"] == [True, True, False]
    half, large = KeptOutputs(gib=0.01), int(0.006 * GIB)
    half.of("large", lambda: numbers(large), if_room=True)
    assert_warned(lambda: half.of("large", lambda: numbers(large), if_room=True), "outputs", "0.005", "GiB")
    assert_refused(lambda: KeptOutputs(room=2), ValueError, "room", "2", "0", "1")


@pytest.mark.filterwarnings("ignore:kept outputs fill")
def test_a_pass_goes_over_each_part_of_the_data_once() -> None:
    kept = KeptOutputs(gib=0)

    def go(view: str, *parts: str) -> int:
        for part in parts:
            assert len(kept.of(view, lambda: numbers(1), part=part)) == 1
        return kept.passes

    assert go("a", "1", "2", "3") == 1
    assert go("b", "1", "2") == 2  # of another view or model
    assert go("a", "4") == 2  # goes on
    assert go("a", "2", "3") == 3  # again
    assert go("a", "2") == 4
    assert go("a", "3", "4") == 4
    for view in range(70):
        go(str(view), "1")
    assert go("a", "5") == 75  # long ago
    assert kept.of("a", lambda: numbers(2), part="6", by_pass=False).tolist() == [0, 0]
    assert kept.passes == 75


class Net(nn.Module):
    norm: Any
    own: Any

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("own", torch.ones(2), persistent=False)
        self.counts = {"testing": 5}
        self.held: Tensor | None = None
        self.threshold = 0.5


def test_the_digest_changes_with_all_that_modules_hold_and_comes_back_with_it() -> None:
    net = Net()
    first = digest_of_model(net, ["threshold"])
    assert len(first) == 80
    assert digest_of_model(copy.deepcopy(net), ["threshold"]) == first

    def changes() -> bool:
        changed = digest_of_model(net, ["threshold"]) != first
        assert digest_of_model(net, ["threshold"]) == digest_of_model(copy.deepcopy(net), ["threshold"])
        return changed

    net.threshold = 0.7
    assert not changes()
    with torch.no_grad():
        net.norm.weight[1] = 2.0
        assert changes()
        net.norm.weight[1] = 1.0
        assert not changes()
        net.norm.running_mean += 1.0
        assert changes()
        net.norm.running_mean -= 1.0
        net.own[0] = 3.0
        assert changes()
        net.own[0] = 1.0
    net.counts = {"testing": 6}
    assert changes()
    net.counts = {"testing": 5}
    net.norm.eps = 1e-4
    assert changes()
    net.norm.eps = 1e-5
    assert not changes()
    net.held = torch.zeros(2)
    assert changes()
    del net.norm
    assert changes()
    assert digest_of_model(net) != digest_of_model(net, ["threshold"])


def test_the_digest_notices_changes_without_a_trace() -> None:
    torch.manual_seed(0)
    net, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(100, 100)), set()
    for tensor in (net[1].weight, net[0].bias, net[0].weight):
        seen.add(digest_of_model(net))
        tensor.data += 1
        seen.add(digest_of_model(net))
        tensor.data[0] *= 2
    seen.add(digest_of_model(net))
    assert len(seen) == 7


def test_the_digest_tells_phi_in_use() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    adapter, seen = mo.attach_film(net, ["1"], dim=3), list[str]()
    for phi in (torch.zeros(3), torch.ones(3), torch.zeros(3)):
        with adapter.using(phi.requires_grad_()):
            seen.append(digest_of_model(net))
    assert seen[0] == seen[2] != seen[1]
    adapter.set_phi(torch.ones(3))
    assert digest_of_model(net) not in seen


def test_inputs_are_told_apart_by_content_shape_type_and_order() -> None:
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    several = [[a, b], [b, a], [a], [a, b.double()], [a, b.T], [a.reshape(3, 2), b], [a, b, b]]
    assert len({digest_of(each) for each in several}) == len(several)
    assert digest_of([a, b]) == digest_of([a.clone(), b.T.contiguous().T])
