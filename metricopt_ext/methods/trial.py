"""A point that a search wants to know the metric at, and the model there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError
from metricopt_ext.tasks.settings import Value
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import opened_atomically, save_checkpoint
from metricopt_ext.utils.modes import evaluating

# Which trial each model is at, by what holds its phi.
_APPLIED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Trial:
    """A point that a search wants to know the metric at.

    Attributes:
        id: Its number, from 0.
        phi: ``d``.
        start: Name of the start whose model it is a point of: ``"start"`` for the model as it was trained.
        settings: The settings of inference to be judged with, by name; empty of a task without any.
    """

    id: int
    phi: Tensor
    start: str
    _task: FinetuneTask = field(repr=False)
    _state: Start = field(repr=False)

    @property
    def settings(self) -> dict[str, Value]:
        """The settings of inference; see above."""
        return self._task.with_values(self._state.settings).values or {}

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Yield the model at this trial, in evaluation mode, its settings in force; afterwards it is as it was.

        Raises:
            AdapterError: Another trial is applied, as all share the model.
        """
        adapter = self._task.adapter
        other = _APPLIED.get(adapter.context)
        if other not in (None, self.id):
            raise AdapterError(
                f"trial {self.id} is of the same model as trial {other}, which is applied; leave its with block"
                " first, or write both to files, trial.checkpoint(path)"
            )
        _APPLIED[adapter.context] = self.id
        try:
            with self._task.standing_at(self._state) as model, evaluating(model):
                yield model
        finally:
            if other is None:
                del _APPLIED[adapter.context]

    def checkpoint(self, path: str | Path) -> None:
        """Write the model at this trial as an ordinary state dict, phi merged into the weights.

        Settings of inference are no part of it (`settings`).

        Args:
            path: The file; safetensors if its name ends so, otherwise by ``torch.save``.

        Raises:
            AdapterError: phi can't be merged (`Adapter.merge`).
            OSError: The file can't be written.
        """
        adapter = self._task.adapter
        with adapter.applied(self._state):
            state = {key: value.detach().cpu().contiguous() for key, value in adapter.merged_state_dict().items()}
        if Path(path).suffix == ".safetensors":
            save_checkpoint(path, state)
        else:
            with opened_atomically(path) as file:
                torch.save(state, file)
