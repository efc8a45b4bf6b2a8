"""Weights that belong to another detector, or to the middle of a finetuning, are refused before anything is run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.modeling import build_model
from torch import nn

from metricopt_ext.detection.detectron2.build import with_film
from metricopt_ext.detection.detectron2.hooks import checkpoint_of
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
from metricopt_ext.detection.detectron2.weights import load_weights
from metricopt_ext.errors import DataError

pytestmark = pytest.mark.detectron2


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Write a model's checkpoint."""

    def write(model: nn.Module) -> str:
        path = tmp_path / "weights.pth"
        path.write_bytes(checkpoint_of(model.state_dict()))
        return str(path)

    return write


def assert_loaded(model: nn.Module, path: str) -> None:
    for name, tensor in torch.load(path)["model"].items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_detector_s_own_weights_are_loaded(tiny_config: Any, saved: Callable[..., str]) -> None:
    path, other = saved(build_model(tiny_config())), build_model(tiny_config())
    load_weights(other, path)
    assert_loaded(other, path)
    adapted = with_film(build_model(tiny_config()), ["fpn"], dim=2, start_std=0.1)
    phi = adapted.metricopt.phi.detach().clone()
    load_weights(adapted, path)
    assert_loaded(adapted, path)
    assert torch.equal(adapted.metricopt.phi, phi)


def test_phi_is_taken_only_where_it_is_asked_for(tiny_config: Any, saved: Callable[..., str]) -> None:
    path = saved(with_film(build_model(tiny_config()), ["fpn"], dim=2, start_std=0.1))
    adapted = with_film(build_model(tiny_config()), ["fpn"], dim=2)
    for model in (adapted, build_model(tiny_config())):
        with pytest.raises(DataError, match=r"weights\.pth holds a phi.* give model_merged\.pth"):
            load_weights(model, path)
    assert not adapted.metricopt.phi.any()
    load_weights(adapted, path, tuned=True)
    assert_loaded(adapted, path)
    for settings in ({"dim": 3}, {"dim": 2, "seed": 1}):
        other = with_film(build_model(tiny_config()), ["fpn"], **settings)
        with pytest.raises(DataError, match=r"(?s)weights\.pth can't be loaded: .*has another dimension or"):
            load_weights(other, path, tuned=True)


def test_another_detector_s_weights_are_refused(tiny_config: Any, saved: Callable[..., str]) -> None:
    path = saved(build_model(tiny_config()))
    wider = tiny_config("fpn", "BN", "MODEL.FPN.OUT_CHANNELS", 32)
    message = (
        r"weights\.pth is another detector's: .* has shape \(16,.*\) in place of \(32,.*\), and \d+ more do not fit"
    )
    with pytest.raises(DataError, match=message):
        load_weights(build_model(wider), path)
    backbone = saved(build_model(tiny_config()).backbone.bottom_up)
    with pytest.raises(DataError, match=r"is another detector's: .* is missing"):
        load_weights(build_model(tiny_config()), backbone)


def test_a_detector_to_be_trained_takes_what_fits(tiny_config: Any, saved: Callable[..., str]) -> None:
    more_classes = build_model(tiny_config("fpn", "BN", "MODEL.ROI_HEADS.NUM_CLASSES", 7))
    cfg = tiny_config("fpn", "BN", "MODEL.WEIGHTS", saved(more_classes))
    with pytest.raises(DataError, match=r"box_predictor\..* has shape"):
        Detectron2Toolkit(cfg).build(2, seed=0)
    model = Detectron2Toolkit(cfg, whole_weights=False).build(2, seed=0)
    assert torch.equal(model.backbone.fpn_output2.weight, more_classes.backbone.fpn_output2.weight)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_files_that_are_no_checkpoints(
    content: bytes | None, tiny_config: Any, saved: Callable[..., str], tmp_path: Path
) -> None:
    if content is None:
        whole = Path(saved(build_model(tiny_config()))).read_bytes()
        content = whole[: len(whole) // 2]
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"weights\.pth can't be loaded"):
        load_weights(build_model(tiny_config()), str(path))
    with pytest.raises(DataError, match=r"nowhere\.pth can't be loaded"):
        load_weights(build_model(tiny_config()), "nowhere.pth")
