"""The AP loss in the box head of Detectron2's detectors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage

from metricopt_ext.detection.ap_loss import ap_loss
from metricopt_ext.detection.detectron2.ap_loss import use_ap_loss
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import ConfigError

pytestmark = pytest.mark.detectron2


def examples(data: DetectionSet) -> list[Example]:
    return [Example(image.load(), image) for image in data.images]


@pytest.mark.parametrize("kind", ["fpn", "c4"])
def test_the_loss_is_the_ap_loss_of_the_predictor_s_log_probabilities(
    kind: str, tiny_config: Any, squares: Callable[..., DetectionSet]
) -> None:
    toolkit, plain = Detectron2Toolkit(tiny_config(kind), "ap"), Detectron2Toolkit(tiny_config(kind))
    model, other = toolkit.build(2, seed=1), plain.build(2, seed=1)
    assert model.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    batch = examples(squares(2))
    seen: list[Any] = []
    model.roi_heads.box_predictor.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    losses = losses_of(toolkit, model, batch)
    proposals = seen_proposals(model)
    theirs = losses_of(plain, other, batch)
    expected = ap_loss(seen[0].log_softmax(1)[:, :2], proposals)
    assert set(losses) == set(theirs)
    torch.testing.assert_close(losses["loss_cls"], expected)
    assert not torch.isclose(losses["loss_cls"], theirs["loss_cls"])
    for name in ("loss_box_reg", "loss_rpn_cls", "loss_rpn_loc"):
        torch.testing.assert_close(losses[name], theirs[name])


def losses_of(toolkit: Detectron2Toolkit, model: nn.Module, batch: list[Example]) -> Any:
    inputs = [{**toolkit._input(example), "instances": toolkit._targets(example)} for example in batch]
    torch.manual_seed(0)
    sample = model.roi_heads.label_and_sample_proposals

    def remember(proposals: Any, targets: Any) -> Any:
        model.roi_heads.sampled = sample(proposals, targets)
        return model.roi_heads.sampled

    with pytest.MonkeyPatch.context() as patched, EventStorage():
        patched.setattr(model.roi_heads, "label_and_sample_proposals", remember)
        return model.train()(inputs)


def seen_proposals(model: Any) -> torch.Tensor:
    """The classes of the sampled proposals, -1 for background."""
    classes = torch.cat([each.gt_classes for each in model.roi_heads.sampled])
    return torch.where(classes == 2, -1, classes)


def test_other_predictors_and_losses_are_refused(tiny_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"classification_loss='focal'.*'ap'"):
        Detectron2Toolkit(tiny_config(), classification_loss="focal")
    with pytest.raises(ConfigError, match=r"the AP.*detector has None"):
        use_ap_loss(nn.Linear(1, 1))
    cascade = build_model(tiny_config("fpn", "BN", "MODEL.ROI_HEADS.NAME", "CascadeROIHeads",
                                      "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", True))  # fmt: skip
    with pytest.raises(ConfigError, match="this detector has ModuleList"):
        use_ap_loss(cascade)
