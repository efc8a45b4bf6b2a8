"""The output folder of a tool's run: its settings, which of them may change, and what the run was made of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.experiment.own_metric import code_of_own
from metricopt_ext.methods.folder import FORMAT, SEEDS, SETTINGS
from metricopt_ext.runtime.identity import claim, fingerprint_of_files
from metricopt_ext.utils.files import read_json, write_json

FILES = "names and sizes of the data's files"  # beside the settings
CODE = "own code"  # beside them too: of the functions that they name

# Settings of a tool's run that may change on resuming: which seeds to run, and how.
RUN_AGAIN_KEYS = {"seed", "seeds", "workers", "device"}
GROWS = "queries"  # may become more, where the strategy can go on
OF_A_BUDGET = ("record.json", "*_queries.jsonl", "*_ends.jsonl")  # what a seed keeps that is of its number of queries


def refuse_among_data(folder: Path, files: Sequence[Path]) -> None:
    """Refuse an output folder in a folder of the data, before it is made.

    Raises:
        ConfigError: It is in one.
    """
    for root in files:
        if root.is_dir() and folder.resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"--output-dir {folder} is in {root}, whose files are the data; name another folder")


def open_run(
    folder: Path, settings: dict[str, Any], resume: bool, files: Sequence[Path] = (), *, grows: bool = False
) -> None:
    """Claim the output folder for a tool's run; seeds and queries may be added to it, other settings may not change.

    A run that failed before it made a ``seed-N`` folder has no claim. Neither may the code of functions change
    that the settings name as ``MODULE:FUNCTION``.

    Args:
        folder: The output folder.
        settings: The run's.
        resume: Continue what an earlier run left there.
        files: Files and folders of the data, whose names and sizes may not change either.
        grows: Whether its seeds can go on with more ``queries``; the other methods' searches then begin anew.

    Raises:
        FileFormatError: The folder holds a run, and ``resume`` is False or its settings differ.
        ConfigError: There is no such function.
    """
    code = code_of_own(settings)
    started, file = any(folder.glob(SEEDS)), folder / SETTINGS
    if not started:
        file.unlink(missing_ok=True)
    elif not file.exists():
        raise FileFormatError(f"{folder} holds seeds of a run without its settings, {file.name}; use another folder")
    elif not resume:
        raise FileFormatError(f"{folder} holds an earlier run: add --resume to continue it, or use another folder")
    identity = {"format": FORMAT, **{key: settings[key] for key in sorted(settings.keys() - RUN_AGAIN_KEYS)}}
    identity |= {FILES: fingerprint_of_files(files, besides=folder)} if files else {}
    if code:
        identity[CODE] = code
    kept = read_json(file) if file.exists() else {}
    before, now = kept.get(GROWS), identity.get(GROWS)
    more = grows and isinstance(before, int) and now is not None and before < now
    if not kept or not (more or before is None or now is None):
        claim(file, identity)
        return
    claim(file, {**identity, GROWS: before})  # an assessment leaves open how many, and so does a run that goes on
    if more:
        for name in OF_A_BUDGET:
            for finished in folder.glob(f"{SEEDS}/{name}"):
                finished.unlink()
    if now is not None:
        write_json(file, identity)
