"""Embeddings of data that are asked for again and again: what the model computes before phi is kept."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.before_phi import Cut, cut_before
from metricopt_ext.data.parts import part_size
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.kept_outputs import KeptOutputs, circumstances, digest_of, digest_of_model, structure_of_model
from metricopt_ext.utils.modes import trains
from metricopt_ext.utils.words import counted

WORTH = 0.25  # of a pass's work: what takes less of it before phi is not kept
STRUCTURES = 8  # of models, of which it is remembered where they are cut


def embed(model: nn.Module, x: Tensor) -> Tensor:
    """Return the embeddings, ``n x d``, of images, in batches; the caller sets evaluation mode."""
    return torch.cat([model(part) for part in x.split(part_size(x))])


class Cuts:
    """Where models are cut before phi, of the latest structures, and whether that is worth it.

    Args:
        setting: What says how much memory may be taken, for a warning.
    """

    def __init__(self, setting: str = "adapter.keep_gib") -> None:
        self.setting = setting
        self._made: OrderedDict[str, Cut | None] = OrderedDict()
        self._told = False

    def of(self, model: nn.Module, structure: str, example: Tensor) -> Cut | None:
        """Return where a model is cut; None where it is not, or where that is not worth it.

        Args:
            model: The model.
            structure: What `structure_of_model` says of it.
            example: An input, of one example.
        """
        if structure not in self._made:
            self._made[structure] = self._cut(model, example)
            if len(self._made) > STRUCTURES:
                self._made.popitem(last=False)
        return self._made[structure]

    def _cut(self, model: nn.Module, example: Tensor) -> Cut | None:
        try:
            layer, before, whole = _work_before_phi(model, Adapter(model).layers, example)
        except AdapterError:  # it has no phi
            return None
        if not before >= WORTH * whole > 0:
            return None
        try:
            cut = cut_before(model, layer)
        except AdapterError as error:
            self._tell(str(error))
            return None
        with FlopCounterMode(display=False) as work:
            features = cut.features(model, example)
        if isinstance(features, Tensor) and work.get_total_flops() >= WORTH * whole:
            return cut
        self._tell(f"what comes before {layer!r} is no single tensor")
        return None

    def leave_whole(self, structure: str, why: str) -> None:
        """Cut models of a structure no more."""
        self._made[structure] = None
        self._tell(why)

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"what is computed before phi is not kept, as {why}: each query computes all of it. Make the forward"
                f" pass one that torch.fx can trace, or place phi in a layer behind it; {self.setting}=0 turns"
                " caching and this warning off",
                stacklevel=5,
            )


class KeptFeatures:
    """Embeds the same data by models with other phi, to the last bit as `embed` does.

    What comes before the first layer that phi acts on is computed once for each part of the data, and anew where
    weights or BatchNorm's statistics there change. It is kept if it takes a fourth or more of what a pass multiplies.
    In training, with gradients, and where a model can't be cut (`cut_before`), it is run whole. Where it takes as much
    and can't be cut, one warning says so.

    Args:
        x: The data, ``n x ...``, which nothing may change.
        gib: Memory for what is kept, in GiB; what no longer fits is computed whenever it is needed, and one warning
            says so. 0 keeps nothing.

    Attributes:
        nbytes: Memory that is taken.
    """

    def __init__(self, x: Tensor, gib: float) -> None:
        self.x, self.gib, self.nbytes = x, gib, 0
        self._cuts = Cuts()
        self._kept: OrderedDict[str, dict[int, Tensor]] = OrderedDict()  # by what it depends on, and the first example
        self._told = False

    def embed(self, model: nn.Module) -> Tensor:
        """Return the embeddings, ``n x d``."""
        if not self.gib or trains(model) or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return embed(model, self.x)
        structure = structure_of_model(model)
        if (cut := self._cuts.of(model, structure, self.x[:1])) is None:
            return embed(model, self.x)
        state = f"{cut.state(model)} {circumstances(self.x.device)}"
        kept = self._kept.setdefault(state, {})
        self._kept.move_to_end(state)
        size, found = part_size(self.x), list[Tensor]()
        for at in range(0, len(self.x), size):
            features = kept[at] if at in kept else cut.features(model, self.x[at : at + size])
            changes = features._version
            found.append(cut.output(model, features))
            if features._version != changes:  # in place: it can't be used again
                self._cuts.leave_whole(structure, "it is changed in place afterwards")
                self._kept.clear()
                self.nbytes = 0
                return embed(model, self.x)
            if at not in kept:
                self._keep(state, at, features)
        return torch.cat(found)

    def _keep(self, state: str, at: int, features: Tensor) -> None:
        size, most = features.untyped_storage().nbytes(), int(self.gib * 2**30)
        while self.nbytes + size > most and len(self._kept) > 1:  # what other weights gave goes first
            _, gone = self._kept.popitem(last=False)
            self.nbytes -= sum(each.untyped_storage().nbytes() for each in gone.values())
        if self.nbytes + size <= most:
            self._kept[state][at] = features
            self.nbytes += size
        elif not self._told:
            self._told = True
            there = sum(len(each) for each in self._kept[state].values())
            warnings.warn(
                f"what is computed before phi of {there} of {counted(len(self.x), 'image')} fills"
                f" adapter.keep_gib={self.gib:g}; that of the others is computed whenever it is needed",
                stacklevel=3,
            )


class KeptPasses:
    """Passes of models over inputs that are given again and again, as batches of a dataset are, in evaluation mode.

    Outputs are the same to the last bit. What is kept is known by the inputs' content, and by weights and BatchNorm's
    statistics; a copy of it goes on, which what follows may change.

    Args:
        gib: Memory for what is kept, in GiB; what no longer fits is computed whenever it is needed, and one warning
            says so. 0 keeps nothing.
    """

    def __init__(self, gib: float) -> None:
        self.gib, self.kept, self.cuts = gib, KeptOutputs(gib, room=1.0), Cuts("keep_gib")

    def of(self, model: nn.Module, *, before_phi: bool = False) -> nn.Module:
        """Return what is called in place of a model, as long as its weights stay as they are.

        Args:
            model: A model of one input.
            before_phi: Whether all of it comes before phi; otherwise the part that does (`cut_before`), if it is
                worth keeping (`Cuts`).
        """
        return _KeptPass(self, model, before_phi) if self.gib else model


class _KeptPass(nn.Module):
    """A model that keeps what it computes before phi."""

    def __init__(self, passes: KeptPasses, model: nn.Module, before_phi: bool) -> None:
        super().__init__()
        self.passes, self.model, self.before_phi, self.structure, self.state = passes, model, before_phi, "", ""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)  # as a tester may ask for it

    def forward(self, x: Any, *others: Any, **named: Any) -> Any:
        """Return the model's output."""
        whole = torch.is_grad_enabled() or torch.is_inference_mode_enabled() or trains(self.model)
        if whole or others or named or not isinstance(x, Tensor) or not len(x):
            return self.model(x, *others, **named)
        if self.before_phi:
            self.state = self.state or digest_of_model(self.model)
            return self._kept(lambda: self.model(x), x)
        self.structure = self.structure or structure_of_model(self.model)
        if (cut := self.passes.cuts.of(self.model, self.structure, x[:1])) is None:
            return self.model(x)
        self.state = self.state or cut.state(self.model)
        return cut.output(self.model, self._kept(lambda: cut.features(self.model, x), x))

    def _kept(self, make: Callable[[], Any], x: Tensor) -> Any:
        key, part = f"{self.state} {circumstances(x.device)}", digest_of([x])
        output = self.passes.kept.get(key, part)
        if output is None:
            output = make()
            if not isinstance(output, Tensor):
                return output
            self.passes.kept.of(key, lambda: output, part=part, if_room=True)
        return output.clone()


def _work_before_phi(model: nn.Module, layers: list[str], example: Tensor) -> tuple[str, int, int]:
    """Return the layer of phi that a pass comes to first, and the floating-point operations up to it and of all."""
    reached = list[tuple[str, int]]()
    with FlopCounterMode(display=False) as work, ExitStack() as hooks:
        for name in layers:
            note = partial(_note, reached, name, work)
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(note, prepend=True))
        model(example)
    return *(reached[0] if reached else ("", 0)), work.get_total_flops()


def _note(reached: list[tuple[str, int]], layer: str, work: FlopCounterMode, *_: Any) -> None:
    reached.append((layer, work.get_total_flops()))
