"""The loss that a config names: what it can't work with is refused before anything is trained."""

from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused

pytest.importorskip("pytorch_metric_learning")

from metricopt_ext.errors import ConfigError
from metricopt_ext.retrieval.config import LossConfig
from metricopt_ext.retrieval.named_loss import build_loss


@pytest.mark.parametrize(
    ("name", "params", "names"),
    [
        ("smooth_ap", {}, ("loss.name", "smooth_ap", "MODULE:FUNCTION")),
        ("contrastive", {"distance": "cosine"}, ("loss.params", "contrastive", "cosine")),
        ("contrastive", {"reducer": "mean"}, ("contrastive", "mean")),
        ("triplet_margin", {"margin": [0.1]}, ("loss.params", "triplet_margin", "0.1")),
        ("vic_reg", {}, ("loss.params", "vic_reg")),
    ],
)
def test_a_loss_is_tried_before_anything_is_trained(name: str, params: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: build_loss(LossConfig(name, params)), ConfigError, *names)


@pytest.mark.parametrize("name", ["fast_ap", "triplet_margin", "dynamic_soft_margin"])
def test_what_is_tried_is_a_copy_and_the_global_stream_stays(name: str) -> None:
    before = torch.get_rng_state()
    loss = build_loss(LossConfig(name))
    assert torch.equal(torch.get_rng_state(), before)
    batch = torch.eye(4)[[0, 0, 1, 1, 2, 2]], torch.tensor([0, 0, 1, 1, 2, 2])
    again = build_loss(LossConfig(name))
    assert float(loss(torch.nn.Identity(), batch)) == float(again(torch.nn.Identity(), batch))
