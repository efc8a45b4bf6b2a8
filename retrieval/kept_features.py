"""Embeddings of data that are asked for again and again: what the model computes before phi is kept."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.affine import weight_of
from metricopt_ext.adapters.before_phi import cut_before_phi, why_uncut
from metricopt_ext.adapters.calls import CONVOLUTIONS
from metricopt_ext.adapters.sequence import Cut, attributes_of, modules_of, run
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


class _Cut(NamedTuple):
    """A cut, and what tells whether the first part computes the same.

    Attributes:
        cut: The cut.
        before: Has the modules and tensors that the first part uses, of the latest model.
    """

    cut: Cut
    before: nn.Module

    def state(self, model: nn.Module) -> str:
        """Return what identifies all that the first part of a model depends on but its input."""
        modules, tensors = modules_of(self.cut.before), attributes_of(self.cut.before)
        self.before._modules = {name.replace(".", " "): model.get_submodule(name) for name in modules}
        self.before._buffers = {name.replace(".", " "): _attribute(model, name) for name in tensors}
        return f"{self.cut.before} {digest_of_model(self.before)}"


class Cuts:
    """Where models are cut before phi, of the latest structures, and whether that is worth it.

    Args:
        setting: What says how much memory may be taken, for a warning.
    """

    def __init__(self, setting: str = "adapter.keep_gib") -> None:
        self.setting = setting
        self._made: OrderedDict[str, _Cut | None] = OrderedDict()
        self._told = False

    def of(self, model: nn.Module, structure: str, example: Tensor) -> _Cut | None:
        """Return where a model is cut; None where it is not, or where that is not worth it.

        Args:
            model: The model.
            structure: What `structure_of_model` says of it.
            example: An input, of one example.
        """
        if structure not in self._made:
            cut = cut_before_phi(model)
            worth = cut is not None and _is_worth(model, cut, example)
            if not worth and (layer := _first_late_layer(model, example)):
                self._tell(why_uncut(model, layer))
            self._made[structure] = _Cut(cut, nn.Module()) if cut is not None and worth else None
            if len(self._made) > STRUCTURES:
                self._made.popitem(last=False)
        return self._made[structure]

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
                stacklevel=4,
            )


class KeptFeatures:
    """Embeds the same data by models with other phi, to the last bit as `embed` does.

    What comes before the first layer that phi acts on is computed once for each part of the data, and anew where
    weights or BatchNorm's statistics there change. It is kept if it takes a fourth or more of what linear layers and
    convolutions multiply in a pass. In training, with gradients, and where a model can't be cut (`cut_before_phi`), it
    is run whole. Where it takes as much and can't be cut, one warning says so.

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
        if (made := self._cuts.of(model, structure, self.x[:1])) is None:
            return embed(model, self.x)
        cut, state = made.cut, f"{made.state(model)} {circumstances(self.x.device)}"
        kept = self._kept.setdefault(state, {})
        self._kept.move_to_end(state)
        size, found = part_size(self.x), list[Tensor]()
        for at in range(0, len(self.x), size):
            features = kept[at] if at in kept else run(model, cut.before, cut.given, self.x[at : at + size], cut.kept)
            changes = features._version
            found.append(run(model, cut.after, cut.kept, features))
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
            before_phi: Whether all of it comes before phi; otherwise the part that does (`cut_before_phi`), if it is
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
        if (made := self.passes.cuts.of(self.model, self.structure, x[:1])) is None:
            return self.model(x)
        cut, self.state = made.cut, self.state or made.state(self.model)
        features = self._kept(lambda: run(self.model, cut.before, cut.given, x, cut.kept), x)
        return run(self.model, cut.after, cut.kept, features)

    def _kept(self, make: Callable[[], Any], x: Tensor) -> Any:
        key, part = f"{self.state} {circumstances(x.device)}", digest_of([x])
        output = self.passes.kept.get(key, part)
        if output is None:
            output = make()
            if not isinstance(output, Tensor):
                return output
            self.passes.kept.of(key, lambda: output, part=part, if_room=True)
        return output.clone()


def _is_worth(model: nn.Module, cut: Cut, example: Tensor) -> bool:
    with _counted(model) as work:
        features = run(model, cut.before, cut.given, example, cut.kept)
        if not isinstance(features, Tensor):
            return False
        before = sum(work)
        run(model, cut.after, cut.kept, features)
    return before >= WORTH * sum(work) > 0


def _first_late_layer(model: nn.Module, example: Tensor) -> str:
    """Return the first layer that phi acts on if what comes before it is worth keeping; else nothing."""
    reached = list[tuple[str, int]]()
    try:
        layers = {name: model.get_submodule(name) for name in Adapter(model).layers}
    except AdapterError:
        return ""
    with _counted(model) as work:
        handles = [
            layer.register_forward_pre_hook(lambda *_, name=name: reached.append((name, sum(work))))
            for name, layer in layers.items()
        ]
        try:
            model(example)
        finally:
            for handle in handles:
                handle.remove()
    name, before = reached[0] if reached else ("", 0)
    return name if before >= WORTH * sum(work) > 0 else ""


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """Yield a list to which each linear layer and convolution that is run adds how often it multiplies."""
    work = list[int]()

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        weight = weight_of(layer)
        work.append(weight.numel() * output.numel() // weight.shape[0])

    layers = [each for each in model.modules() if isinstance(each, (nn.Linear, *CONVOLUTIONS))]
    handles = [each.register_forward_hook(count) for each in layers]
    try:
        yield work
    finally:
        for handle in handles:
            handle.remove()


def _attribute(model: nn.Module, name: str) -> Any:
    owner, _, own = name.rpartition(".")
    return getattr(model.get_submodule(owner), own)
