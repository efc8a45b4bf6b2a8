r"""Compute Recall@k of embeddings: the share of queries whose label is among those of the k nearest others.

Beside it, on request, other metrics of rankings; and all of them by re-identification's rule of cameras.

    python tools/evaluate_recall.py --embeddings E.npy --labels Y.npy --ks 1 10 100 --output-dir out/recall
    python tools/evaluate_recall.py --embeddings Q.npy --labels QY.npy \
        --gallery-embeddings A.npy --gallery-labels AY.npy --gallery-embeddings B.npy --gallery-labels BY.npy \
        --output-dir out/recall
    python tools/evaluate_recall.py --embeddings Q.npy --labels QY.npy --cameras QC.npy \
        --gallery-embeddings G.npy --gallery-labels GY.npy --gallery-cameras GC.npy --output-dir out/recall
    python tools/evaluate_recall.py --run-dir out/run --output-dir out/recall
    python tools/evaluate_recall.py --images FOLDER --config-file configs/retrieval/class_folders.yaml \
        --weights out/run/seed-0/tuned.safetensors --output-dir out/recall

A run is the output folder of tools/finetune_retrieval.py: the models of each seed before and after finetuning are
evaluated on its test classes (or --part validation), which seed-N/classes.json lists and data.test_classes can choose.
Images are <class>/<file> in a folder or zip file, embedded by a model that the config file of
tools/finetune_retrieval.py describes, with its weights, and with a finetuned adapter if one is given.
Files are .npy, or have "embeddings" and "labels": .npz, .safetensors, .pt, .h5, .parquet or .csv; --labels
(--gallery-labels) is then omitted. Labels are integers, or names, which all files must then have.
Without a gallery, or with a gallery that is the queries (the same file, or a copy), the queries search each other. Any
other gallery should not contain the queries, which would find themselves: a note counts them. Embeddings are
compared as they are; pytorch-metric-learning's testers scale them to length 1 first, as --distance cosine does.
With --against, and --against-gallery for each gallery, each number comes with its difference from that of these other
embeddings of the same items, in the same order. With --images, --against takes other weights of the model, without the
adapter; with --run-dir another run on the same data, whose models of the same seeds and names are compared, or the run
itself, which compares its models after finetuning with those before. With --both-directions, each gallery searches the
queries, too: images and their texts, of which many may have one image's label.
--index searches approximately, for a gallery that is too
large otherwise; --sample queries are searched exactly, too, and tell what that costs. --gallery-index takes an index
that FAISS wrote, whose items are the rows of --gallery-labels.
With --cameras, gallery items of a query's label and camera are ignored: Recall@k is then the cumulative matching
characteristic (CMC), and re-identification's mAP stands beside it. A file of cameras has integers or names; one that
holds several arrays has them as "cameras". Prints a table with 95% intervals over queries, and writes report.json.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from metricopt_ext.data.arrays import Names, array_names, holds_several, read_array, read_shape
from metricopt_ext.errors import ConfigError, DataError, MetricOptError
from metricopt_ext.experiment.command import add_show_config, errors_in_one_line, show_config, shows_config
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.versions import versions

if TYPE_CHECKING:
    from metricopt_ext.data.splits import Splits
    from metricopt_ext.retrieval.config import RetrievalConfig
    from metricopt_ext.retrieval.evaluation import Search

Items = tuple[Any, Any]  # embeddings and labels
Gallery = tuple[str, Items | None]  # its name, and its items unless they are the queries
Cameras = tuple[Any, Any]  # the queries' and the gallery's
# The options that belong to each kind of queries.
OPTIONS = {
    "--embeddings": (
        *("labels", "cameras", "gallery_embeddings", "gallery_labels", "gallery_cameras", "gallery_index"),
        "against_gallery",
    ),
    "--images": ("config_file", "weights", "entry", "adapter", "gallery_images", "grey"),
    "--run-dir": ("part",),
}


OF_EMBEDDINGS = (".npy", ".npz", ".h5", ".hdf5", ".parquet", ".csv")


def main() -> None:
    """Parse the command line, evaluate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    queries = parser.add_mutually_exclusive_group(required=not shows_config())
    queries.add_argument("--embeddings", type=Path, help="queries, n x d")
    queries.add_argument("--images", type=Path, help="queries, a folder of <class>/<file>")
    queries.add_argument("--run-dir", type=Path, help="output folder of tools/finetune_retrieval.py, with its own data")
    parser.add_argument("--part", choices=["train", "validation", "test"], help="of the run's data; default: test")
    parser.add_argument("--labels", type=Path, help="their labels, n integers or names")
    parser.add_argument("--cameras", type=Path, help="their cameras, n integers or names; see above")
    parser.add_argument(
        "--gallery-embeddings", action="append", default=[], type=Path, help="a gallery, m x d; may be repeated"
    )
    parser.add_argument(
        "--gallery-labels",
        action="append",
        default=[],
        type=Path,
        help="its labels, m of them; one per gallery",
    )
    parser.add_argument(
        "--gallery-cameras", action="append", default=[], type=Path, help="its cameras, m of them; one per gallery"
    )
    parser.add_argument("--gallery-index", type=Path, help="in place of galleries, FAISS' index of one; see above")
    parser.add_argument(
        "--gallery-images", action="append", default=[], type=Path, help="a gallery for --images; may be repeated"
    )
    parser.add_argument("--config-file", type=Path, help="describes the model that embeds images")
    parser.add_argument("--weights", type=Path, help="its state dict, or a checkpoint that holds it")
    parser.add_argument("--entry", default="", metavar="KEY", help="where it is in that file, if that has several")
    parser.add_argument("--adapter", type=Path, help="a finetuned adapter for it; BatchNorm statistics beside it count")
    parser.add_argument("--grey", action="store_true", help="read images in greyscale")
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 10, 100, 1000], help="numbers of neighbours")
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help="besides: precision (for each k), mean_reciprocal_rank, ndcg, mean_average_precision (default with"
        " cameras), mean_average_precision_at_r, r_precision; and found, ndcg, mean_reciprocal_rank and"
        " mean_average_precision with _at_k",
    )
    parser.add_argument("--per-class", action="store_true", help="judge each class alone, too")
    parser.add_argument("--both-directions", action="store_true", help="search the queries by each gallery, too")
    parser.add_argument("--against", type=Path, metavar="FILE", help="other embeddings of the queries; see above")
    parser.add_argument(
        "--against-gallery", action="append", default=[], type=Path, help="other embeddings of each gallery"
    )
    parser.add_argument("--index", choices=["ivf", "hnsw"], help="search approximately; default: exactly")
    parser.add_argument("--sample", type=int, help="with --index, how many queries to compare; default: 1000")
    parser.add_argument(
        "--distance",
        choices=["l2", "ip", "cosine"],
        default="l2",
        help="Euclidean (default), inner product, or cosine: the same as the others for embeddings of length 1",
    )
    parser.add_argument("--query-subset", type=int, help="search only this many queries, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the subset, at least 0")
    parser.add_argument("--output-dir", required=not shows_config(), type=Path, help="folder for report.json")
    add_show_config(parser)
    arguments = parser.parse_args()
    with errors_in_one_line():
        if arguments.show_config:
            from metricopt_ext.retrieval.config import RetrievalConfig

            show_config(RetrievalConfig, arguments.config_file)
            return
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Evaluate against every gallery and write the report."""
    from metricopt_ext.retrieval.evaluation import Options, Row, evaluated, print_rows
    from metricopt_ext.retrieval.neighbours import Vectors
    from metricopt_ext.retrieval.ranking import check_names

    check_options(arguments)
    check_names(arguments.metrics or [])
    rows, reverse, lengths = list[Row](), list[Row](), list[float]()
    searched = "gallery" if arguments.run_dir is None else "model"
    try:
        for search in searches(arguments):
            search = without_copies(search)
            metrics = arguments.metrics or (["mean_average_precision"] if search.cameras is not None else [])
            options = Options(
                *(arguments.ks, metrics, arguments.distance, arguments.query_subset, arguments.seed),
                *(arguments.per_class, arguments.index, 1000 if arguments.sample is None else arguments.sample),
            )
            rows.append(evaluated(search, options))
            if arguments.both_directions and search.items is not None:
                reverse.append(evaluated(search.reversed(), options))
            vectors = Vectors((search.queries if search.items is None or search.by_index else search.items)[0])
            found = [np.linalg.norm(vectors.rows(part), axis=1) for part in vectors.parts()]
            lengths += [min(each.min() for each in found), max(each.max() for each in found)]
    except MetricOptError:
        if rows:  # what was found is not lost
            print_rows([*rows, *reverse], searched)
        raise
    print_rows([*rows, *reverse], searched)
    if doubles := sum(row.doubles for row in rows):
        print(
            f"note: for {doubles} of {sum(row.queries for row in rows)} queries, float32 could not tell neighbours"
            " apart; they were compared in float64"
        )
    shortest, longest = float(min(lengths)), float(max(lengths))
    if arguments.distance != "cosine" and longest > 1.01 * shortest:  # half precision rounds by less
        print(
            f"note: the embeddings' lengths range from {shortest:.3g} to {longest:.3g};"
            " --distance cosine, which ignores them, would give other numbers"
        )
    config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    for key in ("gallery_embeddings", "gallery_labels", "gallery_cameras", "gallery_images", "against_gallery"):
        config[key] = [str(path) for path in config[key]]
    report = arguments.output_dir / "report.json"
    write_json(
        report,
        {
            "task": "retrieval/recall",
            "metric": {"name": "recall_at_k", "maximize": True},
            "galleries": [row.report() for row in rows],
            **({"reverse": [row.report() for row in reverse]} if reverse else {}),
            "versions": versions(),
            "config": config,
        },
    )
    print("wrote", report, sep="\n  ")


def without_copies(search: "Search") -> "Search":
    """Return a search in which queries and a gallery that is a copy of them search each other; and say so.

    Raises:
        DataError: Cameras of a copy are not the queries' own, or the other embeddings of a copy are none.
    """
    name, queries, items, cameras, _, other = search
    copied = items is not None and not search.by_index and equal_items(queries, items)
    if cameras is not None and (copied or items is None) and not np.array_equal(*cameras):
        raise DataError(f"{name} is a copy of the queries, but its cameras are not those of --cameras")
    if (copied or items is None) and other is not None and other.items is not None:
        if not equal_items(other.queries, other.items):
            raise DataError(f"{name} is a copy of the queries, but its --against-gallery is none of --against")
        other = other._replace(items=None)
    if copied:
        print(f"note: {name} is a copy of the queries; each searches all others")
        return search._replace(items=None, other=other)
    search = search._replace(other=other)
    if items is None and cameras is None and (copies := repeated(queries)):
        print(f"note: {copies} of {len(queries[0])} queries have a copy with their label among the others")
    return search


def check_options(arguments: argparse.Namespace) -> None:
    """Reject options that belong to the other kind of queries.

    Raises:
        DataError: There is such an option, or one is missing.
    """
    kind = next(kind for kind in OPTIONS if getattr(arguments, kind[2:].replace("-", "_")) is not None)
    foreign = [name for other, names in OPTIONS.items() if other != kind for name in names]
    given = [f"--{name.replace('_', '-')}" for name in foreign if getattr(arguments, name)]
    if given:
        raise DataError(f"{' and '.join(given)} can't be used with {kind}")
    if arguments.images is not None and not (arguments.config_file and arguments.weights):
        raise DataError("--images needs --config-file, which describes the model, and --weights, its state dict")
    galleries = len(arguments.gallery_embeddings or arguments.gallery_images)
    if arguments.both_directions and not galleries:
        raise DataError("--both-directions needs galleries, which search the queries: --gallery-embeddings")
    if arguments.sample is not None and arguments.index is None:
        raise DataError("--sample is for --index, which searches approximately; exact search needs none")
    if arguments.against_gallery and arguments.against is None:
        raise DataError("--against-gallery needs --against, other embeddings of the queries")
    if arguments.images is not None and arguments.against is not None and arguments.against.suffix in OF_EMBEDDINGS:
        raise DataError(
            f"{arguments.against} holds embeddings; with --images, --against takes other weights of the model. Compare"
            " files of embeddings with --embeddings"
        )
    if arguments.embeddings is not None and arguments.against and len(arguments.against_gallery) != galleries:
        raise DataError(
            f"with --against, each --gallery-embeddings needs its --against-gallery, got {galleries} and"
            f" {len(arguments.against_gallery)} of them"
        )
    by_index = "--gallery-index" if arguments.gallery_index else "--index" if arguments.index else ""
    if by_index and (arguments.metrics or arguments.cameras):
        raise DataError(f"{by_index} finds the nearest alone; leave --metrics and --cameras out, which rank all items")
    if arguments.gallery_index and (galleries or arguments.index or arguments.against):
        raise DataError("--gallery-index is gallery and search; leave other galleries, --index and --against out")
    if arguments.gallery_index and len(arguments.gallery_labels) != 1:
        raise DataError("--gallery-index needs --gallery-labels, one label for each of its items")


def searches(arguments: argparse.Namespace) -> "Iterable[Search]":
    """Return what is searched, one after the other."""
    if arguments.run_dir is not None:
        return embed_run(arguments.run_dir, arguments.part or "test", arguments.against)
    return search_files(arguments) if arguments.images is None else embed_images(arguments)


def search_files(arguments: argparse.Namespace) -> "Iterator[Search]":
    """Read the queries and, one after the other, the galleries, from files of embeddings.

    Raises:
        DataError: A file can't be read, or does not fit.
    """
    from metricopt_ext.retrieval.approximate import read_index
    from metricopt_ext.retrieval.evaluation import Search

    names = Names()  # over all files: the same name is the same class
    queries = read_items(arguments.embeddings, arguments.labels, "--labels", names)
    embeddings, labels = arguments.gallery_embeddings, arguments.gallery_labels
    if arguments.gallery_index is not None:
        path = arguments.gallery_index
        theirs = names.numbered(read_array(labels[0], "labels"), labels[0])
        index = read_index(path, int(queries[0].shape[-1]), arguments.distance, len(theirs))
        yield Search(str(path), queries, (index, theirs), None, names.names)
        return
    check_galleries(embeddings, labels, queries)
    others = galleries(embeddings, labels, arguments.embeddings, queries, names)
    baselines = arguments.against_gallery or [None] * max(1, len(embeddings))
    for (name, items), seen, baseline in zip(others, read_cameras(arguments), baselines, strict=True):
        other = None
        if items is not None and seen is not None:
            items = items[0], numbered_junk(items[1], queries[1], names)
        if arguments.against is not None:
            own = against(arguments.against, queries, names), baseline and against(baseline, items or queries, names)
            other = Search(str(arguments.against), *own, seen)
        yield Search(name, queries, items, seen, names.names, other)


def numbered_junk(labels: Any, queries: Any, names: Names) -> Any:
    """Return a gallery's labels with -1 for the name ``-1``, Market-1501's junk, unless it is a query's."""
    from metricopt_ext.retrieval.cameras import JUNK

    number = (names.names or []).index(str(JUNK)) if str(JUNK) in (names.names or []) else None
    if number is None or number in queries:
        return labels
    return np.where(labels == number, JUNK, labels)


