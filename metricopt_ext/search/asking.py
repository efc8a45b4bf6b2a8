"""The one driver of searches: it hands out what a run asks for, takes answers in any order, and keeps each on file."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import FileFormatError
from metricopt_ext.search.strategy import Answer, Answers
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import SAME, Entry, Log
from metricopt_ext.tasks.settings import Value
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


# Yields a batch and is sent its answers; an empty batch says that there is nothing to ask unless more may be spent.
Run = Generator[Batch, Answers, End]


def labelled(batches: Generator[list[Start], Answers, End], stage: str, name: str) -> Generator[Batch, Answers, End]:
    """Yield what a search asks for, with its stage and the name of its start; returns what the search returns."""
    answers: Answers | None = None
    while True:
        try:
            starts = batches.send(answers)  # type: ignore[arg-type]
        except StopIteration as end:
            found: End = end.value
            return found
        answers = yield Batch(starts, stage, [name] * len(starts))


@dataclass(frozen=True, eq=False)
class Trial:
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
        check: Called to refuse settings of inference that are on file; raises a ValueError.

    Attributes:
        trials: All that were asked for.
        batch: Those that wait for answers, or for the others of their batch.
        end: What the run returned, once it has ended.
    """

    def __init__(
        self,
        run: Run[End],
        log: Log,
        repeats: int = 1,
        check: Callable[[Mapping[str, Value]], None] = lambda values: None,
    ) -> None:
        self.log, self.repeats = log, repeats
        self._run, self._check = run, check
        self.trials: list[Trial] = []
        self.batch: list[Trial] = []
        self.end: End | None = None
        self._begun = self._ended = self._broken = False
        self._starts = 0  # how many trials are starts whose values are needed
        self._handed: set[int] = set()
        self._moved = self._replayed = 0

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
        self._open(new, write=True)
        self._handed |= {trial.id for trial in new}
        return new

    def next_batch(self) -> list[Trial]:
        """Return the batch that waits for answers, those on file among it; [] at the end.

        It is for a loop that answers all: unlike `ask` it leaves new trials to be written with their answers.
        """
        if self.complete and not self._advance():
            return []
        self._open(self.batch, write=False)
        return self.batch

    def placed(self, points: Sequence[Tensor]) -> list[Trial]:
        """Return the batch at these points, ``d`` each, as another process asks for it."""
        self.batch = [
            replace(each, at=replace(each.at, phi=phi.to(each.at.phi)))
            for each, phi in zip(self.batch, points, strict=True)
        ]
        self.trials[len(self.trials) - len(self.batch) :] = self.batch
        return self.batch

    def open(self) -> list[Trial]:
        """Return the trials that were asked for, here or in an earlier process, and not told yet."""
        self.go_on()
        return [each for each in self.batch if each.id in self.log.entries and self.log.told(each.id) is None]

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
        known = self.log.told(id)
        if known is not None:
            if not self._same(known, evaluation):
                said = "given up" if known.given_up else "a failure" if known.failed else "another value"
                raise ValueError(f"trial {id} was told before, as {said}; what was told stays")
            return
        self.go_on()
        trial = next((each for each in self.batch if each.id == id), None)
        if trial is None or id not in self.log.entries:
            known_ones = ", ".join(str(each.id) for each in self.open()) or "none"
            raise ValueError(f"there is no open trial {id!r}; open are {known_ones}: ask for trials first")
        if evaluation is None and id < self._starts:
            raise ValueError(f"trial {id} is a start, whose value is needed; tell it, or leave that start out")
        asked = self.repeats if asked is None else asked
        self.log.append([Entry.of(id, trial.at).told(evaluation, asked, seconds)])

    def _same(self, known: Entry, evaluation: Evaluation | None) -> bool:
        """Whether an answer on file is this very one."""
        if evaluation is None:
            return known.given_up
        return known.failed if evaluation.failed else self.log.evaluation(known) == evaluation

    def answer(self, id: int) -> Evaluation | None:
        """Return a trial's answer, of one that failed the worst so far; None without any, or if it was given up."""
        known = self.log.told(id)
        return None if known is None or known.given_up else self.log.evaluation(known) or self.worst()

    def told(self) -> Answers:
        """Return what is known of the batch that waits for answers."""
        return Answers(Answer(each.at, self.answer(each.id)) for each in self.batch)

    def worst(self) -> Evaluation:
        """Return the worst evaluation of the trials so far, which stands in for those that failed."""
        told = (self.log.told(each.id) for each in self.trials)
        found = (self.log.evaluation(each) for each in told if each is not None)
        return max((each for each in found if each is not None), key=lambda each: each.cost)._replace(failed=True)

    @property
    def complete(self) -> bool:
        """Whether all of the batch is answered."""
        return all(self.log.told(each.id) is not None for each in self.batch)

    def go_on(self) -> None:
        """Take the next batch once all of one is answered, until one is not."""
        while self.complete and self._advance():
            pass

    def _advance(self) -> bool:
        """Send the batch's answers, and take the next batch; returns whether there is one."""
        if self._ended:
            return False
        answers, self._begun = (self.told() if self._begun else None), True
        if self._broken:
            raise RuntimeError("the search failed when it was last asked; start it anew from its folder")
        self._broken = True
        try:
            starts, stage, names = self._run.send(answers)  # type: ignore[arg-type]
        except StopIteration as end:
            self.end, self._ended, starts, stage, names = end.value, True, [], "", []
        self._broken = False
        made = zip(starts, names, strict=True)
        self.batch = [self._placed(Trial(id, at, stage, name)) for id, (at, name) in enumerate(made, len(self.trials))]
        self.trials += self.batch
        self._starts = self._starts or len(self.trials)
        return bool(self.batch)

    def _open(self, trials: list[Trial], *, write: bool) -> None:
        if new := [Entry.of(each.id, each.at) for each in trials if each.id not in self.log.entries]:
            self.log.append(new, write=write)

    def _placed(self, trial: Trial) -> Trial:
        """Return a trial at the point, and with the settings, that are on file under its number, if there are any."""
        kept = self.log.entries.get(trial.id)
        if kept is None:
            return trial
        path, settings, at = self.log.path, kept.settings or {}, trial.at
        if settings != dict(at.settings):
            if trial.stage != "settings":
                raise FileFormatError(
                    f"{path} has trial {trial.id} with settings {brief(settings)}, where {brief(dict(at.settings))}"
                    " would be asked now, as there are too few queries to try as many; give more, or use another output"
                    " folder"
                )
            try:
                self._check(settings)
            except ValueError as error:
                raise FileFormatError(f"{path}: {error}; use another output folder") from error
            at = replace(at, settings=settings)
            self._moved += 1
        if not kept.is_of(at):
            raise FileFormatError(
                f"{path} has trial {trial.id} of a model with other tensors than those of the start {trial.name!r}; use"
                " another output folder"
            )
        try:
            point = kept.at(at.phi)
        except ValueError as error:
            raise FileFormatError(f"{path} holds {error}; use another output folder") from error
        self._replayed += 1
        apart, size = float((point - at.phi).norm()), max(float(at.phi.norm()), float(point.norm()))
        self._moved += apart > SAME * size and at is trial.at
        return replace(trial, at=replace(at, phi=point))

    def moved(self) -> str:
        """Say how many points on file are not those that the run would ask for today; empty if all are."""
        if not self._moved:
            return ""
        return (
            f"{self._moved} of {counted(self._replayed, 'kept point')} are not what the search would ask for today, as"
            " another processor rounds in another way, or the loss draws without a seed; the search was told the kept"
            " ones"
        )


FAILED = Evaluation(math.inf, failed=True)  # what is told of an evaluation that failed
