r"""Tune a checkpoint for a number that a command of yours prints.

    metricopt tune-checkpoint --checkpoint model.pth --score 'python evaluate.py --weights {checkpoint}' \
        --parse 'accuracy: ([0-9.]+)' --queries 100 --output tuned.pth --output-dir out/tuned

COMMAND is started without a shell, in this directory, once for each query; {checkpoint} is replaced by the path of a
file as --checkpoint, with other numbers in its norms, and {trial} by the trial's number. What it prints is kept in
DIR/trials. The number is the last that matches --parse, in the standard output or else in the error stream, or is in a
JSON file that the command writes. Another exit status than 0, no number or nan is a failed trial.

A guided search finds the numbers. FILE is then what the guard keeps: the tuned checkpoint if its gain exceeds chance,
else the same bytes as before. Chance shows in the number on two halves of the data (--halves), in repeats, or in data
held out; without any of them a run is `unguarded`. --dry-run scores the checkpoint once, unchanged, and says what would
move. Writes report.json and log.txt too. docs/checkpoint.md has more.
"""

import argparse
import errno
import os
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.evidence.cli import LOG, errors_in_one_line
from metricopt_ext.plain import plain

TAIL = 20  # lines of a failed trial's log that are shown


def main() -> None:
    """Read the command line, tune, report; an error that a user can fix is printed in few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, type=Path, metavar="FILE", help=".safetensors, or .pth, .pt or .th of torch"
    )
    parser.add_argument("--entry", metavar="KEY", help="where the state dict is in the file, if it has several")
    parser.add_argument("--score", required=True, metavar="COMMAND", help="prints the number for {checkpoint}")
    reads = parser.add_mutually_exclusive_group(required=True)
    reads.add_argument("--parse", metavar="REGEX", help="its first group is the number; the last match counts")
    reads.add_argument("--parse-json", metavar="FILE:KEY", help="where COMMAND writes the number; KEY may have dots")
    parser.add_argument(
        "--queries", required=True, type=int, metavar="N", help="how many times COMMAND may be run by the search"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="the tuned checkpoint, of the same kind"
    )
    parser.add_argument(
        "--output-dir",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder of the run: logs, report, what --resume needs",
    )
    parser.add_argument(
        "--holdout", metavar="COMMAND", help="the same for data that --score does not see: two or three runs at the end"
    )
    parser.add_argument(
        "--halves", nargs=2, metavar=("REGEX_A", "REGEX_B"), help="the number on two random halves of the data"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="runs of COMMAND for one trial, if its number is noisy"
    )
    parser.add_argument("--minimize", action="store_true", help="lower is better")
    parser.add_argument(
        "--layers", nargs="+", metavar="PATTERN", help="the norms that move, by name, e.g. 'layer4.*'; default: all"
    )
    parser.add_argument(
        "--offsets", metavar="KEY", help="a bias whose numbers move one by one, as that of a classifier's last layer"
    )
    parser.add_argument(
        "--dim", type=int, default=16, metavar="N", help="number of directions in which the norms move; default 16"
    )
    parser.add_argument(
        "--gradients",
        metavar="MODULE:FUNCTION",
        help="FUNCTION(file, keys) returns gradients of a loss by key, as a dict; they tell which directions matter",
    )
    parser.add_argument("--gradients-folder", default="", metavar="DIR", help="where MODULE is, if it is not installed")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds that one run of COMMAND may take")
    parser.add_argument("--failures", type=int, default=0, metavar="N", help="how many trials may fail; default none")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="how many runs of COMMAND at once; the result is the same"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the directions and the search; default 0")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run in DIR")
    parser.add_argument(
        "--dry-run", action="store_true", help="score the unchanged checkpoint, say what would move, and stop"
    )
    arguments = parser.parse_args()
    try:
        scores = read_commands(arguments)
    except ConfigError as error:
        parser.error(str(error))
    with errors_in_one_line(keeps=arguments.output_dir, resume="--resume"):
        from metricopt_ext.evidence.program_trials import TrialError

        try:
            run(arguments, *scores)
        except TrialError as error:
            show_end(error.log)
            raise
        except FileFormatError as error:
            sys.exit(f"error: {error}")  # with its lines of Python


def read_commands(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Check the switches; returns what scores a checkpoint, and what does on data held out, or None.

    Raises:
        ConfigError: A switch is out of range, or clashes with another.
    """
    from metricopt_ext.tasks.program_score import CHECKPOINT, Printed, ProgramScore, Written
    from metricopt_ext.utils.program import command_words

    least = {"--queries": 1, "--repeats": 1, "--dim": 1, "--failures": 0, "--jobs": 1, "--seed": 0}
    for switch, bound in least.items():
        value = getattr(arguments, switch[2:])
        if value < bound:
            raise ConfigError(f"{switch} {value}: it must be at least {bound}")
    if arguments.timeout is not None and not arguments.timeout > 0:
        raise ConfigError(f"--timeout {arguments.timeout:g}: it must be above 0")
    kind = arguments.checkpoint.suffix
    if arguments.output.suffix != kind:
        raise ConfigError(f"--output {arguments.output} must end in {kind}, as --checkpoint does: its kind stays")
    if arguments.output.resolve() == arguments.checkpoint.resolve():
        raise ConfigError(f"--output {arguments.output} is the checkpoint itself; use another file")
    number = Printed(arguments.parse, "--parse") if arguments.parse else Written(arguments.parse_json, "--parse-json")
    if arguments.jobs > 1 and isinstance(number, Written) and number.shared:
        raise ConfigError(f"--jobs {arguments.jobs}: all would write {arguments.parse_json}; put {{trial}} in its name")
    halves = [Printed(each, "--halves") for each in arguments.halves or ()]

    def score(command: str, switch: str) -> Any:
        words = command_words(command, switch, needed=[CHECKPOINT])
        if shutil.which(words[0]) is None:
            raise ConfigError(f"{switch}: there is no program {words[0]!r}")
        both = (halves[0], halves[1]) if halves and switch == "--score" else None
        return ProgramScore(words, number, both, arguments.repeats, arguments.timeout)

    return score(arguments.score, "--score"), arguments.holdout and score(arguments.holdout, "--holdout")