def against(path: Path, items: Items, names: Names) -> Items:
    """Read other embeddings of some items.

    Raises:
        DataError: The file can't be read, or has embeddings or labels of other items.
    """
    embeddings = read_array(path, "embeddings", mapped=True)
    if len(embeddings) != len(items[1]):
        raise DataError(f"{path} has {len(embeddings)} embeddings, and there are {len(items[1])} items to compare")
    if holds_several(path) and "labels" in array_names(path):
        from metricopt_ext.retrieval.inputs import as_ids

        if not np.array_equal(as_ids(names.numbered(read_array(path, "labels"), path)), as_ids(items[1])):
            raise DataError(f"{path} has other labels; it must have the same items in the same order")
    return embeddings, items[1]


def read_cameras(arguments: argparse.Namespace) -> list[Cameras | None]:
    """Read the cameras of the queries and of each gallery; None for each without.

    Raises:
        DataError: A file can't be read, is missing, or has no use.
    """
    galleries = max(1, len(arguments.gallery_embeddings or arguments.gallery_images))
    if arguments.cameras is None:
        if arguments.gallery_cameras:
            raise DataError("--gallery-cameras needs --cameras, the queries'")
        return [None] * galleries
    if len(arguments.gallery_cameras) != len(arguments.gallery_embeddings):
        raise DataError(
            "with --cameras, each --gallery-embeddings needs its --gallery-cameras, got"
            f" {len(arguments.gallery_embeddings)} and {len(arguments.gallery_cameras)} of them"
        )
    names = Names()
    own, *theirs = (
        names.numbered(read_array(path, "cameras"), path) for path in (arguments.cameras, *arguments.gallery_cameras)
    )
    return [(own, each) for each in theirs or [own]]


