"""The one driver of searches: it hands out what a run asks for, takes answers in any order, and keeps each on file."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import FileFormatError
from metricopt_ext.search.strategy import Answer, Answers
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import Entry, Log
from metricopt_ext.tasks.settings import Values
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.words import brief, counted

End = TypeVar("End")


class Batch(NamedTuple):
    """What a run asks for at once.

    Attributes:
        starts: What the metric is wanted of.
        stage: What for: ``"starts"``, ``"settings"`` or ``"search"``.
        names: Of each the start whose model it is a point of; ``"start"`` is the model as it was trained.
    """

    starts: list[Start]
    stage: str
    names: list[str]


# Refuses settings of inference by a ValueError.
Check = Callable[[Values], object]

# Yields a batch and is sent its answers; an empty batch says that there is nothing to ask unless more may be spent.
Run = Generator[Batch, Answers, End]


def labelled(batches: Generator[list[Start], Answers, End], stage: str, name: str) -> Generator[Batch, Answers, End]:
    """Yield what a search asks for, with its stage and the name of its start; returns what the search returns."""
    answers: Answers | None = None
    while True:
        try:
            starts = batches.send(answers)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        answers = yield Batch(starts, stage, [name] * len(starts))


class Trial(NamedTuple):
    """A start that the metric is wanted of.

    Attributes:
        id: Its number, from 0, in the order in which the trials were asked.
        at: The start: phi, tensors, and settings of inference.
        stage: What it is for, and its start's name (`Batch`).
        name: See above.
    """

    id: int
    at: Start
    stage: str
    name: str


class Asking(Generic[End]):
    """Drives a run: its batches are handed out trial by trial, answered in any order, and kept.

    The run goes on only once all of a batch are answered. So what it finds depends neither on the order nor on the time
    of the answers. What is on file under a trial's number is told at its own point, whatever would be asked today.

    Args:
        run: The run.
        log: Has the answers on file, and gets those to come.
        repeats: How often the metric is asked for one evaluation.
        check: Called on settings of inference that are on file.

    Attributes:
        trials: All that were asked for.
        batch: Those that wait for answers, or for the others of their batch.
        end: What the run returned, once it has ended.
    """

    def __init__(self, run: Run[End], log: Log, repeats: int = 1, check: Check = lambda values: None) -> None:
        log.use("by numbers")
        self.log, self.repeats = log, repeats
        self._run, self._check = run, check
        self.trials: list[Trial] = []
        self.batch: list[Trial] = []
        self.end: End | None = None
        self._handed: set[int] = set()
        self._ended, self._moved = False, 0

    def ask(self, n: int = 1) -> list[Trial]:
        """Return at most ``n`` trials of the current batch that this object has not handed out yet.

        Returns:
            Fewer at the end of a batch; none while all of it is being evaluated (`open`), or once the budget is given
            out.

        Raises:
            ValueError: ``n`` is below 1.
        """
        check_integer(1, n=n)
        self.go_on()
        new = [each for each in self.batch if each.id not in self._handed and self.log.told(each.id) is None][:n]
        if unwritten := [Entry.of(each.id, each.at) for each in new if each.id not in self.log.entries]:
            self.log.append(unwritten)
        self._handed |= {each.id for each in new}
        return new

    def next_batch(self) -> list[Trial]:
        """Return the batch that waits for answers, those on file among it; [] at the end.

        It is for a loop that answers all: unlike `ask` it leaves new trials to be written with their answers.
        """
        self._advance()
        self._handed |= {each.id for each in self.batch}
        return self.batch

    def placed(self, points: Sequence[Tensor]) -> list[Trial]:
        """Return the batch at these points, ``d`` each, as another process asks for it."""
        pairs = zip(self.batch, points, strict=True)
        self.batch = [each._replace(at=replace(each.at, phi=phi.to(each.at.phi))) for each, phi in pairs]
        self.trials[len(self.trials) - len(self.batch) :] = self.batch
        return self.batch

    def open(self) -> list[Trial]:
        """Return the trials that were asked for, here or in an earlier process, and not told yet."""
        self.go_on()
        asked = self._handed | self.log.entries.keys()
        return [each for each in self.batch if each.id in asked and self.log.told(each.id) is None]

    def tell(self, id: int, evaluation: Evaluation | None, *, asked: int | None = None, seconds: float = 0.0) -> None:
        """Answer a trial; it is on disk when this returns.

        Args:
            id: The trial's.
            evaluation: The metric's; of a failure, an evaluation that `failed`: the worst of the run stands in for it;
                None where nobody waits for it any more: it costs no query, and its batch closes without it.
            asked: How often the metric was called for it; None for its repeats.
            seconds: How long that took.

        Raises:
            ValueError: There is no such trial, or it has another answer already; or the value of a start is needed.
        """
        check_integer(0, id=id)
        if (known := self.log.told(id)) is not None:
            if known.told(evaluation, known.asked, known.seconds) != known:
                raise ValueError(f"trial {id} was told another answer before, which stays")
            return
        if id not in (opened := {each.id: each for each in self.open()}):
            raise ValueError(f"there is no open trial {id!r}; open are {list(opened)}: ask for trials first")
        if evaluation is None and self.batch[0].id == 0:
            raise ValueError(f"trial {id} is a start, whose value is needed; tell it, or leave that start out")
        asked = self.repeats if asked is None else asked
        self.log.append([Entry.of(id, opened[id].at).told(evaluation, asked, seconds)])

    def answer(self, id: int) -> Evaluation | None:
        """Return a trial's answer, of one that failed the worst so far; None without any, or if it was given up."""
        known = self.log.told(id)
        return None if known is None or known.given_up else self.log.evaluation(known) or self._worst()

    def _worst(self) -> Evaluation:
        entries = [self.log.entries[each.id] for each in self.trials if each.id in self.log.entries]
        return max(filter(None, map(self.log.evaluation, entries)), key=lambda each: each.cost)._replace(failed=True)

    def told(self) -> Answers:
        """Return what is known of the batch that waits for answers."""
        return Answers(Answer(each.at, self.answer(each.id)) for each in self.batch)

    def go_on(self) -> None:
        """Take the next batch once all of one is answered, until one is not."""
        while self._advance():
            pass

    def _advance(self) -> bool:
        """Take the next batch if all of this one is answered; returns whether there is one."""
        if self._ended or any(self.log.told(each.id) is None for each in self.batch):
            return False
        if getgeneratorstate(self._run) == GEN_CLOSED:
            raise RuntimeError("the search failed when it was last asked; start it anew from its folder")
        try:
            starts, stage, names = self._run.send(self.told() if self.trials else None)  # type: ignore[arg-type]
        except StopIteration as end:
            self.end, self._ended, self.batch = end.value, True, []
            return False
        made = zip(starts, names, strict=True)
        self.batch = [self._placed(Trial(id, at, stage, name)) for id, (at, name) in enumerate(made, len(self.trials))]
        self.trials += self.batch
        return bool(self.batch)

    def _placed(self, trial: Trial) -> Trial:
        """Return a trial at the point, and with the settings, that are on file under its number, if there are any."""
        if (kept := self.log.entries.get(trial.id)) is None:
            return trial
        at, settings, asked = trial.at, kept.settings or {}, dict(trial.at.settings)
        try:
            if trial.stage == "settings":
                self._check(settings)
                at = replace(at, settings=settings)
            if not kept.is_of(at):
                other = f"other tensors than {trial.name!r}, or settings {brief(settings)}, not {brief(asked)}"
                raise ValueError(f"has {other}; give as many queries as before")
            at = replace(at, phi=kept.at(at.phi))
        except ValueError as error:
            raise FileFormatError(f"{self.log.path}: trial {trial.id}: {error}; use another output folder") from error
        self._moved += asked != settings or not kept.same_point(trial.at.phi)
        return trial._replace(at=at)

    def moved(self) -> str:
        """Say how many points on file are not those that the run would ask for today; empty if all are."""
        why = "as processors round differently, or the loss draws without a seed; the search was told the kept ones"
        return f"{counted(self._moved, 'kept point')} would be others today, {why}" if self._moved else ""


FAILED = Evaluation(float("inf"), failed=True)  # what is told of an evaluation that failed
