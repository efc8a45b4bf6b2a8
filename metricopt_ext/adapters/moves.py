"""What phi does: it moves named tensors, by FiLM, an input bias, offsets of logits, LoRA's scales or a mixture.

A `Move` is a pure function ``move(phi, base) -> {key: tensor}`` of phi, ``d``, and of the tensors at phi = 0. It is
differentiable in phi, works inside ``torch.func.vmap``, and returns the base to the last bit at phi = 0.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metricopt_ext.utils.weights import has_mean

AdapterKind = Literal["film", "input_bias", "outputs", "lora", "mixture"]

GENERATOR = "normal/1"  # names how the matrices are drawn; a change of the draws needs a new name

MATRIX = "matrices."  # begins the names of matrices in a file; the layer's, which is empty for a mixture, follows

WEIGHTS = (-0.5, 1.5)  # of a mixture, each is within; a checkpoint's own is 1
VARIANCE = 0.1  # of the base's, which a mixture of variances does not fall below


class KeepsPrecision(nn.Module):
    """A module that computes in single precision or better, whatever the model around it is cast to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            rounded = result.is_floating_point() and result.dtype.itemsize < torch.float32.itemsize
            return tensor.to(result.device) if rounded else result

        return super()._apply(cast, recurse)  # type: ignore[no-untyped-call]


class Move(KeepsPrecision):
    """How phi moves some tensors.

    Args:
        keys: Their names in the model's state dict.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        super().__init__()
        self.keys: tuple[str, ...] = tuple(keys)

    @property
    def channels(self) -> int:
        """Number of channels that are moved, or of logits, factors or checkpoints."""
        return next(self.buffers()).shape[0]

    def forward(self, phi: Tensor, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what phi, ``d``, makes of the tensors at phi = 0, which have at least phi's precision."""
        raise NotImplementedError