def embed_images(arguments: argparse.Namespace) -> "Iterator[Search]":
    """Embed the queries and, one after the other, the galleries, from folders of images.

    Raises:
        DataError: A folder or the weights can't be used.
        FileFormatError: The adapter can't be used.
    """
    from metricopt_ext.adapters.attach import load_adapter
    from metricopt_ext.data.images import load_image_folder
    from metricopt_ext.retrieval.build import built
    from metricopt_ext.retrieval.config import RetrievalConfig
    from metricopt_ext.retrieval.evaluation import Search
    from metricopt_ext.retrieval.kept_features import embed
    from metricopt_ext.utils.config import load_config
    from metricopt_ext.utils.modes import evaluating
    from metricopt_ext.utils.state_dict import load_checkpoint

    config = load_config(RetrievalConfig, arguments.config_file, [])
    labels, classes = dict[str, int](), list[str]()  # over all folders: the same name is the same class
    models = list[nn.Module]()  # and then the one of --against, if there is one

    def embedded(path: Path) -> list[Items]:
        """By each model."""
        mode: Literal["L", "RGB"] = "L" if arguments.grey else "RGB"
        images = load_image_folder(path, config.data.image_size or None, mode=mode, **config.limits)
        if not models:
            for weights in (arguments.weights, *([arguments.against] if arguments.against else [])):
                models.append(built(config.model, images.x.shape[1:]))
                load_checkpoint(models[-1], weights, entry=arguments.entry, option="--entry")
            if arguments.adapter is not None:
                load_adapter(models[0], arguments.adapter)
        known = torch.tensor([labels.setdefault(name, len(labels)) for name in images.class_names])
        classes[:] = labels
        with evaluating(nn.ModuleList(models)), torch.no_grad():
            return [(embed(model, images.x), known[images.y]) for model in models]

    for path in arguments.gallery_images:  # before the first is embedded and searched
        if not path.exists():
            raise DataError(f"{path} does not exist")
    queries = embedded(arguments.images)
    for path in arguments.gallery_images or [None]:
        own = path is None or path.samefile(arguments.images)
        items = [None] * len(models) if own else embedded(path)
        name = "the queries" if path is None else str(path)
        found = [Search(name, *each, None, classes) for each in zip(queries, items, strict=True)]
        other = found[1]._replace(name=str(arguments.against)) if arguments.against else None
        yield found[0]._replace(other=other)


