"""Soups: the average of several trained models as a start, of checkpoints or of short finetunes of one."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.checkpoints import CheckpointReader
from metricopt_ext.adapters.start import Start
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import FileFormatError
from metricopt_ext.plain import plain
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import FIRST_LOSS, claim, fingerprint
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_integer
from metricopt_ext.utils.files import read_tensors, write_tensors
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.weights import has_mean
from metricopt_ext.utils.words import brief, counted

KINDS = ("uniform", "greedy")
APART = 0.5  # by so much of it, the average's loss may exceed the worst ingredient's
FINETUNE, FINETUNES = "metricopt_ext.finetune", "finetunes.json"  # a finetune's kind of file, and what all depend on


@dataclass(frozen=True)
class Training:
    """How each of a soup's finetunes trains the whole model: best as it was trained, for a tenth of the steps.

    Attributes:
        steps: Number of steps of each, at least 1.
        lr: The training's peak rate, above 0.
        batches: The training's batches, as `FinetuneTask` takes them; None for the task's.
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


# What a finetune does unlike others: a factor on the training's rate, whether it has the training's other batches, and
# whether they are augmented. In an order in which the first four, and any six, have each about as often as not.
EVERY = list(product((0.3, 1.0), (False, True), (False, True)))
VARIANTS = [EVERY[each] for each in (0, 7, 2, 5, 4, 3, 6, 1)]


def soup_starts(
    task: FinetuneTask,
    checkpoints: Sequence[str | Path] | None = None,
    *,
    finetunes: int = 0,
    training: Training | None = None,
    kinds: Sequence[str] = KINDS,
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
    to `optimize_metric` as ``starts``, and use neither unjudged. `batchnorm_start` estimates an average's BatchNorm
    statistics anew.

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
        training: For finetunes, how they train the model.
        kinds: ``"uniform"``, ``"greedy"`` or both.
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
    if (checkpoints is None) == (finetunes == 0) or (checkpoints is None and training is None):
        raise ValueError("give checkpoints, or finetunes and training=Training(steps, lr), how each is trained")
    if isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS):
        raise ValueError(f"kinds is {brief(kinds)}; it must be a list that names one or both of {', '.join(KINDS)}")
    tell = callback.say if callback is not None else lambda line: print(plain(line), flush=True)
    reader = CheckpointReader(task.adapter.model, entry)
    with tempfile.TemporaryDirectory() as temporary:
        if checkpoints is not None:
            several = [] if isinstance(checkpoints, str | Path) else list(checkpoints)
            files = [Path(each) for each in several if isinstance(each, str | Path)]
            if len(set(files)) < max(2, len(several)):
                raise ValueError(f"checkpoints is {brief(checkpoints)}; it must be a list of two or more, each once")
        else:
            check_integer(2, finetunes=finetunes)
            files = [Path(output_dir or temporary, f"finetune-{number}.safetensors") for number in range(finetunes)]
        queries = len(files) * task.metric.repeats if "greedy" in kinds else 0
        task.metric.ledger.require(queries, "a greedy soup; kinds=['uniform'] takes none")
        if training is not None and checkpoints is None:
            distributed.only_first(partial(_finetune, files, task, training, seed, tell))
        average, by_loss = _uniform(task, reader, files)  # which reads, and so checks, all before a query is asked
        found = {"uniform": average}
        if "greedy" in kinds:
            tell(f"greedy soup: {counted(queries, 'query')}, of an average each")
            found["greedy"] = _greedy(task, reader, by_loss)
    return {f"{kind}_soup": found[kind] for kind in kinds}


