"""Measure Recall@k's time and memory against raw FAISS and pytorch-metric-learning, on random clusters.

    python benchmarks/measure_recall.py --size 60502 --dim 512 --k 1000 --output-dir out/measure_recall

Each side runs in its own process on the same data, one after the other. Prints a table, writes report.json,
and fails if the recalls differ from raw FAISS'.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.utils.extras import naming_extras, require
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.versions import versions

SPREAD = 0.4  # of the clusters' centres, in units of their members' own spread: some, but not all, are found
ROUNDS = ("ours", "raw FAISS", "pytorch-metric-learning")


def main() -> None:
    """Parse the command line; measure, or run as one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=60502, help="number of embeddings")
    parser.add_argument("--dim", type=int, default=512, help="their dimension")
    parser.add_argument("--k", type=int, default=1000, help="largest number of neighbours")
    parser.add_argument("--per-class", type=float, default=5.35, help="mean size of a cluster")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; the fastest counts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the embeddings")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for report.json")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        print(json.dumps(measure_one(arguments.side, arguments)))
    else:
        with naming_extras():
            require("faiss")
            require("pytorch_metric_learning")
        run(arguments)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all sides, print and write the results; returns the report."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        # This process stays small: a child's peak memory starts from its parent's.
        start("make data", arguments, folder)
        for _ in range(arguments.repeats):
            for name in ROUNDS:
                result = start(name, arguments, folder)
                if name not in results or result["seconds"] < results[name]["seconds"]:
                    results[name] = result
    ours, raw, theirs = (results[name] for name in ROUNDS)
    report = {
        "task": "retrieval/measure_recall",
        "sides": results,
        "same_recalls": ours["recall"] == raw["recall"],
        "time_ratio": ours["seconds"] / raw["seconds"],
        "memory_ratio": ours["peak_mb"] / theirs["peak_mb"],
        "versions": versions(),
        "config": {name: getattr(arguments, name) for name in ("size", "dim", "k", "per_class", "repeats", "seed")},
    }
    write_json(arguments.output_dir / "report.json", report)
    print_report(report)
    print("wrote", arguments.output_dir / "report.json", sep="\n  ")
    if not report["same_recalls"]:
        sys.exit(f"error: recalls differ from raw FAISS': {ours['recall']} and {raw['recall']}")
    return report


def start(name: str, arguments: argparse.Namespace, folder: str) -> Any:
    """Run one side in a new process; returns what it measured."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    options = [
        f"--{key}={getattr(arguments, key.replace('-', '_'))}" for key in ("size", "dim", "k", "per-class", "seed")
    ]
    command = [sys.executable, __file__, *options, f"--output-dir={folder}", f"--side={name}"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def measure_one(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one side, in this process; the data are in the output folder."""
    folder = arguments.output_dir
    if name == "make data":
        make_data(arguments, folder)
        return {}
    prepare = {"ours": prepare_ours, "raw FAISS": prepare_faiss, "pytorch-metric-learning": prepare_theirs}[name]
    search = prepare()
    embeddings, labels = np.load(folder / "embeddings.npy"), np.load(folder / "labels.npy")
    ks = [k for k in (1, 10, 100, 1000, arguments.k) if k <= arguments.k]
    before = peak_mb()
    started = time.perf_counter()
    recall = search(embeddings, labels, sorted(set(ks)))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "before_mb": before, "peak_mb": peak_mb(), "recall": recall}


def make_data(arguments: argparse.Namespace, folder: Path) -> None:
    """Write random clusters: embeddings ``size x dim`` and as many labels; at least two members in each class."""
    rng = np.random.default_rng(arguments.seed)
    classes = max(2, int(arguments.size / arguments.per_class))
    labels = np.concatenate([np.repeat(np.arange(classes), 2), rng.integers(classes, size=arguments.size)])
    labels = rng.permutation(labels[: arguments.size])
    centres = rng.standard_normal((classes, arguments.dim), dtype=np.float32) * SPREAD
    embeddings = centres[labels] + rng.standard_normal((arguments.size, arguments.dim), dtype=np.float32)
    np.save(folder / "embeddings.npy", embeddings)
    np.save(folder / "labels.npy", labels)


Search = Callable[[Any, Any, list[int]], dict[str, float]]


def prepare_ours() -> Search:
    """Import; returns what is measured."""
    from metricopt_ext.retrieval.recall import recall_at_k

    return lambda embeddings, labels, ks: {str(k): v for k, v in recall_at_k(embeddings, labels, ks).at.items()}


def prepare_faiss() -> Search:
    """Import; returns what is measured: one search of a flat index for all queries, as in FAISS' manual."""
    import faiss

    def search(embeddings: Any, labels: Any, ks: list[int]) -> dict[str, float]:
        index = faiss.IndexFlatL2(embeddings.shape[1])
        index.add(embeddings)
        neighbours = index.search(embeddings, max(ks) + 1)[1]
        hits = (labels[neighbours] == labels[:, None]) & (neighbours != np.arange(len(labels))[:, None])
        # A query's own row is not a hit but may take a place: without it, the hit after it moves up by one.
        own = np.where(neighbours == np.arange(len(labels))[:, None], np.arange(max(ks) + 1), max(ks)).min(axis=1)
        first = np.where(hits.any(axis=1), hits.argmax(axis=1), max(ks) + 1)
        return {str(k): float(np.mean(first - (own < first) < k)) for k in ks}

    return search


def prepare_theirs() -> Search:
    """Import; returns what is measured: its cheapest metric of k neighbours, as it has no Recall@k."""
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    def search(embeddings: Any, labels: Any, ks: list[int]) -> dict[str, float]:
        calculator = AccuracyCalculator(include=("precision_at_1",), k=max(ks), device=torch.device("cpu"))
        return {"1": calculator.get_accuracy(embeddings, labels)["precision_at_1"]}

    return search


def peak_mb() -> float:
    """Return the largest resident memory of this process so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def print_report(report: dict[str, Any]) -> None:
    """Print a line for each side and the comparisons."""
    print(f"{'':24}{'seconds':>9}{'peak MB':>9}{'of it before':>14}  recall")
    for name, result in report["sides"].items():
        recalls = "  ".join(f"@{k} {value:.4f}" for k, value in result["recall"].items())
        print(f"{name:24}{result['seconds']:9.2f}{result['peak_mb']:9.0f}{result['before_mb']:14.0f}  {recalls}")
    print(
        f"same recalls as raw FAISS: {'yes' if report['same_recalls'] else 'no'}; {report['time_ratio']:.3f} times its"
        f" time; {report['memory_ratio']:.3f} times pytorch-metric-learning's peak memory"
    )


if __name__ == "__main__":
    main()
