"""Short finetunes of a whole model, each unlike the others, for their average (`soups`); kept as files, and resumed."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import fingerprint, same
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.files import read_tensors, write_tensors
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.words import brief, counted

FILE_FORMAT = "metricopt_ext.finetune"

Train = Callable[..., object]  # train(model, batches, steps=, lr=, seed=, checkpoint=)


@dataclass(frozen=True)
class Training:
    """How a model was trained, which short finetunes of all of it repeat in part.

    Attributes:
        steps: Number of its steps, at least 1.
        lr: Its peak rate, above 0.
        batches: Its batches, as `FinetuneTask` takes them; None for the task's.
        rebalanced: The same with classes of equal shares, or in their own if those of ``batches`` are equal; None where
            there are no classes.
        augment: ``augment(batch, generator) -> batch``, the same examples changed at random in what their labels do not
            depend on; None for nothing.
        train: ``train(model, batches, steps=, lr=, seed=, checkpoint=)`` trains a model in place and goes on from the
            file ``checkpoint`` if it exists; None for AdamW on the task's loss with a one-cycle rate.
    """

    steps: int
    lr: float
    _: KW_ONLY
    batches: Batches | None = None
    rebalanced: Batches | None = None
    augment: Callable[[Any, torch.Generator], Any] | None = None
    train: Train | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: One is out of range.
        """
        check_integer(1, steps=self.steps)
        check_above(0, lr=self.lr)

    def share_of(self, share: float) -> int:
        """Return a share of its steps, at least one."""
        return max(1, round(share * self.steps))


@dataclass(frozen=True)
class Variant:
    """What one finetune does unlike others.

    Attributes:
        rate: Factor on the training's rate.
        rebalanced: Whether it has the training's other batches.
        augmented: Whether they are augmented.
    """

    rate: float
    rebalanced: bool
    augmented: bool


# In an order in which the first four, and any six, have each of their parts about as often as not.
VARIANTS = (
    Variant(0.3, False, False),
    Variant(1.0, True, True),
    Variant(0.3, True, False),
    Variant(1.0, False, True),
    Variant(1.0, False, False),
    Variant(0.3, True, True),
    Variant(1.0, True, False),
    Variant(0.3, False, True),
)


def variants_of(training: Training, count: int) -> list[Variant]:
    """Return so many variants, as unlike as the training allows; beyond those there are, the same with other seeds."""
    possible = [
        Variant(
            each.rate, each.rebalanced and training.rebalanced is not None, each.augmented and bool(training.augment)
        )
        for each in VARIANTS
    ]
    unlike = list(dict.fromkeys(possible))
    return [unlike[number % len(unlike)] for number in range(count)]


def short_finetunes(
    task: FinetuneTask,
    training: Training,
    count: int,
    share: float,
    seed: int,
    folder: Path,
    say: Callable[[str], object],
) -> list[Path]:
    """Finetune copies of a task's whole model, and return their files, ``finetune-N.safetensors`` in a folder.

    What is on file is not done again, and a finetune that was killed goes on. Of ranks that share a run, the first
    makes them for all.

    Args:
        task: Its model without phi and without what a start replaced is where each begins; what was frozen before the
            adapter was attached stays so.
        training: How the model was trained.
        count: Number of finetunes.
        share: Steps of each, as a share of the training's, above 0 and at most 1.
        seed: Seed of all draws.
        folder: Where they are kept.
        say: Told what they cost, before.

    Raises:
        ValueError: Nothing in the model can be trained, or there is nothing to train it by.
        FileFormatError: A file there is of other finetunes, or damaged.
    """
    files = [folder / f"finetune-{number}.safetensors" for number in range(count)]
    distributed.only_first(lambda: _make(files, task, training, share, seed, say))
    for file in files if distributed.world() > 1 else ():
        tensors, described = distributed.on_first(partial(read_tensors, file, FILE_FORMAT))
        if not file.exists():
            write_tensors(file, tensors, FILE_FORMAT, described)
    return files


