"""What `tools/evaluate_recall.py` searches of folders of images, which a model embeds."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from metricopt_ext.data.images import load_image_folder
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.build import built
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.evaluation import Search
from metricopt_ext.retrieval.inputs import Items
from metricopt_ext.retrieval.kept_features import embed
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.state_dict import load_checkpoint


def embed_images(arguments: argparse.Namespace) -> Iterator[Search]:
    """Embed the queries and, one after the other, the galleries, from folders of images.

    Raises:
        DataError: A folder or the weights can't be used.
    """
    config = load_config(RetrievalConfig, arguments.config_file, [])
    labels, models = dict[str, int](), list[nn.Module]()  # over all folders: the same name is the same class

    def embedded(path: Path) -> Items:
        images = load_image_folder(path, config.data.image_size or None)
        if not models:
            models.append(built(config.model, images.x.shape[1:]))
            load_checkpoint(models[0], arguments.weights, entry=config.model.entry)
        known = torch.tensor([labels.setdefault(name, len(labels)) for name in images.class_names])
        with evaluating(models[0]), torch.no_grad():
            return embed(models[0], images.x), known[images.y]

    for path in arguments.gallery_images:  # before the first is embedded and searched
        if not path.exists():
            raise DataError(f"{path} does not exist")
    queries = embedded(arguments.images)
    for path in arguments.gallery_images or [None]:
        own = path is None or path.samefile(arguments.images)
        yield Search("the queries" if path is None else str(path), queries, None if own else embedded(path))