def _finetune(
    files: Sequence[Path], task: FinetuneTask, training: Training, seed: int, say: Callable[[str], object]
) -> None:
    """Write finetunes of copies of a task's whole model, but for those that are on file.

    Raises:
        ValueError: Nothing in the model can be trained, or there is nothing to train it by.
        FileFormatError: The folder is of other finetunes.
    """
    base = Adapter(copy.deepcopy(task.adapter.model)).remove()
    if not any(parameter.requires_grad for parameter in base.parameters()):
        raise ValueError(f"no parameter of {type(base).__name__} requires a gradient, so that it can't be finetuned")
    usual, loss = training.batches or task.batches, task.loss
    if usual is None or (training.train is None and loss is None):
        raise ValueError("finetunes need a loss and batches, and the task has none; give it loss= and batches=")
    folder, steps = files[0].parent, training.steps
    if not (folder / FINETUNES).exists() and any(file.exists() for file in files):
        raise FileFormatError(f"{folder} has finetunes but no {FINETUNES}, which tells of what; use another folder")
    rebalances, augments = training.rebalanced is not None, training.augment is not None
    depends: dict[str, Any] = {"seed": seed, "steps": steps, "lr": training.lr, FIRST_LOSS: task.first_loss(0)}
    depends |= {"rebalanced": rebalances, "augmented": augments, "base": fingerprint(base.state_dict())}
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder / FINETUNES, depends)
    left = [number for number, file in enumerate(files) if not (file.exists() and read_tensors(file, FINETUNE))]
    done = len(files) - len(left)
    say(f"soup: {counted(len(files), 'finetune')} of the whole model, {counted(steps, 'step')} each; {done} on file")
    unlike = list(dict.fromkeys((rate, other and rebalances, more and augments) for rate, other, more in VARIANTS))
    for number in left:  # beyond those, the same with other seeds
        model, (rate, rebalanced, augmented) = copy.deepcopy(base), unlike[number % len(unlike)]
        batches = (rebalanced and training.rebalanced) or usual
        if augmented and training.augment is not None:
            batches = partial(_augmented, batches, training.augment)
        drawn = generator(seed, "soup", number).initial_seed() % 2**31
        how: dict[str, Any] = {"steps": steps, "lr": rate * training.lr, "seed": drawn}
        with seeded_streams(drawn, next(model.parameters()).device):
            if training.train is not None:
                training.train(model, batches, **how)
            elif loss is not None:
                train_supervised(model, loss, batches, **how)
        write_tensors(files[number], model.state_dict(), FINETUNE, how)


def _augmented(batches: Batches, augment: Callable[..., Any], seed: int, task: int, step: int) -> Any:
    return augment(batches(seed, task, step), generator(seed, "soup augmentation", task, step))


def _uniform(task: FinetuneTask, reader: CheckpointReader, files: Sequence[Path]) -> tuple[Start, list[Path]]:
    """Return the average of all, and the files by their losses; a warning says if the models share no basin."""
    sums, losses, digests = dict[str, Tensor](), dict[Path, float](), dict[str, Path]()
    for file in files:
        state = distributed.on_first(partial(reader.read, file))
        if (known := digests.setdefault(fingerprint(state), file)) != file:
            warnings.warn(f"{file} has the same tensors as {known}, which so count twice", stacklevel=3)
        losses[file] = _loss(task, _mean(task, reader, state, 1))
        sums = _with(sums, state)
        del state  # before the next one is read
    average, by_loss = _mean(task, reader, sums, len(files)), sorted(losses, key=losses.__getitem__)
    found, most = _loss(task, average), losses[by_loss[-1]]
    if not found <= most + APART * abs(most):  # NaN, too
        warnings.warn(
            f"{by_loss[-1]} has a loss of {most:.4g} on a batch, and the average of {counted(len(files), 'model')}"
            f" {found:.4g}: they share no basin, or BatchNorm's statistics are off (`batchnorm_start`); average"
            " checkpoints of one training, or finetunes of one model",
            stacklevel=3,
        )
    return average, by_loss


def _greedy(task: FinetuneTask, reader: CheckpointReader, files: Sequence[Path]) -> Start:
    """Return the average that takes in file after file as long as the metric is no worse; a query a file."""
    kept, best, sums, models = Start(task.origin()), float("inf"), dict[str, Tensor](), 0
    for file in files:
        tried = _with(sums, distributed.on_first(partial(reader.read, file)))
        start = _mean(task, reader, tried, models + 1)
        cost = task.evaluate(start, "soups").cost
        if cost <= best:
            kept, best, sums, models = start, cost, tried, models + 1
    return kept


def _with(sums: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sums in float64 with one more model; of what has no mean, the first's."""
    if not sums:
        return {name: each.double() if has_mean(each) else each for name, each in state.items()}
    return {name: each + state[name] if has_mean(each) else each for name, each in sums.items()}


def _mean(task: FinetuneTask, reader: CheckpointReader, sums: Mapping[str, Tensor], models: int) -> Start:
    values = {name: each / models if has_mean(each) else each for name, each in sums.items()}
    return Start(task.origin(), reader.replaced(values))


def _loss(task: FinetuneTask, start: Start) -> float:
    """Return a loss on a batch; 0 without one."""
    with task.adapter.applied(start):
        return task.first_loss(0) or 0.0