def _make(
    files: Sequence[Path], task: FinetuneTask, training: Training, share: float, seed: int, say: Callable[[str], object]
) -> None:
    base = Adapter(copy.deepcopy(task.adapter.model)).remove()
    if not any(parameter.requires_grad for parameter in base.parameters()):
        raise ValueError(f"no parameter of {type(base).__name__} requires a gradient, so that it can't be finetuned")
    batches = training.batches or task.batches
    if batches is None or (training.train is None and task.loss is None):
        raise ValueError("finetunes need a loss and batches, and the task has none; give it loss= and batches=")
    steps, count = training.share_of(share), len(files)
    started = {"steps": steps, "base": fingerprint(base.state_dict()), "loss": task.first_loss(0), "seed": seed}
    runs = [
        _Run(file, number, variant, {**asdict(variant), "lr": variant.rate * training.lr, **started})
        for number, (file, variant) in enumerate(zip(files, variants_of(training, count), strict=True))
    ]
    missing = [run for run in runs if not run.is_done()]
    if missing:
        kept = f"; {count - len(missing)} of them are on file" if len(missing) < count else ""
        say(
            f"soup: {counted(count, 'finetune')} of the whole model, {counted(steps, 'step')} each: {count * steps}"
            f" passes of a batch, there and back, {count * steps / training.steps:.0%} of the training's"
            f" {training.steps}{kept}"
        )
    for run in missing:
        run.run(copy.deepcopy(base), task, training, batches)


@dataclass(frozen=True)
class _Run:
    """One finetune.

    Attributes:
        file: Where it is kept.
        number: Its number.
        variant: What it does.
        described: What its result depends on, JSON.
    """

    file: Path
    number: int
    variant: Variant
    described: dict[str, Any]

    def is_done(self) -> bool:
        if not self.file.exists():
            return False
        _, theirs = read_tensors(self.file, FILE_FORMAT)
        for key, value in self.described.items():
            if not same(theirs.get(key), value):
                raise FileFormatError(
                    f"{self.file} is of another finetune: {key} was {brief(theirs.get(key))}, now {brief(value)};"
                    " delete it, or use another folder"
                )
        return True

    def run(self, model: nn.Module, task: FinetuneTask, training: Training, batches: Batches) -> None:
        drawn = generator(self.described["seed"], "soup", self.number).initial_seed() % 2**31
        own = training.rebalanced if self.variant.rebalanced and training.rebalanced is not None else batches
        if self.variant.augmented and training.augment is not None:
            own = _augmented(own, training.augment)
        unfinished = self.file.with_name(f"{self.file.stem}.training.safetensors")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        options = {key: self.described[key] for key in ("steps", "lr")}
        with seeded_streams(drawn, next(model.parameters()).device):
            if training.train is not None:
                training.train(model, own, **options, seed=drawn, checkpoint=unfinished)
            else:
                assert task.loss is not None
                train_supervised(model, task.loss, own, **options, seed=drawn, checkpoint=unfinished)
        write_tensors(self.file, model.state_dict(), FILE_FORMAT, self.described)
        unfinished.unlink(missing_ok=True)


def _augmented(batches: Batches, augment: Callable[[Any, torch.Generator], Any]) -> Batches:
    def drawn(seed: int, task: int, step: int) -> Any:
        return augment(batches(seed, task, step), generator(seed, "soup augmentation", task, step))

    return drawn


def check_finetunes(training: Training | None, count: int, share: float) -> Training:
    """Check what finetunes are asked for.

    Raises:
        ValueError: A number is out of range, or it is not said how the model was trained.
    """
    check_integer(2, finetunes=count)
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; it must be above 0 and at most 1, of the training's steps")
    if training is None:
        raise ValueError("finetunes need training=Training(steps, lr), as the model was trained")
    return training
