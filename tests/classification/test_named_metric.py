"""The metrics that configs name."""

from pathlib import Path
from typing import Any

import pytest
import sklearn.metrics
import torch

from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.named_metric import build_metric, try_metric
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.classification.targets import Target
from metricopt_ext.utils.config import load_config

DIGITS = Path(__file__).parents[2] / "configs" / "classification" / "digits.yaml"


def config_of(*overrides: str, file: Path = DIGITS) -> ClassificationConfig:
    return load_config(ClassificationConfig, file, ["model.epochs=1", "adapter.dim=3", "device=cpu", *overrides])


WINE = ["data.name=wine", "data.fractions=[0.5,0.2,0.3]", "data.standardise=true", "shift.kind=none"]
MLP = ["model.name=tabular_mlp", "adapter.kind=input_bias", "adapter.layers=[]"]


@pytest.mark.parametrize(
    ("metric", "reference"),
    [
        (
            ["metric.name=sklearn.metrics:f1_score", "metric.kwargs.average=macro"],
            lambda y, logits: sklearn.metrics.f1_score(y, logits.argmax(1), average="macro"),
        ),
        (
            ["metric.name=torchmetrics.classification:MulticlassF1Score", "metric.kwargs={num_classes: 3}"],
            lambda y, logits: sklearn.metrics.f1_score(y, logits.argmax(1), average="macro"),
        ),
        (
            [
                "metric.name=sklearn.metrics:roc_auc_score",
                "metric.scores=probabilities",
                "metric.kwargs.multi_class=ovr",
            ],
            lambda y, logits: sklearn.metrics.roc_auc_score(y, logits.double().softmax(1), multi_class="ovr"),
        ),
        (["metric.name=f1"], lambda y, logits: sklearn.metrics.f1_score(y, logits.argmax(1), average="macro")),
    ],
)
def test_arguments_of_metrics(metric: list[str], reference: Any) -> None:
    config = config_of(*WINE, *MLP, *metric)
    part = load_splits(config, 0).validation
    try_metric(config.metric, part, Target("classes", 3))
    torch.manual_seed(0)
    model = build_model("tabular_mlp", torch.Size((13,)), 3).eval()
    found = model_metric(build_metric(config.metric), part).cost(model, "test")
    with torch.no_grad():
        assert 1 - found == pytest.approx(reference(part.y, model(part.x)))