def run(arguments: argparse.Namespace, score: Any, holdout: Any) -> dict[str, Any]:
    """Tune the checkpoint and write the report; returns it, an empty one of a dry run.

    Raises:
        MetricOptError, OSError: As from `CheckpointRun`.
    """
    from metricopt_ext.adapters.skeleton import chosen
    from metricopt_ext.evidence.checkpoint_run import CheckpointRun
    from metricopt_ext.utils.checkpoint_file import read_checkpoint
    from metricopt_ext.utils.identity import sole_writer
    from metricopt_ext.utils.imports import import_named
    from metricopt_ext.utils.progress import Bars
    from metricopt_ext.utils.run_log import run_log, telling_warnings

    check_writable(arguments.output)
    gradients = arguments.gradients
    file = read_checkpoint(arguments.checkpoint, arguments.entry)
    moved = chosen(file, arguments.layers, arguments.offsets)
    one = CheckpointRun(
        file,
        moved,
        score,
        arguments.output_dir,
        holdout=holdout,
        maximize=not arguments.minimize,
        dim=arguments.dim,
        seed=arguments.seed,
        gradients=gradients and import_named(gradients, arguments.gradients_folder, "--gradients-folder"),
    )
    with ExitStack() as held:
        held.enter_context(sole_writer(arguments.output_dir))
        if one.begun() and not (arguments.resume or arguments.dry_run):
            one.claim(identity(arguments), resume=False)
        unchanged = None
        if not one.begun() or arguments.dry_run:
            unchanged = one.score_unchanged()
            print(f"score of the unchanged checkpoint: {unchanged.value:.6g} ({unchanged.seconds:.1f} s)")
        if arguments.dry_run:
            show_plan(arguments, one, unchanged)
            return {}
        one.claim(identity(arguments), arguments.resume)
        log = held.enter_context(run_log(arguments.output_dir / LOG))
        held.enter_context(telling_warnings(log))
        began = time.monotonic()
        with Bars(log=log) as bars:
            tuned = one.tune(
                arguments.queries,
                unchanged=unchanged,
                jobs=arguments.jobs,
                failures=arguments.failures,
                resume=arguments.resume,
                watcher=bars.watch("score", arguments.queries, "score"),
            )
        one.write(arguments.output, tuned)
        return report(arguments, one, tuned, time.monotonic() - began)


