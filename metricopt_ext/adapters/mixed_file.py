"""A mixture of checkpoints whose model is not at hand, as phi: how much of each there is in a file that is written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_mixture
from metricopt_ext.adapters.mixture import Mixture
from metricopt_ext.adapters.modulation import OutputOffsets
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.skeleton import LOGITS, chosen
from metricopt_ext.errors import AdapterError
from metricopt_ext.runtime.identity import fingerprint_of_files
from metricopt_ext.utils.checkpoint_file import CheckpointFile
from metricopt_ext.utils.weights import has_mean
from metricopt_ext.utils.words import brief


class MixedFile:
    """What a mixture moves of a checkpoint: all of its floating tensors, and a bias besides if it gets offsets.

    All checkpoints are held in memory.

    Args:
        file: The checkpoint, phi = 0.
        others: The others, one to eight, of any kind of file; each has the first one's tensors.
        offsets: The key of a bias that gets an offset for each of its numbers.
        entry: The state dict's key in each of the others, as in `attach_mixture`.

    Attributes:
        adapter: Its phi has a weight for each of the others, then the offsets.

    Raises:
        DataError: A file can't be read, or has other tensors; the message has the file and the tensor.
        AdapterError: There are no others or more than eight, or the key is no bias.
    """

    def __init__(
        self, file: CheckpointFile, others: Sequence[Path], offsets: str | None = None, entry: str | None = None
    ) -> None:
        self.file, self.others, self.offsets = file, list(others), offsets
        if offsets is not None:
            chosen(file, [], offsets)  # refuses what is no bias
        model = _model_of(file)
        outputs = None if offsets is None else Outputs(_add_logits(model, offsets), LOGITS)
        self.adapter: Adapter = attach_mixture(model, self.others, outputs=outputs, entry=entry)

    def identity(self) -> dict[str, Any]:
        """Return what a run depends on besides the checkpoint."""
        return {"mix": fingerprint_of_files(self.others), "offsets": self.offsets}

    def described(self) -> list[dict[str, Any]]:
        """Return what moves, for a report."""
        return [{"checkpoint": str(path)} for path in self.others] + (
            [] if self.offsets is None else [{"offsets": self.offsets}]
        )

    def rows(self) -> list[list[str]]:
        """Return what moves as rows of a table: what, its kind, how many coordinates of phi it has."""
        rows = [[str(path), "weight in the mixture", "1"] for path in self.others]
        if self.offsets is not None:
            rows.append([self.offsets, "offsets", str(self.adapter.dim - len(self.others))])
        return rows

    @torch.no_grad()
    def tensors(self, phi: Tensor) -> dict[str, Tensor]:
        """Return the tensors that phi, ``d``, moves, by key, in the checkpoint's own types; none at phi = 0."""
        if not phi.any():
            return {}
        moved: dict[str, Tensor] = {}
        with self.adapter.using(phi.to(self.adapter.phi)):
            for layer, modulation in self.adapter.modulations():
                if isinstance(modulation, Mixture):
                    moved = modulation.mixed(layer)
                else:
                    assert isinstance(modulation, OutputOffsets)
                    assert self.offsets is not None
                    bias = next(key for key in self.file.aliases(self.offsets) if key in moved)  # the first if tied
                    moved[bias] = modulation(moved[bias][None])[0]
        return moved


def _model_of(file: CheckpointFile) -> nn.Module:
    """Return a module that has a checkpoint's tensors under their keys; tied ones are one parameter."""
    model, tied = nn.Module(), dict[str, nn.Parameter]()
    for key in file.shapes:
        first = next((other for other in file.aliases(key) if other in tied), key)
        value, (above, _, name) = file.tensor(key), key.rpartition(".")
        try:
            module = _parent(model, key) if not above else _parent(model, f"{above}.")
            if has_mean(value):
                tied.setdefault(first, nn.Parameter(value))
                module.register_parameter(name, tied[first])
            else:
                module.register_buffer(name, value)
        except KeyError as error:
            raise AdapterError(f"{brief(key)} can't be the name of a tensor ({brief(error)})") from error
    return model


def _add_logits(model: nn.Module, key: str) -> str:
    """Add a layer of logits whose bias is the model's own tensor of a key, and return its name."""
    above, _, name = key.rpartition(".")
    bias = model.get_submodule(above).get_parameter(name)
    with torch.device("meta"):
        layer = nn.Linear(1, len(bias))
    del layer.weight
    layer.weight = torch.zeros(len(bias), 1)  # no parameter, so that no file has to have it
    layer.bias = bias
    called = "logits"
    while called in model._modules or called in model._parameters or called in model._buffers:
        called += "_"
    model.add_module(called, layer)  # last, so that the bias goes by its key
    return called


def _parent(model: nn.Module, name: str) -> nn.Module:
    """Return the module that a dotted name is below, making it where there is none."""
    for part in name.split(".")[:-1]:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    return model
