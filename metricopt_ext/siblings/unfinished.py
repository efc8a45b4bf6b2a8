"""What a killed training by a sibling method goes on from, bit for bit."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from metricopt_ext.errors import FileFormatError
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.utils.files import check_tensors, content_of, read_tensors, write_tensors
from metricopt_ext.utils.words import brief

FILE_FORMAT = "metricopt_ext.sibling_training/1"
KEEP_EVERY = 60.0  # seconds of training that a kill may cost

# By name, what was measured on the way: pairs of an iteration and a value.
History = dict[str, list[tuple[int, float]]]


class Part(Protocol):
    """A part of a training's state, such as a module or an optimizer."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return its tensors by name."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> Any:
        """Take over such tensors, of the same shapes."""


class Unfinished:
    """The state of a training, kept in a file about once a minute: model, random numbers, queries, and a stage's parts.

    Args:
        task: The copy whose model is trained.
        settings: What a training that goes on must have in common with the one that was killed; JSON.
        file: Where the state is kept, and read from if it exists; None to keep nothing.

    Attributes:
        stage: The part of the method that was under way when the state was kept; empty if there is none.
        seconds: How long the training had taken until then.

    Raises:
        FileFormatError: The file is corrupt, or from another training.
    """

    def __init__(self, task: TrainingTask, settings: dict[str, Any], file: Path | None = None) -> None:
        self._task, self._settings, self._file = task, settings, file
        self._tensors: dict[str, Tensor] = {}
        self._described: dict[str, Any] = {}
        self._before = [dict(ledger.spent_on) for ledger in self._ledgers]
        self._began = self._kept = time.monotonic()
        self.stage, self.seconds = "", 0.0
        if file is not None and file.exists():
            self._tensors, self._described = read_tensors(file, FILE_FORMAT)
            with content_of(file, "state of a training"):
                theirs = dict(self._described["settings"])
            for name in {**theirs, **settings}:
                was, now = theirs.get(name), settings.get(name)
                if was != now:
                    raise FileFormatError(
                        f"{file} is from another training: {name} was {brief(was)}, now {brief(now)}; delete it to"
                        " train anew"
                    )
            with content_of(file, "state of a training"):
                self.stage, self.seconds = str(self._described["stage"]), float(self._described["seconds"])

    def keep(self, stage: str, step: int, history: History, **parts: Part) -> None:
        """Write the state after so many steps of a stage, if it was not written within the last minute.

        Args:
            stage: The stage's name.
            step: Steps taken, at least 1.
            history: What was measured so far, in earlier stages too.
            **parts: What the stage changes besides the task's model.
        """
        now = time.monotonic()
        if self._file is None or now - self._kept < KEEP_EVERY:
            return
        tensors = {"random.cpu": torch.get_rng_state()}
        if self._task.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self._task.device)
        for name, part in {"model": self._task.model, **parts}.items():
            tensors |= {f"{name}.{key}": value for key, value in part.state_dict().items()}
        described = {"stage": stage, "step": step, "history": history, "queries": self._queries()}
        described |= {"settings": self._settings, "seconds": self.seconds + now - self._began}
        write_tensors(self._file, tensors, FILE_FORMAT, described)
        self._kept = now

    def go_on(self, stage: str, **parts: Part) -> tuple[int, History]:
        """Restore what was kept in a stage, queries and random numbers included.

        Returns:
            The steps taken of it, and what was measured until then; 0 and nothing if the stage begins.

        Raises:
            FileFormatError: What was kept does not fit.
        """
        if self.stage != stage:
            return 0, {}
        assert self._file is not None
        own: dict[str, Part] = {"model": self._task.model, **parts}
        expected = {
            f"{name}.{key}": value.shape for name, part in own.items() for key, value in part.state_dict().items()
        }
        states = {key: value for key, value in self._tensors.items() if not key.startswith("random.")}
        check_tensors(self._file, states, expected)
        with content_of(self._file, "state of a training"):
            step = int(self._described["step"])
            history = {
                key: [(int(at), float(value)) for at, value in points]
                for key, points in self._described["history"].items()
            }
            queries = [{str(name): int(n) for name, n in each.items()} for each in self._described["queries"]]
            if step < 1 or len(queries) != 2 or any(n < 0 for each in queries for n in each.values()):
                raise ValueError(f"it has {step} steps and {queries} queries")
            torch.set_rng_state(self._tensors["random.cpu"])
            if self._task.device.type == "cuda":
                torch.cuda.set_rng_state(self._tensors["random.cuda"], self._task.device)
            for name, part in own.items():
                part.load_state_dict({key: states[f"{name}.{key}"] for key in part.state_dict()})
        for ledger, spent in zip(self._ledgers, queries, strict=True):
            for purpose, n in spent.items():
                ledger.spend(purpose, n)
        return step, history

    @property
    def _ledgers(self) -> tuple[Ledger, Ledger]:
        return self._task.metric.ledger, self._task.batch_metric.ledger

    def _queries(self) -> list[dict[str, int]]:
        """What this training has spent of the metric of a model and of a batch, by purpose."""
        return [difference(ledger.spent_on, before) for ledger, before in zip(self._ledgers, self._before, strict=True)]


def difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Return what was spent between two states of a ledger, by purpose."""
    return {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}
