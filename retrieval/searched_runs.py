"""What `tools/evaluate_recall.py` searches of a run's data, which each seed's models embed."""

from collections.abc import Iterator
from pathlib import Path

import torch

from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.methods.run_folder import CONTENT
from metricopt_ext.methods.run_identity import FORMAT
from metricopt_ext.retrieval.build import built
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.data import queries_of
from metricopt_ext.retrieval.evaluation import Search
from metricopt_ext.retrieval.kept_features import embed
from metricopt_ext.retrieval.splits import load_splits
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import read_json
from metricopt_ext.utils.state_dict import load_checkpoint


def embed_run(folder: Path, part: str, baseline: Path | None = None) -> Iterator[Search]:
    """Embed a part of a run's data by each seed's models, before and after finetuning.

    Args:
        folder: The run's.
        part: The part's name.
        baseline: The folder of a run with whose models of the same seeds and names they are compared; the same folder
            to compare those after finetuning with those before. None for no comparison.

    Raises:
        DataError: A folder holds no run of retrieval, or one of another version; none of its seeds has finished, or
            its data can't be read; or the other run lacks a seed or has other data.
    """
    config, seeds = read_run(folder)
    itself = baseline is not None and baseline.samefile(folder)
    theirs, known = (config, seeds) if baseline is None or itself else read_run(baseline)
    if missing := sorted({*seeds} - {*known}):
        raise DataError(
            f"{baseline} has no finished seed {missing[0]}, which {folder} has; compare runs of the same seeds"
        )
    for seed in seeds:
        splits = load_splits(config, seed)
        others = splits if theirs is config else load_splits(theirs, seed)
        for name in ("model", "tuned"):
            search, other = embedded_by(config, splits, part, folder / f"seed-{seed}" / name), None
            if baseline is not None and not (itself and name == "model"):
                file = baseline / f"seed-{seed}" / ("model" if itself else name)
                other = embedded_by(theirs, others, part, file)._replace(name=str(file))
                check_same_items(search, other, part)
            yield search._replace(other=other)


def check_same_items(ours: Search, theirs: Search, part: str) -> None:
    """Reject another run's data that are not the same, as far as labels and their order tell.

    Raises:
        DataError: They are not.
    """
    pairs = [(ours.queries, theirs.queries), *([(ours.items, theirs.items)] if ours.items and theirs.items else [])]
    same = list(ours.classes or ()) == list(theirs.classes or ()) and (ours.items is None) == (theirs.items is None)
    if not (same and all(torch.equal(own[1].cpu(), other[1].cpu()) for own, other in pairs)):
        raise DataError(f"{theirs.name} is of another {part} part; compare runs on the same data and seeds")


def read_run(folder: Path) -> tuple[RetrievalConfig, list[int]]:
    """Return a run's settings, and the seeds that have finished.

    Raises:
        DataError: The folder holds no run of retrieval, or one of another version, or none of its seeds has finished.
    """
    file = folder / "run.json"
    if not file.is_file():
        raise DataError(f"{folder} has no run.json; name the whole output folder of tools/finetune_retrieval.py")
    settings = read_json(file)
    if (theirs := settings.pop("format", None)) != FORMAT:
        raise DataError(f"{file} is of another version of this library: its format is {theirs}, not {FORMAT}")
    settings.pop(CONTENT, None)
    try:
        config = load_config(RetrievalConfig, settings)
    except ConfigError as error:
        raise DataError(f"{file} is not of a run of tools/finetune_retrieval.py: {error}") from error
    seeds = sorted(int(path.parent.name.removeprefix("seed-")) for path in folder.glob("seed-*/tuned.safetensors"))
    if not seeds:
        raise DataError(f"{folder} has no seed-N/tuned.safetensors, which is written once a seed has finished")
    return config, seeds


def embedded_by(config: RetrievalConfig, splits: Splits, part: str, file: Path) -> Search:
    """Embed a part of a run's data by a seed's model, ``model`` before or ``tuned`` after finetuning."""
    data, queries, device = getattr(splits, part), queries_of(splits, part), choose_device(config.device)
    name = f"{file.parent.name}/{file.name}"
    model = built(config.model, data.x.shape[1:])
    load_checkpoint(model, file.with_suffix(".safetensors"))
    with torch.no_grad():
        embeddings = embed(model.to(device).eval(), data.x.to(device)).cpu()
    if queries is None:
        return Search(name, (embeddings, data.y), None, splits.class_names)
    items = embeddings[~queries], data.y[~queries]
    return Search(name, (embeddings[queries], data.y[queries]), items, splits.class_names)
