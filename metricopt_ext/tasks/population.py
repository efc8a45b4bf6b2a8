"""How many phi are computed in one forward pass, where nobody has said: as many as fit a memory, if the model can."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from metricopt_ext.adapters.calls import eager
from metricopt_ext.adapters.mixture import Mixture
from metricopt_ext.utils.kept_modules import KeptModules
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief

SIZES = (4, 16, 32)  # that may be chosen besides 1
MEMORY = 2**30  # bytes that the activations of a chosen population may take
NEAR = 0.05  # size of a coordinate of the second phi of two that are computed together

LOGGER = logging.getLogger(__name__)

# Losses, ``n``, and gradients, ``n x d``, of phi, ``n x d``, on a batch each; one row is computed without ``vmap``.
Compute = Callable[[Tensor, Sequence[Any]], tuple[Tensor, Tensor]]


class Population(int):
    """A number of phi in one forward pass that was chosen, where one that was given is an ordinary integer.

    Args:
        number: The number.
        why: Why it was chosen, a line; empty without a loss.
        basis: What it depends on: objects that are compared by identity.
    """

    why: str
    basis: tuple[Any, ...]

    def __new__(cls, number: int, why: str, basis: tuple[Any, ...] = ()) -> "Population":
        """Make one."""
        made = super().__new__(cls, number)
        made.why, made.basis = why, basis
        return made

    def __reduce__(self) -> Any:
        """Return what a copy gets: not the basis, as a copied model is another."""
        return Population, (int(self), self.why)

    def stands_on(self, basis: tuple[Any, ...]) -> bool:
        """Whether it was chosen for the same objects."""
        return len(basis) == len(self.basis) and all(a is b for a, b in zip(basis, self.basis, strict=True))

    @property
    def line(self) -> str:
        """What was chosen and why, in one line."""
        return f"population {int(self)}: {self.why}"


class Activations(NamedTuple):
    """What one forward pass holds.

    Attributes:
        size: Bytes: of what is kept for the backward pass and is none of the model's own, of the batch, and of the
            largest tensor beside.
        rounding: The relative rounding error of the least precise numbers that are kept.
    """

    size: int
    rounding: float


def choose(model: nn.Module, compute: Compute, batches: Sequence[Any], origin: Tensor) -> Population:
    """Return the population for a model and its loss, as two first batches show it; the model is left as it was.

    It is the largest of 1, 4, 16 and 32 whose activations on the first batch take at most 1 GiB. They are counted from
    the sizes of tensors, so that machines agree. Before more than 1 is taken, two phi are computed together, losses and
    gradients, and must agree with each alone.

    Args:
        model: The adapted model.
        compute: Computes losses and gradients.
        batches: The first batch of two tasks.
        origin: phi = 0, ``d``.
    """
    if any(isinstance(module, Mixture) for module in model.modules()):
        return Population(1, "each phi of a mixture has a model of its own in memory")
    before = KeptModules(model)
    with _attributes_kept(model), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return _chosen(model, compute, batches, origin)
        finally:
            before.put_back()
            for each in said:
                LOGGER.debug("on the first batch: %s", each.message)


def _chosen(model: nn.Module, compute: Compute, batches: Sequence[Any], origin: Tensor) -> Population:
    try:
        needed = activations(model, lambda: compute(origin[None], batches[:1]), batches[0])
    except Exception as error:  # which the search says in its own words
        LOGGER.debug("the loss of the first batch fails: %s", brief(error))
        return Population(1, "the loss of the first batch fails")
    fitting = [size for size in SIZES if size * needed.size <= MEMORY]
    if not fitting:
        return Population(
            1, f"the activations of {SIZES[0]} batches take {amount(SIZES[0] * needed.size)}, over {amount(MEMORY)}"
        )
    if why := _why_one_by_one(compute, batches, origin, needed.rounding):
        return Population(1, why)
    chosen = fitting[-1]
    within = f"the activations of {chosen} batches take {amount(chosen * needed.size)} of {amount(MEMORY)}"
    return Population(chosen, within)


def activations(model: nn.Module, run: Callable[[], Any], batch: Any) -> Activations:
    """Return what a forward pass holds at most, counted from sizes.

    Args:
        model: Its parameters and buffers don't count.
        run: Runs a forward pass, and a backward pass or not.
        batch: The inputs, which count in full.
    """
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers()) if _stored(each)}
    inputs = [each for each in tree_leaves(batch) if isinstance(each, Tensor)]
    own |= {each.untyped_storage().data_ptr() for each in inputs if _stored(each)}
    kept: list[Tensor] = []  # alive, so that no two have the same place

    def keep(tensor: Tensor) -> Tensor:
        if not _stored(tensor) or tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor.detach())
        return tensor

    with eager(), _Largest() as largest, saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    floats = [each.dtype for each in kept if each.is_floating_point()]
    rounding = max((torch.finfo(each).eps for each in floats), default=torch.finfo(torch.float32).eps)
    return Activations(_total(kept) + sum(map(_size, inputs)) + largest.size, rounding)


class _Largest(TorchFunctionMode):
    """Notes the size in bytes of the largest tensor that a function returns."""

    size = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.size = max(self.size, _size(each))
        return result


def _total(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, of which several may be parts of one."""
    parts: dict[int, dict[Any, int]] = {}
    for each in tensors:
        place, part = (
            (each.untyped_storage().data_ptr(), (each.data_ptr(), each.shape, each.stride()))
            if _stored(each)
            else (-id(each), id(each))
        )
        parts.setdefault(place, {})[part] = _size(each)
    whole = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if _stored(each)}
    return sum(min(sum(sizes.values()), whole.get(place, sum(sizes.values()))) for place, sizes in parts.items())


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _stored(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie in one place, as a sparse one's don't."""
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def _why_one_by_one(compute: Compute, batches: Sequence[Any], origin: Tensor, rounding: float) -> str:
    """Return why several phi can't be computed together; empty if they can."""
    if not alike(batches):
        return "the batches of two tasks differ in shape"
    first = [batches[0]] * 2
    second = torch.randn(len(origin), generator=generator(0, "population"), dtype=torch.float64).to(origin) * NEAR
    phi = torch.stack([origin, second])
    alone = [compute(phi[row : row + 1], first[:1]) for row in range(2)]
    try:
        loss, gradient = compute(phi, first)
    except Exception as error:  # of any kind: the model's own code meets what it was not written for
        LOGGER.debug("torch.func.vmap, of two phi: %s: %s", type(error).__name__, error)
        return "torch.func.vmap can't compute this model and loss for two phi at once"
    most = _precision(origin, rounding) ** 0.5
    for row, (own_loss, own_gradient) in enumerate(alone):
        off = float((loss[row] - own_loss[0]).abs()) / max(1.0, float(own_loss[0].abs()))
        turned = float((gradient[row] - own_gradient[0]).norm()) / max(float(own_gradient[0].norm()), 1e-30)
        if not (off <= most and turned <= most):
            LOGGER.debug("of two phi at once, losses differ by %.3g and gradients by %.3g", off, turned)
            return "two phi at once have other losses or gradients than one by one"
    return ""


def _precision(origin: Tensor, rounding: float) -> float:
    """Return the relative error of single operations, which is larger where a GPU's matrix units round their inputs."""
    cuda = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return max(rounding, 2.0**-10) if origin.device.type == "cuda" and cuda else rounding


class Together(list[Any]):
    """Batches of several tasks that are held once: their tensors are rows of those in ``stacked``.

    Args:
        rows: The batches.
        stacked: The same tree, with the tensors of all, ``n x ...``, in the place of each one's.
    """

    def __init__(self, rows: Sequence[Any], stacked: Any) -> None:
        super().__init__(rows)
        self.stacked = stacked


def together(batch_of: Callable[[int], Any], indices: Sequence[int]) -> list[Any]:
    """Return the batches of some tasks, each copied into its rows as it comes; a plain list if they can't be stacked.

    So they take their own bytes and those of one batch more; stacked at the end, they would take twice their own.

    Args:
        batch_of: Returns the batch of a task.
        indices: The tasks, one at least.
    """
    rows: list[Any] = []
    stacked: Any = None
    for row, index in enumerate(indices):
        batch = batch_of(index)
        if row == 0 and len(indices) > 1 and all(map(_can_be_copied, tree_leaves(batch))):
            stacked = tree_map(lambda leaf: leaf.new_empty((len(indices), *leaf.shape)), batch)
        if row > 0 and not alike([rows[0], batch]):
            stacked = None
        rows.append(batch if stacked is None else _copied(batch, stacked, row))
        del batch  # before the next is made
    return rows if stacked is None else Together(rows, stacked)


def _copied(batch: Any, stacked: Any, row: int) -> Any:
    """Copy a batch into a row of tensors, ``n x ...`` each, and return that row."""
    return tree_map(lambda whole, leaf: whole[row].copy_(leaf), stacked, batch)


def _can_be_copied(leaf: Any) -> bool:
    """Whether a copy of a leaf is as good as itself: it is a plain tensor, without a history or other strides."""
    plain = type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized
    return plain and leaf.is_contiguous() and not leaf.requires_grad


def alike(batches: Sequence[Any]) -> bool:
    """Whether batches can be stacked: the same structure of tensors of the same shapes and types."""
    flat = [tree_flatten(batch) for batch in batches]
    leaves, structure = flat[0]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return True  # what vmap says to that, it says
    return all(
        other == structure
        and all(
            isinstance(each, Tensor) and (each.shape, each.dtype) == (leaf.shape, leaf.dtype)
            for each, leaf in zip(others, leaves, strict=True)
        )
        for others, other in flat[1:]
    )


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back plain attributes of modules: what a model caches under ``vmap`` is of no use outside."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            now = vars(module)
            for name in [name for name in now if name not in attributes]:
                del now[name]
            now.update(attributes)


def amount(size: float) -> str:
    """Return bytes as text.

    Examples:
        >>> amount(2**30), amount(3 * 2**19)
        ('1 GiB', '1.5 MiB')
    """
    unit, name = (2**30, "GiB") if size >= 2**29 else (2**20, "MiB")
    return f"{size / unit:.3g} {name}"
