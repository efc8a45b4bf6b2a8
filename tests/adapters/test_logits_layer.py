"""Which layer is taken for the one that gives the logits; see tests/adapters/test_attach.py for those refused."""

from torch import nn

from metricopt_ext.adapters.attach import attach_outputs


def test_the_last_linear_layer_gives_the_logits() -> None:
    model = nn.ModuleDict(
        {"first": nn.Linear(4, 4), "last": nn.Linear(4, 2), "norm": nn.LayerNorm(2), "attention": attention(2)}
    )
    assert attach_outputs(model).layers == ["last"]  # attention's own projection is no layer


def attention(width: int) -> nn.Module:
    return nn.MultiheadAttention(width, 1)