def embed_run(folder: Path, part: str, baseline: Path | None = None) -> "Iterator[Search]":
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
    from metricopt_ext.retrieval.build import load_splits

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


def check_same_items(ours: "Search", theirs: "Search", part: str) -> None:
    """Reject another run's data that are not the same, as far as labels and their order tell.

    Raises:
        DataError: They are not.
    """
    pairs = [(ours.queries, theirs.queries), *([(ours.items, theirs.items)] if ours.items and theirs.items else [])]
    same = list(ours.classes or ()) == list(theirs.classes or ()) and (ours.items is None) == (theirs.items is None)
    if not (same and all(torch.equal(own[1].cpu(), other[1].cpu()) for own, other in pairs)):
        raise DataError(f"{theirs.name} is of another {part} part; compare runs on the same data and seeds")


def read_run(folder: Path) -> "tuple[RetrievalConfig, list[int]]":
    """Return a run's settings, and the seeds that have finished.

    Raises:
        DataError: The folder holds no run of retrieval, or one of another version, or none of its seeds has finished.
    """
    from metricopt_ext.methods.run_folder import CONTENT, FORMAT
    from metricopt_ext.retrieval.config import RetrievalConfig
    from metricopt_ext.utils.config import load_config
    from metricopt_ext.utils.files import read_json

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


