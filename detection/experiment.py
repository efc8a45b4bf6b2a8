"""One seed of a detection run: train a detector, finetune it for AP50, and run the rivals."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from metricopt_ext.detection.build import attach, build_toolkit, check_definition, detector, remembering
from metricopt_ext.detection.config import DetectionConfig
from metricopt_ext.detection.data import Splits, image_halves, load_splits
from metricopt_ext.detection.metric import ap50_metric, in_batches, truth_of
from metricopt_ext.detection.pictures import plot_detections, plot_proposals
from metricopt_ext.detection.proposals import proposal_recall
from metricopt_ext.detection.task import ExampleBatches, detection_loss
from metricopt_ext.detection.toolkit import Example, Toolkit
from metricopt_ext.evidence.experiment import Experiment, run_experiment
from metricopt_ext.evidence.record import SeedRecord
from metricopt_ext.evidence.rivals import usual_rivals
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.utils.seeding import generator

SHOWN = 6
PROPOSALS = (10, 50, 100, 300)


@dataclass(frozen=True)
class Prepared:
    """A trained detector with an adapter, ready to be finetuned.

    Attributes:
        task: Its loss sees the train images, its metric the validation images.
        test_metric: The same metric on the test images.
        splits: The data.
        toolkit: Where the detector is from.
    """

    task: FinetuneTask
    test_metric: Metric
    splits: Splits
    toolkit: Toolkit


def prepare(config: DetectionConfig, folder: Path, seed: int) -> Prepared:
    """Load the data, train the detector (or take it from ``folder``) and attach the adapter.

    Raises:
        MetricOptError: Data or settings are not usable; the message says which.
    """
    toolkit, definition = build_toolkit(config), check_definition(config)
    splits = load_splits(config, seed, folder)
    # An untrained detector tells whether there is such a place, before one is trained for hours.
    attach(toolkit, toolkit.build(len(splits.classes), seed), config.adapter, seed)
    adapter = attach(toolkit, detector(config, toolkit, splits, seed, folder), config.adapter, seed)
    used, classes = remembering(toolkit, adapter, config.adapter), splits.classes
    halves = image_halves(len(splits.validation), seed)
    task = FinetuneTask(
        adapter,
        loss=detection_loss(used),
        batches=ExampleBatches(splits.train, config.batch_size),
        metric=ap50_metric(used, splits.validation, classes, definition, halves),
        population=1,
    )
    return Prepared(task, ap50_metric(used, splits.test, classes, definition), splits, toolkit)


def run_seed(config: DetectionConfig, folder: Path, resume: bool, seed: int, watcher: Watcher) -> SeedRecord:
    """Run one seed and keep detector, trajectories, value function, adapter and record in ``folder/seed-N``.

    The tuned detector is ``tuned.pth`` there, an ordinary checkpoint.

    Raises:
        MetricOptError: Data or settings are not usable; the message says which.
    """

    def set_up(folder: Path) -> Experiment:
        prepared = prepare(config, folder, seed)
        task, toolkit, validation = prepared.task, prepared.toolkit, prepared.splits.validation
        inputs = [toolkit.inputs(task.adapter.model, batch) for batch in in_batches(validation)]

        def finish() -> None:
            toolkit.export(task.adapter.model, folder / "tuned.pth")
            _look(prepared, folder, seed)

        rivals = usual_rivals(config, inputs, ExampleBatches(validation, config.batch_size), seed)
        return Experiment(task, prepared.test_metric, *rivals, finish)

    return run_experiment(set_up, config, folder, resume, seed, watcher)


def _look(prepared: Prepared, folder: Path, seed: int) -> None:
    """Draw what is found and proposed in some test images before and after, and write the recall of all proposals."""
    task, toolkit, splits = prepared.task, prepared.toolkit, prepared.splits
    order = torch.randperm(len(splits.test), generator=generator(seed, "pictures"))
    shown = [splits.test[i] for i in order[:SHOWN].tolist()]
    truth = truth_of(splits.test, splits.classes)
    found, proposed, recalls = [], [], {}
    for name, phi in (("pretrained", task.origin()), ("metricopt", task.adapter.phi.detach())):
        with task.adapter.using(phi) as model:
            found.append(toolkit.detect(model, shown))
            proposed.append(toolkit.propose(model, shown))
            recall = proposal_recall(_propose(toolkit, model, splits.test), truth, PROPOSALS)
            recalls[name] = {str(k): value for k, value in recall.items()}
    plot_detections(shown, found[0], found[1], splits.classes, folder / "detections.png")
    for name, proposals in zip(recalls, proposed, strict=True):
        plot_proposals(shown, proposals, folder / f"proposals_{name}.png")
    write_json(folder / "proposal_recall.json", recalls)


def _propose(toolkit: Toolkit, model: nn.Module, examples: Sequence[Example]) -> list[Tensor]:
    return [each for batch in in_batches(examples) for each in toolkit.propose(model, batch)]
