"""The loss that a config names: what it can't work with is refused before anything is trained."""

from typing import Any

import pytest
import torch

pytest.importorskip("pytorch_metric_learning")

from metricopt_ext.errors import ConfigError
from metricopt_ext.retrieval.config import LossConfig
from metricopt_ext.retrieval.named_loss import build_loss


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("recall", {"weight": "log1p"}, r"loss.*weight is 'log1p'.*leave it out"),
        ("contrastive", {"distance": "cosine"}, r"loss\.params: contrastive.*'cosine'.*leave it out"),
        ("contrastive", {"reducer": "mean"}, r"loss: contrastive.*'mean'.*leave it out"),
        ("triplet_margin", {"margin": [0.1]}, r"loss\.params: triplet_margin.*\[0\.1\]"),
        ("proxy_anchor", {"distance": "cosine"}, r"loss\.params: proxy_anchor.*'cosine'.*leave it out"),
        ("cross_batch_memory", {"loss": "contrastive", "params": {"distance": "l2"}}, r"contrastive.*'l2'.*leave it"),
        ("vic_reg", {}, r"loss\.params: vic_reg with \{\}"),
    ],
)
def test_a_loss_is_tried_before_anything_is_trained(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_loss(LossConfig(name, params))


@pytest.mark.parametrize("name", ["fast_ap", "triplet_margin", "dynamic_soft_margin"])
def test_what_is_tried_is_a_copy_and_the_global_stream_stays(name: str) -> None:
    before = torch.get_rng_state()
    loss = build_loss(LossConfig(name))
    assert torch.equal(torch.get_rng_state(), before)
    batch = torch.eye(4)[[0, 0, 1, 1, 2, 2]], torch.tensor([0, 0, 1, 1, 2, 2])
    again = build_loss(LossConfig(name))
    assert float(loss(torch.nn.Identity(), batch)) == float(again(torch.nn.Identity(), batch))
