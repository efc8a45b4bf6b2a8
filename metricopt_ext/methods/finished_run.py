"""A finished run, attached to a model: phi, and what the start replaced that it belongs to."""

import warnings
from pathlib import Path

from torch import nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import load_adapter
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.run_folder import ADAPTER, EVALUATIONS, IDENTITY, SEEDS, SETTINGS
from metricopt_ext.methods.tuned_settings import shown
from metricopt_ext.tasks.inference_file import INFERENCE, changed_inference
from metricopt_ext.tasks.settings import Settings, Value
from metricopt_ext.tasks.trajectories import TRAJECTORIES


def load_run(model: nn.Module, folder: str | Path, settings: Settings | None = None) -> Adapter:
    """Attach what a finished run kept to a model: phi, and whatever its start replaced.

    Settings of inference are not part of an adapter. With ``settings`` they are set on the model permanently, as far as
    it can hold them (`Settings.set_on`); a UserWarning gives code for the rest. Free settings belong to the metric
    only, and are left alone. Without ``settings`` a UserWarning says which non-default settings the run kept, and how
    to apply them.

    Args:
        model: The bare model, with the weights that the run was given; a UserWarning says if it has others. For a
            tool's run these are the weights that the tool trained or loaded for the seed.
        folder: An ``output_dir`` of `optimize_metric`; the output folder of a tool that ran one seed, or a seed's own
            folder in it; or the ``OUTPUT_DIR`` of a search with Detectron2.
        settings: Settings of inference, made for this model as in the run.

    Raises:
        FileFormatError: The folder holds no run, an unfinished one or several seeds; the message says which files are
            missing, or which folders there are. Or one of its files is corrupt, or ``settings`` are given of a run that
            tuned none.
        AdapterError: The adapter does not fit the model (see `load_adapter`). The model is then as it was.
        ValueError: ``settings`` lacks one that the run kept, or has another default for it than the run's model had.

    Examples:
        >>> adapter = load_run(model, "out/seed-0")  # doctest: +SKIP
    """
    finished = _finished(Path(folder))
    # First: of a damaged file the model gets nothing.
    said, values = (_settings_beside(finished), {}) if settings is None else ("", _values_of(finished, settings))
    adapter = load_adapter(model, finished / ADAPTER)
    if settings is not None:
        said = settings.set_on(model, values)
    if said:
        warnings.warn(said, stacklevel=2)
    return adapter


def _settings_beside(finished: Path) -> str:
    """Say which settings of inference a run kept that no model holds; empty if there are none."""
    file = finished / INFERENCE
    if not file.exists():
        return ""
    try:
        changed = changed_inference(file)
    except ModuleNotFoundError as error:  # a run needs no package to write them
        return f"{file} has settings of inference, and no one can tell which without {error.name}: install it"
    if not changed:
        return ""
    changes = ", ".join(f"{name} {shown(old)} -> {shown(new)}" for name, (old, new) in changed.items())
    return (
        f"{finished} was tuned with settings of inference that the model does not hold: {changes}; put them to use"
        f" by settings.applied(mo.load_inference({str(file)!r})), of the Settings that the run had, or give these to"
        " load_run, settings=, which sets what the model can hold"
    )


def _values_of(finished: Path, settings: Settings) -> dict[str, Value]:
    """Return the settings that a run kept, other than the model's own; those of the given Settings.

    Raises:
        ValueError: These lack one, or have another default.
    """
    file = finished / INFERENCE
    if not file.exists():
        raise FileFormatError(f"{finished} has no {INFERENCE}, as its run tuned no settings; leave settings out")
    changed = changed_inference(file)
    settings.complete({name: value for name, (_, value) in changed.items()})
    for name, (default, _) in changed.items():
        if default != (own := settings[name].default):
            raise ValueError(
                f"{file}: {name} was {shown(default)} by default, and is {shown(own)} by the given settings; make them"
                " of the model as the run had it"
            )
    return {name: value for name, (_, value) in changed.items()}


def _finished(folder: Path) -> Path:
    """Return the folder of the one run that a folder holds, which must have finished."""
    if (folder / ADAPTER).exists():
        return folder
    seeds = sorted((each for each in folder.glob(SEEDS) if each.is_dir()), key=lambda each: (len(each.name), each.name))
    if len(seeds) > 1:
        names = ", ".join(
            each.name if (each / ADAPTER).exists() else f"{each.name} (no {ADAPTER} yet)" for each in seeds
        )
        raise FileFormatError(f"{folder} holds several seeds, each with a model of its own; name one of {names}")
    known = any((folder / name).exists() for name in (IDENTITY, SETTINGS, TRAJECTORIES, EVALUATIONS))
    if not seeds and not known and (folder / "search").is_dir():  # as Detectron2's tools name it
        seeds = [folder / "search"]
    if seeds:
        return _finished(seeds[0])
    if not known and not (folder.match(SEEDS) and folder.is_dir()):
        raise FileFormatError(f"{folder} holds no run: it has neither {IDENTITY} nor folders {SEEDS}")
    raise FileFormatError(
        f"{folder} holds an unfinished run: {ADAPTER}, which is written last, is missing; finish it with the arguments"
        " of before and resume=True, or --resume of a tool"
    )
