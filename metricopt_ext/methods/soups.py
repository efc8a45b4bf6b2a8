"""Soups: the average of several trained models as a start, of checkpoints or of short finetunes of one."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.checkpoints import CheckpointReader
from metricopt_ext.adapters.start import Start
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import BudgetError, FileFormatError
from metricopt_ext.methods.starts import has_batchnorm, reestimate_batchnorm
from metricopt_ext.plain import plain
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import FIRST_LOSS, claim, fingerprint
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.files import read_tensors, write_tensors
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.weights import same_bits
from metricopt_ext.utils.words import brief, counted

KINDS = ("uniform", "greedy")
APART = 0.5  # by so much of it, the average's loss may exceed the worst ingredient's
FINETUNE, FINETUNES = "metricopt_ext.finetune", "finetunes.json"  # a finetune's kind of file, and what all depend on


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
        train: ``train(model, batches, steps=, lr=, seed=)`` trains a model in place; None for AdamW on the task's loss
            with a one-cycle rate.
    """

    steps: int
    lr: float
    _: KW_ONLY
    batches: Batches | None = None
    rebalanced: Batches | None = None
    augment: Callable[[Any, torch.Generator], Any] | None = None
    train: Callable[..., object] | None = None

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


class Variant(NamedTuple):
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
            What was frozen before the adapter was attached stays so.
        training: For finetunes, how the model was trained.
        share: Steps of each finetune as a share of the training's, above 0 and at most 1.
        kinds: ``"uniform"``, ``"greedy"`` or both.
        recalibrate: Batches of inputs on which each average's BatchNorm statistics are estimated anew; None to average
            them.
        entry: The state dict's key in each file of torch that is not one itself; None to find it.
        seed: Seed of finetunes.
        output_dir: Keeps finetunes, ``finetune-N.safetensors``, of which finished ones are not done again; None keeps
            nothing.
        callback: Told beforehand what finetunes and queries this takes; by default both are printed.

    Raises:
        ValueError: Not exactly one of ``checkpoints`` and ``finetunes`` is given, or a number or name can't be, or
            nothing in the model can be trained, or there is nothing to train it by.
        DataError: A file can't be read, or has not the model's tensors; the message has the file and the tensor.
        FileFormatError: A file is damaged, or ``output_dir`` has other finetunes.
        AdapterError: The model has LoRA that is not merged, or weights that are no tensors, as quantized layers do.
        BudgetError: The metric's own budget is too small for a greedy soup.

    Examples:
        >>> starts = mo.soup_starts(task, sorted(Path("out").glob("model_0*.pth")))  # doctest: +SKIP
        >>> mo.optimize_metric(task, queries=60, starts=starts)  # doctest: +SKIP
    """
    files = _check(task, checkpoints, finetunes, kinds, training, share)
    if recalibrate is not None and not has_batchnorm(task.adapter.model):
        warnings.warn("recalibrate changes nothing, as the model keeps no BatchNorm statistics", stacklevel=2)
    tell = callback.say if callback is not None else lambda line: print(plain(line), flush=True)
    with ExitStack() as temporary:
        soup = _Soup(task, CheckpointReader(task.adapter.model, entry), recalibrate)
        if training is not None and checkpoints is None:
            folder = Path(output_dir or temporary.enter_context(tempfile.TemporaryDirectory()))
            files = [folder / f"finetune-{number}.safetensors" for number in range(finetunes)]
            distributed.only_first(partial(_finetune, files, task, training, share, seed, tell))
        found = {"uniform": soup.uniform(files)}  # which reads, and so checks, all before a query is asked
        if "greedy" in kinds:
            tell(f"greedy soup: {counted(len(files) * task.metric.repeats, 'query')}, of an average each")
            found["greedy"] = soup.greedy()
    return {f"{kind}_soup": found[kind] for kind in kinds}


def _check(
    task: FinetuneTask,
    checkpoints: Sequence[str | Path] | None,
    finetunes: int,
    kinds: Sequence[str],
    training: Training | None,
    share: float,
) -> list[Path]:
    """Check what a soup is asked for; return the given files."""
    files: list[Path] = []
    if (checkpoints is None) == (finetunes == 0):
        raise ValueError("give either checkpoints, the files to average, or finetunes, a number of them to make")
    if checkpoints is None:
        check_integer(2, finetunes=finetunes)
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; it must be above 0 and at most 1, of the training's steps")
        if training is None:
            raise ValueError("finetunes need training=Training(steps, lr), as the model was trained")
    else:
        given = list(checkpoints)
        if isinstance(checkpoints, str | Path) or not all(isinstance(each, str | Path) for each in given):
            raise ValueError(f"checkpoints is {brief(checkpoints)}; it must be a list of files, as torch.save writes")
        files = [Path(each) for each in given]
        if len(set(files)) < max(2, len(files)):
            raise ValueError(f"checkpoints is {brief(given)}; an average is of two or more files, each named once")
    if isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS):
        raise ValueError(f"kinds is {brief(kinds)}; it must be a list that names one or both of {', '.join(KINDS)}")
    queries = task.metric.repeats * (len(files) or finetunes) if "greedy" in kinds else 0
    if queries > task.metric.ledger.left:
        raise BudgetError(
            f"a greedy soup takes {counted(queries, 'query')}, {task.metric.ledger.left} left in the metric's own"
            " budget; set kinds=['uniform']"
        )
    return files


def _finetune(
    files: Sequence[Path], task: FinetuneTask, training: Training, share: float, seed: int, say: Callable[[str], object]
) -> None:
    """Write finetunes of copies of a task's whole model, but for those that are on file.

    Raises:
        ValueError: Nothing in the model can be trained, or there is nothing to train it by.
        FileFormatError: The folder is of other finetunes.
    """
    base = Adapter(copy.deepcopy(task.adapter.model)).remove()
    if not any(parameter.requires_grad for parameter in base.parameters()):
        raise ValueError(f"no parameter of {type(base).__name__} requires a gradient, so that it can't be finetuned")
    given = training.batches or task.batches
    if given is None or (training.train is None and task.loss is None):
        raise ValueError("finetunes need a loss and batches, and the task has none; give it loss= and batches=")
    steps = training.share_of(share)
    depends: dict[str, Any] = {"seed": seed, "steps": steps, "lr": training.lr, FIRST_LOSS: task.first_loss(0)}
    depends |= {"rebalanced": training.rebalanced is not None, "augmented": training.augment is not None}
    folder = files[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / FINETUNES).exists() and (others := [each.name for each in files if each.exists()]):
        raise FileFormatError(
            f"{folder} holds {others[0]} without {FINETUNES}, which tells what it is of; use another folder"
        )
    claim(folder / FINETUNES, {**depends, "base": fingerprint(base.state_dict())})
    on_file = [file for file in files if file.exists() and read_tensors(file, FINETUNE)]  # which refuses a damaged one
    if len(on_file) < len(files):
        kept = f"; {len(on_file)} of them are on file" if on_file else ""
        passes = len(files) * steps
        say(
            f"soup: {counted(len(files), 'finetune')} of the whole model, {counted(steps, 'step')} each: {passes}"
            f" passes of a batch, there and back, {passes / training.steps:.0%} of the training's"
            f" {training.steps}{kept}"
        )
    possible = (
        Variant(each.rate, each.rebalanced and depends["rebalanced"], each.augmented and depends["augmented"])
        for each in VARIANTS
    )
    unlike = list(dict.fromkeys(possible))  # beyond these, the same with other seeds
    for number, file in enumerate(files):
        if file in on_file:
            continue
        model, variant = copy.deepcopy(base), unlike[number % len(unlike)]
        batches = training.rebalanced if variant.rebalanced and training.rebalanced is not None else given
        if variant.augmented and training.augment is not None:
            batches = _augmented(batches, training.augment)
        drawn = generator(seed, "soup", number).initial_seed() % 2**31
        with seeded_streams(drawn, next(model.parameters()).device):
            if training.train is not None:
                training.train(model, batches, steps=steps, lr=variant.rate * training.lr, seed=drawn)
            elif task.loss is not None:
                train_supervised(model, task.loss, batches, steps=steps, lr=variant.rate * training.lr, seed=drawn)
        write_tensors(file, model.state_dict(), FINETUNE, variant._asdict())


def _augmented(batches: Batches, augment: Callable[[Any, torch.Generator], Any]) -> Batches:
    def drawn(seed: int, task: int, step: int) -> Any:
        return augment(batches(seed, task, step), generator(seed, "soup augmentation", task, step))

    return drawn


class Mean(NamedTuple):
    """The sums in float64 of so many models' tensors; of what is no floating number, the first's."""

    sums: Mapping[str, Tensor]
    models: int


class _Soup:
    """Averages of some files.

    Args:
        task: The task.
        reader: Reads files.
        recalibrate: Inputs for BatchNorm's statistics, or None.
    """

    def __init__(self, task: FinetuneTask, reader: CheckpointReader, recalibrate: Iterable[Any] | None) -> None:
        self.task, self.reader, self.floating = task, reader, set(reader.floating)
        self.inputs = list(recalibrate) if isinstance(recalibrate, Iterator) else recalibrate  # each average's own pass
        self.losses: dict[Path, float] = {}

    def uniform(self, files: Sequence[Path]) -> Start:
        """Return the average of all; a warning says if the models share no basin."""
        mean, digests = Mean({}, 0), dict[str, Path]()
        for file in files:
            state = self._read(file)
            if (known := digests.setdefault(fingerprint(state), file)) is not file:
                warnings.warn(f"{file} has the same tensors as {known}, which so count twice", stacklevel=3)
            self.losses[file] = self._loss(self._start(Mean(state, 1)))
            mean = self._with(mean, state)
            del state  # before the next one is read
        plain_average = self._start(mean)
        found = self._recalibrated(plain_average)
        worst = max(self.losses, key=self.losses.__getitem__)
        averages = [found] if self.inputs is None else [plain_average, found]
        most, least = self.losses[worst], min(map(self._loss, averages))
        if not least <= most + APART * abs(most):  # NaN, too
            warnings.warn(
                f"the average's loss on a batch is {least:.4g}, and that of {worst}, the worst of its"
                f" {counted(len(files), 'model')}, {most:.4g}: they do not share a basin, and their average is"
                " worse than each; average checkpoints of one training, or finetunes of one model",
                stacklevel=3,
            )
        return found

    def greedy(self) -> Start:
        """Return the average that takes in file after file as long as the metric is no worse; a query a file."""
        mean, best, kept = Mean({}, 0), float("inf"), None
        for file in sorted(self.losses, key=self.losses.__getitem__):
            tried = self._with(mean, self._read(file))
            start = self._recalibrated(self._start(tried))
            cost = self.task.evaluate(start, "soups").cost
            if kept is None or cost <= best:
                best, kept, mean = cost, start, tried
        assert kept is not None
        return kept

    def _read(self, file: Path) -> dict[str, Tensor]:
        """Return a file's tensors, which the first of ranks reads."""
        return distributed.on_first(lambda: self.reader.read(file))

    def _with(self, mean: Mean, state: Mapping[str, Tensor]) -> Mean:
        """Return a mean with one more model."""
        if not mean.models:
            return Mean({name: each.double() if name in self.floating else each for name, each in state.items()}, 1)
        sums = {name: each + state[name] if name in self.floating else each for name, each in mean.sums.items()}
        return Mean(sums, mean.models + 1)

    def _start(self, mean: Mean) -> Start:
        values = {name: each / mean.models if name in self.floating else each for name, each in mean.sums.items()}
        return Start(self.task.origin(), self.reader.replaced(values))

    def _loss(self, start: Start) -> float:
        """Return a loss on a batch; 0 without one."""
        with self.task.adapter.applied(start):
            return self.task.first_loss(0) or 0.0

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
