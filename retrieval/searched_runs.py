"""What `tools/evaluate_recall.py` searches of a run's data, which each seed's models embed."""

from collections.abc import Iterator
from pathlib import Path

import torch

from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.output_folder import CODE, FILES
from metricopt_ext.methods.folder import FORMAT
from metricopt_ext.retrieval.build import built
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.data import queries_of
from metricopt_ext.retrieval.evaluation import Search
from metricopt_ext.retrieval.judged import Processing
from metricopt_ext.retrieval.kept_features import embed
from metricopt_ext.retrieval.models import unscaled
from metricopt_ext.retrieval.named_metric import build_metric
from metricopt_ext.retrieval.settings import retrieval_settings
from metricopt_ext.retrieval.splits import load_splits
from metricopt_ext.tasks.inference_file import INFERENCE, load_inference
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import read_json
from metricopt_ext.utils.state_dict import load_checkpoint


def embed_run(folder: Path, part: str) -> Iterator[Search]:
    """Embed a part of a run's data by each seed's models, before and after finetuning.

    Args:
        folder: The run's.
        part: The part's name.

    Raises:
        DataError: The folder holds no run of retrieval, or one of another version; none of its seeds has finished, or
            its data can't be read.
    """
    config, seeds = read_run(folder)
    for seed in seeds:
        splits = load_splits(config, seed)
        for name in ("model", "tuned"):
            yield embedded_by(config, splits, part, folder / f"seed-{seed}" / name)


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
    settings = {key: value for key, value in settings.items() if key not in (CODE, FILES)}
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
    device = choose_device(config.device)
    splits, queries = splits.to(device), queries_of(splits, part)
    data = getattr(splits, part)
    name = f"{file.parent.name}/{file.name}"
    model = built(config.model, data.x.shape[1:])
    load_checkpoint(model, file.with_suffix(".safetensors"))
    model.to(device).eval()
    with torch.no_grad(), unscaled(model):
        embeddings = embed(model, data.x).cpu()
    processing = Processing(unscaled=True)
    if file.name == "tuned" and (file.parent / INFERENCE).exists():  # as the run was judged
        metric = build_metric(config.metric, splits.validation)
        labelled = [(part.x, part.y) for part in (splits.train, splits.validation)]
        settings = retrieval_settings(metric, whiten_on=metric, labelled=labelled)
        processing = settings.processing(model, load_inference(file.parent))
    labels = data.y.cpu()
    embeddings, augmentation = processing.searched(embeddings, queries)
    if queries is None:
        return Search(name, (embeddings, labels), None, augmentation)
    return Search(name, (embeddings[queries], labels[queries]), (embeddings[~queries], labels[~queries]))
