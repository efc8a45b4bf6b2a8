r"""Compute Recall@k of embeddings: the share of queries whose label is among those of the k nearest others.

On request it adds other ranking metrics.

    python tools/evaluate_recall.py --embeddings E.npy --labels Y.npy --ks 1 10 100 --output-dir out/recall
    python tools/evaluate_recall.py --embeddings Q.npy --labels QY.npy \
        --gallery-embeddings A.npy --gallery-labels AY.npy --gallery-embeddings B.npy --gallery-labels BY.npy \
        --output-dir out/recall
    python tools/evaluate_recall.py --run-dir out/run --output-dir out/recall
    python tools/evaluate_recall.py --images FOLDER --config-file configs/retrieval/class_folders.yaml \
        --weights out/run/seed-0/tuned.safetensors --output-dir out/recall

A run is the output folder of tools/finetune_retrieval.py: each seed's models before and after finetuning are evaluated
on its test classes (or --part validation), which seed-N/classes.json lists and data.test_classes can choose. Images are
<class>/<file> in a folder. A model embeds them: one described by a config file of tools/finetune_retrieval.py, with its
weights, or tuned.safetensors of a run.

Files are .npy; or they hold "embeddings" and "labels": .npz, .safetensors, .pt, .parquet or .csv; then omit
--labels (--gallery-labels). Labels are integers, or names, which all files must then have. Without a gallery, or if the
gallery is the queries (the same file, or a copy), the queries search each other. Any other gallery should not contain
the queries, which would find themselves: a note counts them. Embeddings are compared as they are;
pytorch-metric-learning's testers scale them to length 1 first, as --distance cosine does.

Prints a table with 95% intervals over queries, and writes report.json.
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.experiment.command import add_show_config, errors_in_one_line, show_config, shows_config
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.versions import versions

if TYPE_CHECKING:
    from metricopt_ext.retrieval.evaluation import Search

# The options that belong to each kind of queries.
OPTIONS = {
    "--embeddings": ("labels", "gallery_embeddings", "gallery_labels"),
    "--images": ("config_file", "weights", "gallery_images"),
    "--run-dir": ("part",),
}


def main() -> None:
    """Parse the command line, evaluate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    queries = parser.add_mutually_exclusive_group(required=not shows_config())
    queries.add_argument("--embeddings", type=Path, help="queries, n x d")
    queries.add_argument("--images", type=Path, help="queries, a folder of <class>/<file>")
    queries.add_argument("--run-dir", type=Path, help="output folder of tools/finetune_retrieval.py, with its own data")
    parser.add_argument("--part", choices=["train", "validation", "test"], help="of the run's data; default: test")
    parser.add_argument("--labels", type=Path, help="their labels, n integers or names")
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
        "--gallery-images", action="append", default=[], type=Path, help="a gallery for --images; may be repeated"
    )
    parser.add_argument("--config-file", type=Path, help="describes the model that embeds images")
    parser.add_argument("--weights", type=Path, help="its state dict, or a checkpoint that holds it")
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 10, 100, 1000], help="numbers of neighbours")
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help="besides: precision (for each k), mean_reciprocal_rank, ndcg, mean_average_precision,"
        " mean_average_precision_at_r, r_precision",
    )
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
    from metricopt_ext.retrieval.evaluation import Row, evaluated, print_rows
    from metricopt_ext.retrieval.ranking import check_names
    from metricopt_ext.retrieval.vectors import Vectors

    check_options(arguments)
    check_names(arguments.metrics or [])
    options = {name: getattr(arguments, name) for name in ("distance", "query_subset", "seed")}
    rows, lengths = list[Row](), list[float]()
    searched = "gallery" if arguments.run_dir is None else "model"
    try:
        for search in searches(arguments):
            search = without_copies(search)
            rows.append(evaluated(search, arguments.ks, arguments.metrics or [], **options))
            vectors = Vectors((search.queries if search.items is None else search.items)[0])
            found = [np.linalg.norm(vectors.rows(part), axis=1) for part in vectors.parts()]
            lengths += [min(each.min() for each in found), max(each.max() for each in found)]
    except MetricOptError:
        if rows:  # what was found is not lost
            print_rows(rows, searched)
        raise
    print_rows(rows, searched)
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
    for key in ("gallery_embeddings", "gallery_labels", "gallery_images"):
        config[key] = [str(path) for path in config[key]]
    report = arguments.output_dir / "report.json"
    write_json(
        report,
        {
            "task": "retrieval/recall",
            "metric": {"name": "recall_at_k", "maximize": True},
            "galleries": [asdict(row) for row in rows],
            "versions": versions(),
            "config": config,
        },
    )
    print("wrote", report, sep="\n  ")


def without_copies(search: "Search") -> "Search":
    """Return a search in which queries and a gallery that is a copy of them search each other; and say so."""
    from metricopt_ext.retrieval.copies import equal_items, repeated

    name, queries, items, _ = search
    if items is not None and equal_items(queries, items):
        print(f"note: {name} is a copy of the queries; each searches all others")
        return search._replace(items=None)
    if items is None and (copies := repeated(queries)):
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


def searches(arguments: argparse.Namespace) -> "Iterable[Search]":
    """Return what is searched, one after the other."""
    if arguments.run_dir is not None:
        from metricopt_ext.retrieval.searched_runs import embed_run

        return embed_run(arguments.run_dir, arguments.part or "test")
    if arguments.images is not None:
        from metricopt_ext.retrieval.searched_images import embed_images

        return embed_images(arguments)
    from metricopt_ext.retrieval.searched_files import search_files

    return search_files(arguments)


if __name__ == "__main__":
    main()