def embedded_by(config: "RetrievalConfig", splits: "Splits", part: str, file: Path) -> "Search":
    """Embed a part of a run's data by a seed's model, ``model`` before or ``tuned`` after finetuning."""
    from metricopt_ext.retrieval.build import built
    from metricopt_ext.retrieval.cameras import CAMERA
    from metricopt_ext.retrieval.data import queries_of
    from metricopt_ext.retrieval.evaluation import Search
    from metricopt_ext.retrieval.kept_features import embed
    from metricopt_ext.utils.device import choose_device
    from metricopt_ext.utils.state_dict import load_checkpoint

    data, queries, device = getattr(splits, part), queries_of(splits, part), choose_device(config.device)
    seen, name = data.columns.get(CAMERA), f"{file.parent.name}/{file.name}"
    model = built(config.model, data.x.shape[1:])
    load_checkpoint(model, file.with_suffix(".safetensors"))
    with torch.no_grad():
        embeddings = embed(model.to(device).eval(), data.x.to(device)).cpu()
    if queries is None:
        cameras = None if seen is None else (seen, seen)
        return Search(name, (embeddings, data.y), None, cameras, splits.class_names)
    items, own = (embeddings[~queries], data.y[~queries]), queries.numpy(force=True)
    cameras = None if seen is None else (seen[own], seen[~own])
    return Search(name, (embeddings[queries], data.y[queries]), items, cameras, splits.class_names)


