"""Soups: the average of several trained models as a start, of checkpoints or of short finetunes of one."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.checkpoints import CheckpointReader
from metricopt_ext.adapters.start import Start
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import BudgetError, FileFormatError
from metricopt_ext.methods.starts import has_batchnorm, reestimate_batchnorm
from metricopt_ext.plain import plain
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import fingerprint, same
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.files import read_tensors, write_tensors
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.weights import same_bits
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


KINDS = ("uniform", "greedy")
APART = 0.5  # by so much of it, the average's loss may exceed the worst ingredient's


def soup_starts(
    task: FinetuneTask,
    checkpoints: Sequence[str | Path] | None = None,
    *,
    finetunes: int = 0,
    training: Training | None = None,
    share: float = 0.1,
    kinds: Sequence[str] = KINDS,
    recalibrate: Iterable[Any] | None = None,
    entry: str | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    callback: Callback | None = None,
) -> dict[str, Start]:
    """Return the averages of several models as starts, which the metric judges like any others.

    ``"uniform_soup"`` is the average of all, including BatchNorm's statistics (Izmailov et al., 2018, "Averaging
    weights leads to wider optima and better generalization"). ``"greedy_soup"`` adds models one by one, lowest loss
    first, if the metric does not get worse (Wortsman et al., 2022, "Model soups", recipe 1). It costs a query for each;
    their order, by the metric, would cost as many again. A uniform soup can be worse than each of its models: pass both
    to `optimize_metric` as ``starts``, and use neither unjudged.

    Files are read one by one and summed in float64, so memory does not grow with their number. Counts and indices are
    taken from the first file; other weights without a mean, such as quantized ones, must be the model's. LoRA is to be
    merged first.

    Args:
        task: The starts replace its model's weights, and finetunes begin from them.
        checkpoints: Files of safetensors or ``torch.save`` (Detectron2's, Lightning's, an EMA's), or folders that
            Hugging Face's libraries save; two or more. None for finetunes.
        finetunes: How many short finetunes of the whole model to average, two or more, in place of checkpoints: at .3
            and 1 times the training's rate, with and without class balance and augmentation, as far as it has them.
        training: For finetunes, how the model was trained.
        share: Steps of each finetune as a share of the training's, above 0 and at most 1.
        kinds: ``"uniform"``, ``"greedy"`` or both.
        recalibrate: Batches of inputs on which each average's BatchNorm statistics are estimated anew; None to average
            them.
        entry: The state dict's key in each file of torch that is not one itself; None to find it.
        seed: Seed of finetunes.
        output_dir: Keeps finetunes, which are resumed there; None keeps nothing.
        callback: Told beforehand what finetunes and queries this takes; by default both are printed.

    Raises:
        ValueError: Not exactly one of ``checkpoints`` and ``finetunes`` is given, or a number or name can't be.
        DataError: A file can't be read, or has not the model's tensors; the message has the file and the tensor.
        FileFormatError: A file is damaged, or ``output_dir`` has other finetunes.
        AdapterError: The model has LoRA that is not merged, or weights that are no tensors, as quantized layers do.
        BudgetError: The metric's own budget is too small for a greedy soup.

    Examples:
        >>> starts = mo.soup_starts(task, sorted(Path("out").glob("model_0*.pth")))  # doctest: +SKIP
        >>> mo.optimize_metric(task, queries=60, starts=starts)  # doctest: +SKIP
    """
    files = _check(task, checkpoints, finetunes, kinds)
    if recalibrate is not None and not has_batchnorm(task.adapter.model):
        warnings.warn("recalibrate changes nothing, as the model keeps no BatchNorm statistics", stacklevel=2)
    tell = callback.say if callback is not None else _print
    with ExitStack() as temporary:
        if checkpoints is None:
            folder = output_dir or temporary.enter_context(tempfile.TemporaryDirectory())
            given = check_finetunes(training, finetunes, share)
            files = short_finetunes(task, given, finetunes, share, seed, Path(folder), tell)
        soup = _Soup(task, CheckpointReader(task.adapter.model, entry), files, recalibrate)
        found = {"uniform": soup.uniform()}  # which reads, and so checks, all before a query is asked
        if "greedy" in kinds:
            tell(f"greedy soup: {counted(len(files) * task.metric.repeats, 'query')}, of an average each")
            found["greedy"] = soup.greedy()
    return {f"{kind}_soup": found[kind] for kind in kinds}


def _check(
    task: FinetuneTask, checkpoints: Sequence[str | Path] | None, finetunes: int, kinds: Sequence[str]
) -> list[Path]:
    if (checkpoints is None) == (finetunes == 0):
        raise ValueError("give either checkpoints, the files to average, or finetunes, a number of them to make")
    if isinstance(checkpoints, str | Path):
        raise ValueError(f"checkpoints is {str(checkpoints)!r}; it must be a list of files")
    checkpoints = None if checkpoints is None else list(checkpoints)
    if strange := [each for each in checkpoints or () if not isinstance(each, str | Path)]:
        raise ValueError(f"checkpoints has {brief(strange[0])}; each must be a file, as torch.save writes")
    files = [Path(each) for each in checkpoints or ()]
    if checkpoints is not None and len(files) < 2:
        raise ValueError(f"checkpoints has {counted(len(files), 'file')}; an average is of two or more")
    known: dict[object, Path] = {}
    for file in files:
        place = (file.stat().st_dev, file.stat().st_ino) if file.exists() else file  # the same by a link
        if place in known:
            raise ValueError(f"checkpoints has one file twice, {str(known[place])!r} and {str(file)!r}; name it once")
        known[place] = file
    if isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS):
        raise ValueError(f"kinds is {brief(kinds)}; it must be a list that names one or both of {', '.join(KINDS)}")
    queries = task.metric.repeats * (len(files) or finetunes) if "greedy" in kinds else 0
    if queries > task.metric.ledger.left:
        raise BudgetError(
            f"a greedy soup takes {counted(queries, 'query')}, {task.metric.ledger.left} left in the metric's own"
            " budget; set kinds=['uniform']"
        )
    return files


def _print(line: str) -> None:
    print(plain(line), flush=True)


class _Soup:
    """Averages of some files.

    Args:
        task: The task.
        reader: Reads files.
        files: The files.
        recalibrate: Inputs for BatchNorm's statistics, or None.
    """

    def __init__(
        self, task: FinetuneTask, reader: CheckpointReader, files: Sequence[Path], recalibrate: Iterable[Any] | None
    ) -> None:
        self.task, self.reader, self.files = task, reader, list(files)
        self.inputs = list(recalibrate) if isinstance(recalibrate, Iterator) else recalibrate  # each average's own pass
        self.losses: dict[Path, float] = {}
        self.digests: dict[str, Path] = {}

    def uniform(self) -> Start:
        """Return the average of all; a warning says if the models share no basin."""
        mean = Mean(self.reader.floating)
        for file in self.files:
            state = self.reader.read(file)
            if (known := self.digests.setdefault(fingerprint(state), file)) is not file:
                warnings.warn(f"{file} has the same tensors as {known}, which so count twice", stacklevel=3)
            if (loss := self._loss(self._start(state))) is not None:
                self.losses[file] = loss
            mean.add(state)
            del state  # before the next one is read
        plain_average = self._start(mean.of())
        found = self._recalibrated(plain_average)
        self._check_basin([plain_average, found] if self.inputs is not None else [found])
        return found

    def greedy(self) -> Start:
        """Return the average that takes in file after file as long as the metric is no worse; a query a file."""
        mean, best, kept = Mean(self.reader.floating), float("inf"), None
        for file in sorted(self.files, key=lambda file: self.losses.get(file, 0.0)):
            state = self.reader.read(file)
            start = self._recalibrated(self._start(mean.of(state)))
            cost = self.task.evaluate(start, "soups").cost
            if kept is None or cost <= best:
                best, kept = cost, start
                mean.add(state)
            del state
        assert kept is not None
        return kept

    def _start(self, values: Mapping[str, Tensor]) -> Start:
        return Start(self.task.origin(), self.reader.replaced(values))

    def _loss(self, start: Start) -> float | None:
        with self.task.adapter.applied(start):
            return self.task.first_loss(0)

    def _check_basin(self, averages: Sequence[Start]) -> None:
        if not self.losses:
            return
        worst = max(self.losses, key=self.losses.__getitem__)
        most = self.losses[worst]
        found = min(loss for each in averages if (loss := self._loss(each)) is not None)
        if not found <= most + APART * abs(most):  # NaN, too
            warnings.warn(
                f"the average's loss on a batch is {found:.4g}, and that of {worst}, the worst of its"
                f" {counted(len(self.files), 'model')}, {most:.4g}: they do not share a basin, and their average is"
                " worse than each; average checkpoints of one training, or finetunes of one model",
                stacklevel=4,
            )

    def _recalibrated(self, start: Start) -> Start:
        """Return an average with BatchNorm's statistics of the inputs, if there are any."""
        if self.inputs is None:
            return start
        bare = Adapter(copy.deepcopy(self.task.adapter.model)).remove()
        bare.load_state_dict(start.tensors, strict=False)
        model = reestimate_batchnorm(bare, self.inputs)
        if model is None:
            return start
        base = self.reader.base
        buffers = {n: each for n, each in model.named_buffers() if n in base and not same_bits(each, base[n])}
        weights = {name: start.tensors[name] for name, _ in model.named_parameters() if name in start.tensors}
        return Start(start.phi, {**buffers, **weights})


class Mean:
    """The mean in float64 of tensors that come one model after another; of what is no floating number, the first.

    Args:
        floating: Names of what is averaged.
    """

    def __init__(self, floating: Iterable[str]) -> None:
        self._floating, self._count = set(floating), 0
        self._sums: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Take a model in."""
        if not self._count:
            self._first = {name: value for name, value in state.items() if name not in self._floating}
            self._sums = {name: value.double() for name, value in state.items() if name in self._floating}
        else:
            for name, total in self._sums.items():
                total.add_(state[name])
        self._count += 1

    def of(self, also: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the mean, with one more model or without."""
        if not self._count:
            return dict(also or {})
        return dict(self._items(also)) | self._first

    def _items(self, also: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        for name, total in self._sums.items():
            yield name, total / self._count if also is None else (total + also[name]) / (self._count + 1)
