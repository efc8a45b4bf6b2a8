"""The predictions of large sets."""

import pytest
import torch

from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.predictions import predict


def test_large_sets_are_predicted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = build_model("tabular_mlp", torch.Size((5,)), 3).eval(), []
    model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    x = torch.randn(10, 5)
    whole = predict(model, x)
    monkeypatch.setattr("metricopt_ext.data.parts.CPU_BYTES", 4 * 5 * 4)  # of four examples of five floats
    torch.testing.assert_close(predict(model, x), whole)
    assert sizes == [10, 4, 4, 2]