def check_galleries(embeddings: list[Path], labels: list[Path], queries: Items) -> None:
    """Check all galleries' files by their headers, before the first of them is searched.

    Args:
        embeddings: Files of the galleries.
        labels: Files of their labels, one for each gallery; none if the galleries' own files hold them.
        queries: The queries and their labels.

    Raises:
        DataError: The numbers of label files and galleries differ; a file can't be read; or its shape doesn't fit.
    """
    if labels and len(labels) != len(embeddings):
        raise DataError(
            f"each --gallery-embeddings needs its --gallery-labels, got {len(embeddings)} and {len(labels)} of them"
        )
    for i, path in enumerate(embeddings):
        names = labels[i] if labels else None
        check_labels(path, names, "--gallery-labels")
        shape, size = read_shape(path, "embeddings"), read_shape(names or path, "labels")[:1]
        if shape[1:] != tuple(queries[0].shape)[1:]:
            raise DataError(f"{path} has embeddings of shape {shape}, and the queries {tuple(queries[0].shape)}")
        if shape[:1] != size:
            raise DataError(f"{path} has {shape[0]} embeddings, and {names or path} {size[0] if size else 'no'} labels")


def galleries(
    embeddings: list[Path], labels: list[Path], file: Path, queries: Items, names: Names
) -> Iterator[Gallery]:
    """Read one gallery after the other.

    Args:
        embeddings: As in `check_galleries`; none for the queries themselves.
        labels: As in `check_galleries`.
        file: The queries' file.
        queries: The queries and their labels.
        names: Numbers labels that are names.

    Yields:
        Name and (embeddings, labels) of each; None instead of these for the queries.

    Raises:
        DataError: A file can't be read, or the queries' file comes with other labels.
    """
    if not embeddings:
        yield "the queries", None
    for i, path in enumerate(embeddings):
        items = read_items(path, labels[i] if labels else None, "--gallery-labels", names)
        own = path.samefile(file)
        if own and not equal_items(queries, items):
            raise DataError(f"{path} is the queries' own file, but its labels are not those of --labels")
        yield str(path), None if own else items


def equal_items(queries: Items, items: Items) -> bool:
    """Whether embeddings and labels are the same, whatever their types."""
    from metricopt_ext.retrieval.inputs import as_ids
    from metricopt_ext.retrieval.neighbours import Vectors

    if tuple(queries[0].shape) != tuple(items[0].shape) or len(items[0].shape) != 2 or 0 in items[0].shape:
        return False
    if not np.array_equal(as_ids(queries[1]), as_ids(items[1], "gallery ")):
        return False
    own, theirs = Vectors(queries[0]), Vectors(items[0])
    return all(np.array_equal(own.rows(part), theirs.rows(part)) for part in own.parts())


def repeated(items: Items) -> int:
    """Return how many items have a copy, embedding and label, among the others."""
    from metricopt_ext.retrieval.inputs import as_ids
    from metricopt_ext.retrieval.neighbours import Vectors, fingerprints

    shape = tuple(items[0].shape)
    if len(shape) != 2 or 0 in shape or tuple(items[1].shape)[:1] != shape[:1]:
        return 0  # which is refused
    known = np.column_stack([fingerprints(Vectors(items[0])).view(np.int64), as_ids(items[1])])
    _, counts = np.unique(known, axis=0, return_counts=True)
    return int(counts[counts > 1].sum())


def read_items(embeddings: Path, labels: Path | None, option: str, names: Names) -> tuple[Any, Any]:
    """Read embeddings ``n x d`` and their labels ``n``; without a file of labels, both from one file.

    Raises:
        DataError: A file can't be read or lacks what it should hold; ``option`` is the option for a file of labels.
    """
    check_labels(embeddings, labels, option)
    own = labels or embeddings
    return read_array(embeddings, "embeddings", mapped=True), names.numbered(read_array(own, "labels"), own)


def check_labels(embeddings: Path, labels: Path | None, option: str) -> None:
    """Refuse embeddings without labels, or with two kinds of them.

    Raises:
        DataError: They are so, or a file can't be read; ``option`` is the option for a file of labels.
    """
    if not holds_several(embeddings):
        if labels is None:
            raise DataError(f"{embeddings} holds no labels; name their file with {option}")
    elif labels is not None and not (labels.exists() and labels.samefile(embeddings)):
        try:
            own = read_array(embeddings, "labels")
        except DataError:  # it has none, or will be refused as it is read
            return
        if not np.array_equal(own, read_array(labels, "labels")):
            raise DataError(f"{embeddings} holds labels other than {labels}; leave {option} out for its own")


if __name__ == "__main__":
    main()
