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
    finetuned = with_film(build_model(tiny_config()), ["fpn"], dim=2, start_std=0.1)
    path = saved(nn.ModuleDict({"module": finetuned}))  # as of several processes
    with pytest.raises(DataError, match="holds a phi"):
        load_weights(build_model(tiny_config()), path)
    path = saved(finetuned)
    adapted = with_film(build_model(tiny_config()), ["fpn"], dim=2)
    for model in (adapted, build_model(tiny_config())):
        with pytest.raises(DataError, match=r"weights\.pth.*give model_merged\.pth"):
            load_weights(model, path)
    assert not adapted.metricopt.phi.any()
    load_weights(adapted, path, tuned=True)
    assert_loaded(adapted, path)
    for settings in ({"dim": 3}, {"dim": 2, "seed": 1}):
        other = with_film(build_model(tiny_config()), ["fpn"], **settings)
        with pytest.raises(DataError, match=r"(?s)weights\.pth.*layers, dimension"):
            load_weights(other, path, tuned=True)


def test_another_detector_s_weights_are_refused(tiny_config: Any, saved: Callable[..., str]) -> None:
    path = saved(build_model(tiny_config()))
    wider = tiny_config("fpn", "BN", "MODEL.FPN.OUT_CHANNELS", 32)
    message = (
        r"weights\.pth belongs to another detector: .* has shape \(16,.*\) instead of \(32,.*\), and \d+ more do not"
    )
    with pytest.raises(DataError, match=message):
        load_weights(build_model(wider), path)
    backbone = saved(build_model(tiny_config()).backbone.bottom_up)
    with pytest.raises(DataError, match=r"belongs.*detector: .* is missing"):
        load_weights(build_model(tiny_config()), backbone)


def test_a_deeper_detector_s_weights_are_refused(tiny_config: Any, saved: Callable[..., str]) -> None:
    """All that a ResNet-18 has, a ResNet-34 has too, in the same shapes."""
    path = saved(build_model(tiny_config("fpn", "BN", "MODEL.RESNETS.DEPTH", 34)))
    with pytest.raises(DataError, match=r"another detector.*unknown, and \d+"):
        load_weights(build_model(tiny_config()), path)


def test_parts_that_the_detector_does_not_have_are_left_out(tiny_config: Any, saved: Callable[..., str]) -> None:
    with_masks = build_model(tiny_config("fpn", "BN", "MODEL.MASK_ON", True))
    for norm in ("BN", "FrozenBN"):  # which has no num_batches_tracked
        model = build_model(tiny_config("fpn", norm))
        load_weights(model, saved(with_masks))
        assert torch.equal(model.backbone.fpn_output2.weight, with_masks.backbone.fpn_output2.weight)


def test_a_detector_to_be_trained_takes_what_fits(tiny_config: Any, saved: Callable[..., str]) -> None:
    more_classes = build_model(tiny_config("fpn", "BN", "MODEL.ROI_HEADS.NUM_CLASSES", 7))
    cfg = tiny_config("fpn", "BN", "MODEL.WEIGHTS", saved(more_classes))
    with pytest.raises(DataError, match=r"box_predictor\..* has shape"):
        Detectron2Toolkit(cfg).build(2, seed=0)
    model = Detectron2Toolkit(cfg, strict_weights=False).build(2, seed=0)
    assert torch.equal(model.backbone.fpn_output2.weight, more_classes.backbone.fpn_output2.weight)


@pytest.mark.parametrize("where", ["ema_state", "trainer.hooks.EMAHook"])  # of the model's own, or of a hook
def test_of_weights_and_their_average_one_must_be_named(where: str, tiny_config: Any, tmp_path: Path) -> None:
    model, ema = build_model(tiny_config()), build_model(tiny_config())
    average = {f"module.{name}": each for name, each in ema.named_parameters()}  # without BatchNorm's statistics
    content: Any = average
    for key in reversed(where.split(".")):
        content = {key: content}
    path = str(tmp_path / "model_final.pth")
    torch.save({"model": model.state_dict(), "iteration": 3, **content}, path)
    loaded = build_model(tiny_config())
    before = {name: each.clone() for name, each in loaded.state_dict().items()}
    message = rf"has the weights of the model, and others .*{where}.*: say which .* by \?entry={where} or \?entry=model"
    for strict in (True, False):
        with pytest.raises(DataError, match=message):
            load_weights(loaded, path, strict=strict)
    with pytest.raises(DataError, match=rf"entry=ema.*\['model', '{where}'\]"):
        load_weights(loaded, f"{path}?entry=ema")
    assert all(torch.equal(each, before[name]) for name, each in loaded.state_dict().items())
    for entry, source in ((where, ema), ("model", model)):
        load_weights(loaded, f"{path}?entry={entry}")
        for name, each in loaded.named_parameters():
            assert torch.equal(each, source.get_parameter(name))
        for name, each in loaded.named_buffers():
            assert torch.equal(each, model.get_buffer(name))
