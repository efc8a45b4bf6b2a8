"""Count what `assess` says of tasks by 12 queries, beside what a comparison found to be best on each, and of noise.

    python benchmarks/measure_assess.py --output-dir out/assess --seeds 20300-20319 digits_shifted digits_plain noise
    python benchmarks/measure_assess.py --output-dir out/assess --seeds 20300-20319 a9a_f1 --override data.root=FOLDER

A task is a file in benchmarks/configs/compare or configs/compare. `noise` is a metric of two halves that have nothing
in common, on the first seed's model of plain digits. What is on file is not asked again, but judged by the rules of the
day.
"""

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.style import print_table
from metricopt_ext.methods.assessment import CHEAP, RECOMMENDATIONS, Assessment
from metricopt_ext.methods.optimize import assess
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tools.assess import assess_seed, read
from metricopt_ext.tools.compare import seed_range
from metricopt_ext.utils.files import write_json

FOLDERS = [folder / "configs" / "compare" for folder in (Path(__file__).parents[1], Path(__file__).parent)]
CONFIGS = {file.stem: file for folder in FOLDERS for file in folder.glob("*.yaml")}
NOISE = "noise"

SETTINGS, OFFSETS, BATCHNORM = CHEAP.values()

# What is best after 60 queries by results/comparison.md, or by docs/settings.md where settings come first, or within
# chance of that (paired by seed, 95%), as far as an assessment can name it; and what results/evidence.md names.
BEST: dict[str, tuple[str, ...]] = {
    "a9a_f1": (OFFSETS, "search"),
    "a9a_mcr": ("do not", BATCHNORM, "search"),
    "a9a_cost": (OFFSETS, "search"),
    "digits_shifted": ("search", BATCHNORM),
    "digits_longtail_worst": ("search", OFFSETS),
    "digits_retrieval": ("search", SETTINGS),
    "digits_plain": ("do not", BATCHNORM, "search"),
    NOISE: ("do not",),
}


def main() -> None:
    """Parse the command line, assess, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=sorted(BEST), metavar="TASK", help=", ".join(BEST))
    parser.add_argument("--output-dir", required=True, type=Path, help="keeps models, evaluations and assess.json")
    parser.add_argument("--seeds", required=True, help="first and last seed, e.g. 20300-20319")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of the tasks' configs")
    arguments = parser.parse_args()
    with errors_in_one_line():
        measure(arguments.tasks, arguments.output_dir, arguments.seeds, arguments.override)


def measure(tasks: Sequence[str], folder: Path, seeds: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Assess each task at each seed; write and print how often each recommendation is given, and return that.

    Args:
        tasks: Names of `BEST`.
        folder: Receives all that is kept.
        seeds: First and last, ``"20300-20319"``.
        overrides: ``key=value`` of the tasks' configs.
    """
    first, count = (int(each.partition("=")[2]) for each in seed_range(seeds))
    numbers = range(first, first + count)
    found: dict[str, dict[str, Any]] = {}
    for task in tasks:
        said = (
            of_noise(numbers, folder / task, overrides)
            if task == NOISE
            else of_task(task, numbers, folder / task, overrides)
        )
        counts = Counter(each.recommendation for each in said.values())
        lines = {str(seed): each.lines() for seed, each in said.items()}
        found[task] = {"counts": dict(counts), "best": sum(counts[each] for each in BEST[task]), "seeds": lines}
        write_json(folder / f"{task}.json", found[task])
    rows = [
        [task, f"{each['best']} of {count}", *(str(each["counts"].get(name, "")) for name in RECOMMENDATIONS)]
        for task, each in found.items()
    ]
    print_table(["task", "the best", *RECOMMENDATIONS], rows)
    return found


def of_task(task: str, seeds: Sequence[int], folder: Path, overrides: Sequence[str]) -> dict[int, Assessment]:
    """Return what is said of a comparison's task by seed; models and evaluations are kept in a folder."""
    said = {}
    for seed in seeds:
        experiment, config = read(CONFIGS[task], [f"seed={seed}", *overrides])
        own = folder / str(seed)
        said[seed] = assess_seed(experiment, config, None, own, resume=(own / "run.json").exists())
    return said


def of_noise(seeds: Sequence[int], folder: Path, overrides: Sequence[str]) -> dict[int, Assessment]:
    """Return what is said of noise by seed, on one model."""
    experiment, config = read(CONFIGS["digits_plain"], [f"seed={seeds[0]}", *overrides])
    made, said = experiment(config, folder, seeds[0]), {}
    for seed in seeds:
        rng = random.Random(seed)

        def noise(model: Any, rng: random.Random = rng) -> Any:
            halves = (rng.gauss(0.5, 0.05), rng.gauss(0.5, 0.05))
            return sum(halves) / 2, halves

        metric = Metric(noise, maximize=True, bounds=None, name="noise")
        said[seed] = assess(made.task.judged_by(metric), starts=made.starts(), seed=seed, callback=Callback())
    return said


if __name__ == "__main__":
    main()