class Film(Move):
    """Feature-wise linear modulation ``h * (1 + A phi) + B phi`` of a layer's output (paper, Fig. S1b), per channel.

    The layer ends in ``w * x + b``, so that it is ``w (1 + A phi)`` and ``b (1 + A phi) + B phi``.

    Args:
        keys: Of the weight, and of the bias if there is one.
        A: ``C x d``; the first columns of phi count.
        B: ``C x d``; None without a bias.
        origin: What the layer adds to its weight before it multiplies, 1 in Gemma's norms.
    """

    A: Tensor
    B: Tensor | None

    def __init__(self, keys: Iterable[str], A: Tensor, B: Tensor | None, origin: float = 0.0) -> None:
        super().__init__(keys)
        self.origin: float = origin
        self.register_buffer("A", A, persistent=False)
        if B is not None:
            self.register_buffer("B", B, persistent=False)

    def forward(self, phi: Tensor, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scale the weight, ``C x ...``, and the bias, ``C``, and shift the bias."""
        weight, *bias = (base[key] for key in self.keys)
        scale = times(self.A, phi)
        moved = [weight + (weight + self.origin) * scale.view(-1, *[1] * (weight.dim() - 1))]
        if bias:
            moved.append(bias[0] * (1 + scale) + times(self.get_buffer("B"), phi))
        return dict(zip(self.keys, moved, strict=True))


class InputBias(Move):
    """Dynamic biases of a fully connected network, ``W x + b + C phi`` (paper, section 4.2 and Fig. S1a).

    This is the same as concatenating phi to the layer's input with frozen new weights C.

    Args:
        key: Of the bias.
        C: ``features x d``; the first columns of phi count.
    """

    C: Tensor

    def __init__(self, key: str, C: Tensor) -> None:
        super().__init__([key])
        self.register_buffer("C", C, persistent=False)

    def forward(self, phi: Tensor, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shift the bias, ``features``."""
        (key,) = self.keys
        return {key: base[key] + times(self.C, phi)}


class Offsets(Move):
    """Offsets and a temperature of the logits, ``h * exp(t) + scale * o`` with o and t at phi's end (see `Outputs`).

    Decision thresholds (Provost and Fawcett 2001) and logit adjustment (Menon et al. 2021) are such offsets, and a
    temperature (Guo et al. 2017) such a factor, so that a search over phi includes them.

    Args:
        keys: Of the bias; before it that of the weight, with a temperature.
        at: Which coordinates of phi are o, ``C`` of them; t is the last of phi.
        scale: Logits per unit of o.
    """

    def __init__(self, keys: Sequence[str], at: slice, scale: float) -> None:
        super().__init__(keys)
        self.at: slice = at
        self.scale: float = scale

    @property
    def channels(self) -> int:
        """Number C of logits."""
        return int(self.at.stop - self.at.start)

    def forward(self, phi: Tensor, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Multiply the weight, ``C x ...``, and the bias, ``C``, by ``exp(t)``, and shift the bias."""
        *weight, bias = self.keys
        offsets = self.scale * phi[self.at]
        if not weight:
            return {bias: base[bias] + offsets}
        factor = phi[-1].exp()
        return {weight[0]: base[weight[0]] * factor, bias: base[bias] * factor + offsets}


class LoraScale(Move):
    """A factor on a layer's low-rank change, ``W x + (1 + phi_i) s B A x``, with a coordinate i for the layer alone.

    Args:
        keys: Of B, and of its bias if there is one: PEFT's own functions merge and save these.
        index: The coordinate.
    """

    def __init__(self, keys: Iterable[str], index: int) -> None:
        super().__init__(keys)
        self.index: int = index

    @property
    def channels(self) -> int:
        """One factor."""
        return 1

    def forward(self, phi: Tensor, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scale B, of any shape."""
        return {key: base[key] * (1 + phi[self.index]) for key in self.keys}


class Mixture(Move):
    """``w_0 base + w_1 theta_1 + ... + w_k theta_k``, where ``w_0`` is 1 - sum w.

    The weights w are phi's first k coordinates, each cut off at -0.5 and 1.5; phi = 0 is the base and a unit vector a
    checkpoint. Floating tensors of the state dict are mixed, as model soups are (Wortsman et al., 2022, "Model
    soups"), along directions that may lead beyond the models (Ilharco et al., 2023, "Editing models with task
    arithmetic"). Infinite numbers are the base's, as a sum of infinities would be none. A BatchNorm's variance is kept
    above a tenth of the base's.

    Args:
        base: The tensors at phi = 0, by name.
        states: The checkpoints' tensors by the same names; names that are missing are the base's.
    """

    def __init__(self, base: Mapping[str, Tensor], states: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(base)
        self.count: int = len(states)
        self.infinite: set[str] = {
            key for key, own in base.items() if not own.is_meta and not bool(own.isfinite().all())
        }
        for file, state in enumerate(states):
            for index, (key, own) in enumerate(base.items()):
                value = state.get(key, own).detach().to(own, copy=True)
                value = value.where(own.isfinite(), 0) if key in self.infinite else value
                self.register_buffer(f"of{file}_{index}", value, persistent=False)

    @property
    def channels(self) -> int:
        """Number k of checkpoints."""
        return self.count

    def forward(self, phi: Tensor, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mixed tensors."""
        weights = phi[: self.count].clamp(*WEIGHTS)
        moved: dict[str, Tensor] = {}
        for index, key in enumerate(self.keys):
            if (own := base.get(key)) is None:
                continue  # it is not asked for
            total = (1 - weights.sum()) * (own.where(own.isfinite(), 0) if key in self.infinite else own)
            for file, weight in enumerate(weights):
                total = total + weight * self.get_buffer(f"of{file}_{index}").to(own)
            if key.rpartition(".")[2] == "running_var":
                total = total.maximum(VARIANCE * own)
            moved[key] = total.where(own.isfinite(), own) if key in self.infinite else total
        return moved


def times(matrix: Tensor, phi: Tensor) -> Tensor:
    """Return ``matrix @ phi``, of as many of phi's first coordinates as the matrix has columns."""
    return matrix @ phi[: matrix.shape[1]]


def moved(moves: Iterable[Move], phi: Tensor, base: Callable[[str], Tensor], keys: Container[str]) -> dict[str, Tensor]:
    """Return what moves, one after another, make of tensors, by key, in the tensors' own types.

    Args:
        moves: The moves.
        phi: ``d``, which autocast does not round.
        base: Returns a tensor at phi = 0 by its key.
        keys: Of the tensors that are wanted; those of a layer go together.
    """
    types: dict[str, torch.dtype] = {}  # torch.compile takes no dict[...]()
    found: dict[str, Tensor] = {}
    device = phi.device.type
    rounds = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if rounds else nullcontext():
        for move in moves:
            for key in (wanted := [key for key in move.keys if key in keys]):
                if key not in found:
                    own = base(key).detach()
                    types[key] = own.dtype
                    found[key] = own.to(torch.promote_types(own.dtype, phi.dtype))  # a half would hide a small step
            found |= move(phi, found) if wanted else {}
    return {key: each.to(types[key]) for key, each in found.items()}


def gaussian(rows: int, columns: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Draw entries from N(0, 1/columns), ``rows x columns``, so that a row times phi is about as large as phi's."""
    return torch.randn(rows, columns, generator=rng, dtype=torch.float64).div(columns**0.5).to(dtype)


def floating(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict that have a mean by name, each once."""
    known = {id(each) for each in model.state_dict(keep_vars=True).values() if isinstance(each, Tensor)}
    own = (*model.named_parameters(), *model.named_buffers())
    return {name: each for name, each in own if id(each) in known and has_mean(each)}


def saved_states(base: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the checkpoints of a mixture's file by the names of the base's tensors.

    Raises:
        ValueError, KeyError: Their tensors are others than the base's.
    """
    count, states = 0, list[dict[str, Tensor]]()
    while f"{MATRIX}.of{count}_0" in tensors:
        states.append({key: tensors[f"{MATRIX}.of{count}_{index}"] for index, key in enumerate(base)})
        count += 1
    for key, own in base.items():
        if wrong := [state[key].shape for state in states if state[key].shape != own.shape]:
            raise ValueError(f"a checkpoint's {key!r} has shape {tuple(wrong[0])}, the model's {tuple(own.shape)}")
    return states
