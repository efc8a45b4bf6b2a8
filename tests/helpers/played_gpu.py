"""A GPU that the CPU plays: tensors that say they are on one, and refuse to meet those that are not.

It shows without a GPU that nothing is left on another device. `register` can't be undone, so a process of its own is
where it belongs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "gpu"
aten = torch.ops.aten
MOVES = (aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default)  # these may meet both devices
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


def can_play() -> bool:
    """Whether this torch has backends that are written in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def register() -> torch.device:
    """Give the device its name; a module that moves there gets new parameters, as they are of another class."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="gpu") is then a copy that is seen below
    return torch.device(NAME, 0)


class PlayedTensor(Tensor):
    """A tensor of the CPU that says it is elsewhere."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "PlayedTensor":
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: PlayedTensor = Tensor._make_wrapper_subclass(cls, held.shape, device=torch.device(NAME, 0), **layout)
        made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(function, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert a tensor on {self.device} to numpy: copy it to the CPU first")
        return self.held.numpy()

    def tolist(self) -> Any:
        return self.held.tolist()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = PlayedTensor(self.held.clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied


class PlayedGPU(TorchDispatchMode):
    """In this block tensors are also made on the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(function, args, kwargs or {})


def called(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what was asked of the device, and refuse what a device refuses."""
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    there = any(isinstance(each, PlayedTensor) for each in given)
    if there and function not in MOVES:
        met = given
        if function in INDEXED and isinstance(args[0], PlayedTensor):
            met = [each for each in (args[0], *args[2:]) if isinstance(each, Tensor)]  # indices may be the CPU's
        for each in met:
            if each.dim() and not isinstance(each, PlayedTensor):
                raise RuntimeError(f"{function}: expected all tensors on the same device, found {NAME}:0 and cpu")
    args_here, kwargs_here = tree_map(_here, (args, kwargs))
    named = kwargs.get("device")
    if named is not None:
        kwargs_here |= {"device": torch.device("cpu")}
        there = torch.device(named).type == NAME
    found = function(*args_here, **kwargs_here)
    if function is aten._local_scalar_dense.default:
        return found
    if function is aten.copy_.default:
        return args[0]
    in_place = {id(each.held): each for each in given if isinstance(each, PlayedTensor)}

    def placed(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return in_place[id(each)] if id(each) in in_place else PlayedTensor(each)

    return tree_map(placed, found) if there else found


def _here(each: Any) -> Any:
    return each.held if isinstance(each, PlayedTensor) else each
