"""A detection experiment's test error, with detectors whose AP50 is known on any images."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("torchvision")

from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.adapters.start import Start
from metricopt_ext.detection.config import DataConfig, DetectionConfig, DetectorAdapterConfig, ModelConfig
from metricopt_ext.detection.experiment import DetectionExperiment
from metricopt_ext.detection.records import Detections, DetectionSet
from metricopt_ext.detection.task import load_examples
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


class Knowing:
    """Finds all objects of the first images, as many as phi says, and nothing else."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.place = {example: i for i, example in enumerate(examples)}

    def detect(self, model: Any, batch: Sequence[Example]) -> list[Detections]:
        seen = int(model.metricopt.value()[0])
        found = [(example.truth, self.place[example] < seen) for example in batch]
        return [
            Detections(truth.boxes[: len(truth.labels) * known], torch.full((len(truth.labels) * known,), 0.5),
                       truth.labels[: len(truth.labels) * known])
            for truth, known in found
        ]  # fmt: skip


def test_the_error_of_an_ap50s_difference_is_that_of_images(squares: Callable[..., DetectionSet]) -> None:
    """Without false detections, VOC's AP50 is the share of objects found: here of images with one object each."""
    images = [image for image in squares(160, seed=1).images if image.labels.tolist() == [0]]
    truth = DetectionSet(("red", "green"), images)
    examples = load_examples(truth)
    model = attach_input_bias(nn.Linear(2, 3), dim=2)
    metric = Metric(lambda: 0.0, maximize=True)
    experiment = object.__new__(DetectionExperiment)  # no detector needs to be trained
    experiment.task = FinetuneTask(model, loss=lambda *_: None, batches=lambda *_: None, metric=metric)
    experiment.config, experiment.seed = DetectionConfig(), 5
    experiment.config.metric.definition = "voc"
    experiment.splits = SimpleNamespace(test=examples, classes=truth.classes)
    experiment.used = Knowing(examples)
    n = len(images)
    assert n > 30
    all_found, some_found = (Start(torch.tensor([float(seen), 0.0])) for seen in (n, n // 4))
    share = (n // 4) / n
    error = experiment.test_error(all_found, some_found)
    assert error == pytest.approx(math.sqrt(share * (1 - share) / n), rel=0.2)  # 200 resamples: ± 5%
    assert experiment.test_error(some_found, some_found) == 0


@pytest.mark.slow
def test_a_soup_is_a_start_where_it_is_asked_for(tmp_path: Path) -> None:
    config = DetectionConfig(
        data=DataConfig(name="scenes", images=[8, 4, 4]),
        model=ModelConfig(name="small_fpn", min_size=64, max_size=64, proposals=20, steps=10, batch_size=2, lr=0.01),
        adapter=DetectorAdapterConfig(dim=2),
        starts=["soup"],
        device="cpu",
    )
    experiment = DetectionExperiment(config, tmp_path, 3)
    base = {name: value.clone() for name, value in experiment.task.adapter.base_state_dict().items()}
    start = experiment.starts()["soup"]
    files = sorted((tmp_path / "soup").glob("finetune-?.safetensors"))
    states = [load_file(file) for file in files]
    assert len(states) == 6
    for name, value in start.tensors.items():
        assert torch.equal(value, torch.stack([state[name].double() for state in states]).mean(0).float()), name
    assert len(start.tensors) > 10
    now = experiment.task.adapter.base_state_dict()
    assert all(torch.equal(value, now[name]) for name, value in base.items())
    assert experiment.training().steps == 10
