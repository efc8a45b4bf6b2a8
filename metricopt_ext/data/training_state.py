"""What a killed training of a model goes on from, bit for bit, and its progress."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.progress import Callback, told
from metricopt_ext.utils.files import check_tensors, content_of, read_tensors, write_tensors

FILE_FORMAT = "metricopt_ext.training"
KEEP_EVERY = 60.0  # seconds of training that a kill may cost
COUNT = "step"  # what torch's optimizers call their number of steps, a tensor on the CPU
RATES = ("lr", "momentum", "betas")  # what a schedule changes


class TrainingState:
    """Model, optimizer, torch's global random numbers and the losses so far, kept in a file about once a minute.

    Args:
        model: The model.
        optimizer: Its optimizer, with one group of parameters.
        steps: Number of steps.
        settings: What a training that goes on must have in common with the one that was killed; JSON.
        file: Where the state is kept, and read from if it exists; None to keep nothing.
        callback: Notified of progress; may end the training early, see `Callback.goes_on`.

    Attributes:
        losses: The loss of each step taken; the caller appends to it.

    Raises:
        FileFormatError: The file is corrupt, or from another training.

    Examples:
        >>> state = TrainingState(model, optimizer, 100, {"lr": 0.1}, file)  # doctest: +SKIP
        >>> for step in state.steps_left():  # doctest: +SKIP
        ...     state.losses.append(train_on(batches(step)))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int,
        settings: dict[str, Any],
        file: Path | None = None,
        callback: Callback | None = None,
    ) -> None:
        self.losses: list[float] = []
        self._model, self._optimizer, self._steps, self._file = model, optimizer, steps, file
        self._settings, self._callback = {"steps": steps, **settings}, callback or Callback()
        self._parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._device = next(model.parameters()).device
        if file is not None and file.exists():
            self._load(file)

    def steps_left(self) -> Iterator[int]:
        """Yield the number of each step that is still to be taken, from 0 in a training from the start."""
        began = kept = time.monotonic()
        first = len(self.losses)
        for step in told(range(first, self._steps), self._callback, "train the model", first):
            yield step
            now = time.monotonic()
            if not self._callback.goes_on(step + 1 - first, self._steps - step - 1, now - began):
                return
            if self._file is not None and now - kept >= KEEP_EVERY:
                self._save(self._file)
                kept = now

    def _save(self, path: Path) -> None:
        tensors = {f"model.{name}": value for name, value in self._model.state_dict().items()}
        for name, parameter in self._parameters.items():
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{slot}.{name}"] = value
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        tensors["random.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self._device)
        rates = {name: value for name, value in self._optimizer.param_groups[0].items() if name in RATES}
        write_tensors(path, tensors, FILE_FORMAT, {**self._settings, "rates": rates})

    def _load(self, path: Path) -> None:
        tensors, theirs = read_tensors(path, FILE_FORMAT)
        for key, value in self._settings.items():
            if theirs.get(key) != value:
                raise FileFormatError(
                    f"{path} is from another run: {key} was {theirs.get(key)!r}, now {value!r}; delete it to train anew"
                )
        model = _below("model.", tensors)
        try:
            check_tensors(path, model, {name: value.shape for name, value in self._model.state_dict().items()})
        except FileFormatError as error:
            raise FileFormatError(f"{path} is from another model; delete it to train anew ({error})") from error
        with content_of(path, "state of a model's training"):
            moments: dict[Tensor, dict[str, Tensor]] = {}
            for name, value in _below("optimizer.", tensors).items():
                slot, _, parameter = name.partition(".")
                held = self._parameters[parameter]
                if value.shape != (() if slot == COUNT else held.shape):
                    raise ValueError(f"{name} has shape {tuple(value.shape)}")
                moments.setdefault(held, {})[slot] = value if slot == COUNT else value.to(held)
            losses = [float(loss) for loss in tensors["losses"]]
            if not 0 < len(losses) <= self._steps:
                raise ValueError(f"it has {len(losses)} of {self._steps} steps")
            rates = {name: _rate(theirs["rates"][name]) for name in self._optimizer.param_groups[0] if name in RATES}
            torch.set_rng_state(tensors["random.cpu"])
            if self._device.type == "cuda" and "random.cuda" in tensors:
                torch.cuda.set_rng_state(tensors["random.cuda"], self._device)
        self._model.load_state_dict(model)
        self._optimizer.state.update(moments)
        self._optimizer.param_groups[0].update(rates)
        self.losses = losses


def _rate(value: Any) -> float | tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, list) else float(value)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
