"""What a model calls the tensors of a file: wrappers that trained it put parts before, or into, their names."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

# Parts of names that only wrappers put there, wherever they are: torch.compile, activation checkpointing, FSDP.
PRIVATE = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# Names that wrappers have for the whole model: DataParallel and its kin, Lightning's modules, our embedders.
WRAPPERS = ("module", "model", "trunk")
UNTRAINED = ("num_batches_tracked",)  # the last parts of names that older files lack
COUNTERS = ("n_averaged",)  # beside the model, of torch.optim.swa_utils.AveragedModel


class Names(NamedTuple):
    """How a file's names are read.

    Attributes:
        names: The model's name of each tensor, by the file's.
        left_out: Names of the file that are of something else than the model.
    """

    names: dict[str, str]
    left_out: list[str]


def names_in_model(names: Collection[str], own: Collection[str]) -> Names:
    """Return what a model calls the tensors of a file.

    A prefix that is made of `WRAPPERS` is left out if what follows it are most of the model's names. Parts within the
    names go if they are `PRIVATE`, or ``module`` where the model has no such part. A model that is wrapped
    itself takes the names of what it wraps.

    Args:
        names: The file's names.
        own: The model's names.

    Returns:
        The file's own names if no other reading fits more of them.
    """
    needed = {name for name in own if not name.endswith(UNTRAINED)}
    best, most = Names({name: name for name in names}, []), len(needed & set(names))
    inner = [part for part in (*PRIVATE, "module") if not any(part in name.split(".") for name in own)]
    for dropped in ((), tuple(part for part in inner if part in PRIVATE), tuple(inner)):
        shorter = {name: _without(name, dropped) for name in names}
        if len(set(shorter.values())) < len(shorter):
            continue  # the parts tell tensors apart
        for added in dict.fromkeys(("", wrapper_of(own))):
            wanted = {name.removeprefix(added) for name in needed}
            prefix, found = _prefix(shorter.values(), wanted)
            if found > most:
                most = found
                read = {
                    name: added + short.removeprefix(prefix)
                    for name, short in shorter.items()
                    if short.startswith(prefix)
                }
                left = [name for name in names if name not in read and name not in COUNTERS]
                best = Names(read, left)
    return best


def _without(name: str, dropped: tuple[str, ...]) -> str:
    return ".".join(part for part in name.split(".") if part not in dropped)


def wrapper_of(own: Iterable[str]) -> str:
    """Return the wrapper that all of a model's names begin with, which those of a file may lack; empty if none."""
    first = {name.partition(".")[0] for name in own}
    return next((f"{part}." for part in first if len(first) == 1 and part in WRAPPERS), "")


def _prefix(names: Iterable[str], wanted: Collection[str]) -> tuple[str, int]:
    """Return the shortest of the wrappers' prefixes after which most of the wanted names follow, and how many do."""
    counts = Counter[str]()
    for name in names:
        parts = name.split(".")
        for at in range(len(parts)):
            if not {*parts[:at]} <= {*WRAPPERS, *PRIVATE}:
                break
            if ".".join(parts[at:]) in wanted:
                counts["".join(f"{part}." for part in parts[:at])] += 1
    return max(counts.items(), key=lambda each: (each[1], -len(each[0])), default=("", 0))