def check_writable(path: Path) -> None:
    """Check that a file can be written long before it is.

    Raises:
        OSError: It is a folder, or its folder can't be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def identity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the run depends on, so that another is not taken for it."""
    names = (
        "entry",
        "score",
        "parse",
        "parse_json",
        "halves",
        "holdout",
        "repeats",
        "minimize",
        "dim",
        "seed",
        "queries",
        "gradients",
    )
    return {name: getattr(arguments, name) for name in names}


def show_plan(arguments: argparse.Namespace, one: Any, unchanged: Any) -> None:
    """Print what would move, how long the run would take and how much disk it needs."""
    from metricopt_ext.evidence.style import print_table
    from metricopt_ext.utils.words import counted, duration

    rows = [[each.layer, each.kind, str(len(each.keys) * each.channels)] for each in one.moved]
    total = sum(int(row[-1]) for row in rows)
    print_table(["layer", "kind", "numbers"], [*rows, ["in all", "", str(total)]], left=2, bold=[len(rows)])
    seconds = unchanged.seconds / arguments.repeats * arguments.queries / arguments.jobs
    free = shutil.disk_usage(arguments.output_dir).free
    print(
        f"{counted(arguments.queries, 'query')} would take about {duration(seconds)}, and up to"
        f" {megabytes(one.disk(arguments.jobs))} of disk ({megabytes(free)} are free)"
    )


def megabytes(size: int) -> str:
    """Return a number of bytes as MB, of 10^6 bytes each."""
    return f"{size / 1e6:,.1f} MB"


def report(arguments: argparse.Namespace, one: Any, tuned: Any, seconds: float) -> dict[str, Any]:
    """Write and print what was found; returns the report."""
    from metricopt_ext.evidence.report import versions
    from metricopt_ext.evidence.style import print_table, print_written
    from metricopt_ext.utils.files import write_json

    result = tuned.result
    content = {
        "task": "checkpoint",
        "metric": {"name": result.metric, "maximize": one.maximize},
        "before": result.before,
        "after": result.after,
        "best": result.best,
        "kept": result.chosen,
        "guard": {
            "by": result.guard,
            "chance": result.chance,
            "optimism": result.optimism,
            "needed": result.needed,
            "held out": result.aside,
        },
        "queries": tuned.queries,
        "failed": tuned.failed,
        "seconds": seconds,
        "moved": [each._asdict() for each in one.moved],
        "versions": versions(),
        "config": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
    }
    path = arguments.output_dir / "report.json"
    write_json(path, content)
    header = ["score", "before", "best", "after", "guard", "queries", "failed"]
    numbers = [f"{each:.4f}" for each in (result.before, result.best, result.after)]
    guard = "unguarded" if result.guard == "none" else result.guard
    queries = " + ".join(map(str, tuned.queries.values()))
    print_table(header, [["validation", *numbers, guard, queries, str(tuned.failed)]])
    for name, value in result.aside.items():
        print(plain(f"held out, {name}: {value:.4f}"))
    if result.best != result.after:
        print(f"the best candidate has {result.best:.4f}, but {result.doubt()}")
    if result.guard == "none":
        print("unguarded: nobody can tell how much of a gain is chance; give --halves, --repeats or --holdout")
    print(*map(plain, result.details.lines(result)), sep="\n")  # what there is to say of the search
    print_written(path, arguments.output_dir / LOG, arguments.output)
    if tuned.changed:
        print(plain(f"{arguments.output} is tuned: {result.before:.4f} -> {result.after:.4f}"))
    else:
        print(plain(f"nothing was kept: {arguments.output} is {arguments.checkpoint}, byte for byte"))
    return content


def show_end(log: Path) -> None:
    """Print the last lines of a failed trial's log."""
    from metricopt_ext.utils.program import last_lines

    print(plain(f"the end of {log}:"), *(plain(line) for line in last_lines(log, TAIL)), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
