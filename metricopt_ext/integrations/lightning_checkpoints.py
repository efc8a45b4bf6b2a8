"""What Lightning reloads after a fit, the best checkpoint and the last: where a search begins, and where it ends."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L

UNTUNED = ".untuned"  # ends the name of the file that keeps what tuned weights replaced


def load_best(trainer: L.Trainer, module: L.LightningModule) -> Callable[[], None]:
    """Load the weights of the best checkpoint of a fit, those that Lightning reloads, if it has one.

    A checkpoint that is no file here, or can't be read, is named by a warning, and the module keeps its weights.

    Returns:
        A function that puts back the weights that were there before.
    """
    before = {name: each.detach().clone() for name, each in module.state_dict().items()}

    def put_back() -> None:
        module.load_state_dict(before)

    path = best_of(trainer)
    if path is None:
        if named := getattr(trainer.checkpoint_callback, "best_model_path", ""):
            warnings.warn(f"{named} is no file here, so the search begins from the last weights", stacklevel=3)
        return put_back
    try:
        checkpoint = trainer.strategy.load_checkpoint(path)
        trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    except Exception as error:
        put_back()
        warnings.warn(f"{path} can't be read, so the search begins from the last weights: {error}", stacklevel=3)
    return put_back


def best_of(trainer: L.Trainer) -> Path | None:
    """Return the checkpoint that ``ckpt_path="best"`` names, if it is a file."""
    path = Path(getattr(trainer.checkpoint_callback, "best_model_path", ""))
    return path if path.is_file() else None


def reloaded(trainer: L.Trainer) -> list[Path]:
    """Return the checkpoints that ``ckpt_path="best"`` and ``"last"`` name, each file once.

    Of a resumed fit these names are a checkpoint's text, so a file that no callback of this fit writes to stays.
    """
    last = [Path(getattr(each, "last_model_path", "")) for each in trainer.checkpoint_callbacks]
    named = dict.fromkeys(path.resolve() for path in (best_of(trainer), *last) if path is not None and path.is_file())
    folders = [
        Path(each).resolve() for call in trainer.checkpoint_callbacks if (each := getattr(call, "dirpath", None))
    ]
    files = [path for path in named if any(path.is_relative_to(folder) for folder in folders)]
    for path in named.keys() - files:
        warnings.warn(f"{path} is in no folder of this fit's checkpoints, and stays without phi", stacklevel=4)
    return files


def save_tuned(trainer: L.Trainer) -> None:
    """Put the module's weights into the checkpoints that Lightning reloads, and keep copies as they were beside them.

    All else in a file stays: epoch, hyper-parameters, the optimizer's state. One that can't be read stays as a whole,
    and a warning names it.
    """
    state = trainer.strategy.lightning_module_state_dict()  # by all processes
    if trainer.is_global_zero:
        for path in reloaded(trainer):
            try:
                checkpoint = trainer.strategy.load_checkpoint(path)
            except Exception as error:
                warnings.warn(f"{path} lacks phi, as it can't be read: {error}", stacklevel=3)
                continue
            shutil.copy2(path, f"{path}{UNTUNED}")
            trainer.strategy.save_checkpoint({**checkpoint, "state_dict": state}, path)
    trainer.strategy.barrier("metricopt_ext: checkpoints")
