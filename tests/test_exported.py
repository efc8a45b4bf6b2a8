"""A merged model is an ordinary one: it goes through torch.export and ONNX with equal outputs, for each host."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.classification.models import SmallCNN
from metricopt_ext.detection.torchvision_models import build_small
from metricopt_ext.retrieval.models import build_model
from metricopt_ext.utils.seeding import generator

onnxruntime = pytest.importorskip("onnxruntime")

# What two compilers of the same float32 arithmetic may differ by, in units of the outputs' largest.
CLOSE = 1e-5


SMALL = {
    "classification": lambda: (SmallCNN(1, 10), "norm*", 8),
    "retrieval": lambda: (build_model("conv4", torch.Size([1, 28, 28]), 16, width=8), "trunk.*", 28),
}


def merged(model: nn.Module, layers: str) -> nn.Module:
    """Return a model into which a phi far from 0 was merged, without gradients."""
    model.eval()
    adapter = attach_film(model, layers=layers, dim=8)
    with torch.no_grad():
        adapter.phi.copy_(torch.randn(8, generator=generator(0, "exported")))
    adapter.merge()
    return model.requires_grad_(False)


def run_onnx(model: bytes, x: Tensor) -> list[npt.NDArray[Any]]:
    """Return what a model computes in the ONNX runtime."""
    session = onnxruntime.InferenceSession(model)
    found: list[npt.NDArray[Any]] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("host", ["classification", "retrieval"])
def test_a_network_of_any_batch_is_exported(host: str) -> None:
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    network, layers, side = SMALL[host]()
    model = merged(network, layers)
    x, other = torch.randn(2, 1, side, side), torch.randn(5, 1, side, side)
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model, (x,), dynamic_shapes=shapes)
    assert torch.equal(exported.module()(other), model(other))
    program = torch.onnx.export(exported, (x,), dynamo=True, verbose=False)
    assert program is not None
    (found,) = run_onnx(program.model_proto.SerializeToString(), other)
    expected = model(other).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the tracer
def test_a_detector_is_exported() -> None:
    """By ONNX's tracer; torch.export does not take torchvision's detectors, whose NMS looks at how many there are."""
    torch.manual_seed(0)
    model = merged(build_small(3, 96, 96, 0.0, 16, 32), "roi_heads.box_head.*")
    model.roi_heads.detections_per_img = 4
    for layer in (model.rpn.head.cls_logits, model.roi_heads.box_predictor.cls_score):
        layer.weight.mul_(10)  # scores without near-ties, which two programs may order otherwise
    x = torch.rand(3, 96, 96)
    expected = model([x])[0]
    assert len(expected["scores"]) == 4
    assert expected["scores"].diff().abs().min() > 1e-4
    file = io.BytesIO()
    torch.onnx.export(model, ([x],), file, dynamo=False, opset_version=17)
    for name, found in zip(("boxes", "labels", "scores"), run_onnx(file.getvalue(), x), strict=True):
        np.testing.assert_allclose(found, expected[name].numpy(), rtol=0, atol=CLOSE * float(expected[name].max()))
