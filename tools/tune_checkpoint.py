r"""Tune a checkpoint for a number that a command of yours prints.

    metricopt tune-checkpoint --checkpoint model.pth --score 'python evaluate.py --weights {checkpoint}' \
        --parse 'accuracy: ([0-9.]+)' --queries 100 --output tuned.pth --output-dir out/tuned

COMMAND is started without a shell, in this directory, once for each query. {checkpoint} is replaced by the path of a
file like --checkpoint, with other numbers in its norms, and {trial} by the trial's number. Its output is kept in
DIR/trials. The number is the last match of --parse, in standard output or else in standard error, or is in a JSON file
that the command writes. An exit status other than 0, no number, or nan is a failed trial.

With --combine worst the number is the worst of several: REGEX, as '^(\w+)=(\S+)', has groups for name and number.

--also 'accuracy=acc: ([0-9.]+)' reads another number, and --subject-to 'accuracy: >= start - 0.005' limits it: the
search goes where the limit holds, and what violates it is not kept.

With --mix FILE ..., finetunes of the checkpoint, the norms don't move: the search finds how much of each file's weights
to mix in, from -0.5 to 1.5, and with --offsets KEY the offsets of a bias. All files are held in memory.

With --setting nms=0.3:0.9 or --setting size=320,480,640, {nms} and {size} in COMMAND are replaced too. Settings come
first, with at most 10 queries; then the norms, with the settings that were kept. `metricopt tune-settings` tunes
settings without a checkpoint; its --help explains SPEC.

A guided search finds the numbers. --output is then what the guard keeps: the tuned checkpoint if its gain exceeds
chance, else the same bytes as before. Chance shows in the number on two halves of the data (--halves), in repeats, or
in held-out data; without any of them a run is `unguarded`. --dry-run scores the unchanged checkpoint once and says what
would move. Also writes report.json and log.txt. docs/checkpoint.md has more.
"""

import argparse
import errno
import os
import shlex
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.experiment.cli import LOG
from metricopt_ext.experiment.command import LIMIT_BROKEN, errors_in_one_line
from metricopt_ext.experiment.program_switches import (
    Scores,
    add_score_switches,
    add_setting_switches,
    as_written,
    identity_of,
    print_settings,
    read_scores,
    show_end,
    told_of_settings,
    unguarded,
)
from metricopt_ext.experiment.program_trials import TrialError
from metricopt_ext.plain import plain
from metricopt_ext.tasks.inference_file import INFERENCE, save_inference
from metricopt_ext.tasks.program_score import CHECKPOINT, TRIAL
from metricopt_ext.tasks.settings import QUERIES

DIM = 16  # of the norms
NO_BIAS = ("weight", "running_mean", "running_var")  # ends of the names of vectors that --offsets can't mean


def main() -> None:
    """Read the command line, tune, report; an error that a user can fix is printed in few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, type=Path, metavar="FILE", help=".safetensors, or .pth, .pt or .th of torch"
    )
    parser.add_argument("--entry", metavar="KEY", help="where the state dict is in each file, if it has several")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="the tuned checkpoint, of the same kind"
    )
    add_score_switches(parser, "{checkpoint}")
    add_setting_switches(parser, required=False)
    parser.add_argument(
        "--layers", nargs="+", metavar="PATTERN", help="the norms that move, by name, e.g. 'layer4.*'; default: all"
    )
    parser.add_argument(
        "--offsets", metavar="KEY", help="a bias whose numbers move one by one, as that of a classifier's last layer"
    )
    parser.add_argument(
        "--dim", type=int, metavar="N", help=f"number of directions in which the norms move; default {DIM}"
    )
    parser.add_argument(
        "--mix",
        nargs="+",
        metavar="FILE",
        help="1 to 8 finetunes of the checkpoint, of each of which the search mixes some in; the norms stay",
    )
    parser.add_argument(
        "--gradients",
        metavar="MODULE:FUNCTION",
        help="FUNCTION(file, keys) returns gradients of a loss by key, as a dict; they tell which directions matter",
    )
    parser.add_argument("--gradients-folder", default="", metavar="DIR", help="where MODULE is, if it is not installed")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the directions and the search; default 0")
    parser.add_argument(
        "--dry-run", action="store_true", help="score the unchanged checkpoint, say what would move, and stop"
    )
    arguments = parser.parse_args()
    try:
        check_mixture(arguments)
        scores = read_scores(arguments, least=[("dim", 1), ("seed", 0)], needed=[CHECKPOINT])
        check_output(arguments)
    except ConfigError as error:
        parser.error(str(error))
    with errors_in_one_line(keeps=arguments.output_dir, resume="--resume"):
        try:
            report = run(arguments, scores)
        except TrialError as error:
            show_end(error.log)
            raise
        except FileFormatError as error:
            sys.exit(f"error: {error}")  # with its lines of Python
    if report.get("broken"):
        sys.exit(LIMIT_BROKEN)


def check_mixture(arguments: argparse.Namespace) -> None:
    """Refuse switches of the norms beside --mix and offsets of what is no bias, and set the default of --dim.

    Raises:
        ConfigError: There is one.
    """
    if arguments.offsets and arguments.offsets.rpartition(".")[2] in NO_BIAS:
        raise ConfigError(f"--offsets {arguments.offsets} is no bias, by its name; name one, as that of the last layer")
    for name in ("layers", "dim", "gradients"):
        if arguments.mix and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is of the norms, which --mix leaves as they are; leave one of them out")
    if arguments.dim is None:
        arguments.dim = DIM


def check_output(arguments: argparse.Namespace) -> None:
    """Refuse a file that can't take the tuned checkpoint.

    Raises:
        ConfigError: It is of another kind, or a file that is read.
    """
    kind = arguments.checkpoint.suffix
    if arguments.output.suffix != kind:
        raise ConfigError(f"--output {arguments.output} must end in {kind}, as --checkpoint does: its kind stays")
    if is_file(arguments.output, arguments.checkpoint):
        raise ConfigError(f"--output {arguments.output} is the checkpoint itself; use another file")
    if taken := [each for each in arguments.mix or () if is_file(arguments.output, Path(each))]:
        raise ConfigError(f"--output {arguments.output} is {taken[0]} of --mix, which is read; use another file")


def is_file(path: Path, other: Path) -> bool:
    """Whether two paths are of one file, by links too."""
    return path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))


def run(arguments: argparse.Namespace, scores: Scores) -> dict[str, Any]:
    """Tune settings if there are any, then the checkpoint, and write the report; returns it, an empty one of a dry run.

    Raises:
        MetricOptError, OSError: As from `CheckpointRun`.
    """
    from metricopt_ext.adapters.file import mixture, norms
    from metricopt_ext.experiment.checkpoint_run import CheckpointRun
    from metricopt_ext.experiment.settings_run import SettingsRun
    from metricopt_ext.runtime.identity import sole_writer
    from metricopt_ext.runtime.progress import Bars
    from metricopt_ext.runtime.run_log import run_log, telling_warnings
    from metricopt_ext.utils.checkpoint_file import read_checkpoint
    from metricopt_ext.utils.imports import import_named

    check_writable(arguments.output)
    gradients = arguments.gradients
    file = read_checkpoint(arguments.checkpoint, arguments.entry)
    if arguments.mix:
        moving = mixture(file, [Path(each) for each in arguments.mix], arguments.offsets, arguments.entry)
    else:
        moving = norms(file, arguments.layers, arguments.offsets, dim=arguments.dim, seed=arguments.seed)
    score, holdout = scores.at({})
    one = CheckpointRun(
        file,
        moving,
        score,
        arguments.output_dir,
        holdout=holdout,
        maximize=not arguments.minimize,
        subject_to=scores.subject_to,
        seed=arguments.seed,
        gradients=gradients and import_named(gradients, arguments.gradients_folder, "--gradients-folder"),
    )
    if scores.settings is None:  # too few are refused before anything runs
        one.check_queries(arguments.queries)
    else:
        settings_budget(arguments, one.least_queries)
    with ExitStack() as held:
        held.enter_context(sole_writer(arguments.output_dir))
        if one.started() and not (arguments.resume or arguments.dry_run):
            one.claim(identity(arguments), resume=False)
        unchanged = None
        if not one.started() or arguments.dry_run:
            unchanged = one.score_unchanged()
            print(f"score of the unchanged checkpoint: {unchanged.value:.6g} ({unchanged.seconds:.1f} s)")
        if arguments.dry_run:
            show_plan(arguments, scores, one, unchanged)
            return {}
        one.claim(identity(arguments), arguments.resume)
        log = held.enter_context(run_log(arguments.output_dir / LOG))
        held.enter_context(telling_warnings(log))
        began = time.monotonic()
        with Bars(log=log) as bars:
            callback = bars.watch("score", arguments.queries, "score")
            first = None
            if scores.settings is not None:
                first = SettingsRun(
                    scores.settings,
                    scores.score,
                    arguments.output_dir,
                    holdout=scores.holdout,
                    maximize=one.maximize,
                    subject_to=scores.subject_to,
                    checkpoint=arguments.checkpoint,
                    prefix="settings-",
                ).tune(
                    settings_budget(arguments, one.least_queries),
                    defaults=unchanged,
                    jobs=arguments.jobs,
                    failures=arguments.failures,
                    callback=callback,
                )
                one.score, one.holdout = scores.at(first.values)
                if first.constrained is not None:  # relative to the defaults, not to what was kept of them
                    one.subject_to = first.constrained.limits.texts()
                unchanged = first.after
            spent = 0 if first is None else first.queries["score"] - arguments.repeats  # what phi's search finds done
            tuned = one.tune(
                arguments.queries - spent,
                unchanged=unchanged,
                jobs=arguments.jobs,
                failures=arguments.failures - (0 if first is None else first.failed),
                resume=arguments.resume,
                callback=callback,
                before=spent,
            )
        one.write(arguments.output, tuned)
        return report(arguments, scores, one, first, tuned, time.monotonic() - began)


def settings_budget(arguments: argparse.Namespace, least: int) -> int:
    """Return how many queries the settings may take, the defaults' among them, which phi's search needs too.

    Args:
        arguments: The command line.
        least: The fewest queries that phi's search can do with.

    Raises:
        ConfigError: Not enough are left to try any value.
    """
    repeats: int = arguments.repeats
    left: int = arguments.queries - least + repeats
    if left < 2 * repeats:
        raise ConfigError(
            f"--queries {arguments.queries} with --repeats {repeats}: at least {least + repeats} are needed, {least} of"
            " them for the checkpoint; metricopt tune-settings tunes settings alone with fewer"
        )
    return min((1 + QUERIES) * repeats, left)


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
    return identity_of(arguments, "entry", "dim", "seed", "gradients")


def show_plan(arguments: argparse.Namespace, scores: Scores, one: Any, unchanged: Any) -> None:
    """Print what would move, how long the run would take and how much disk it needs."""
    from metricopt_ext.experiment.style import print_table
    from metricopt_ext.utils.words import counted, duration

    if scores.settings is not None:
        print_settings(scores.settings)
    rows = [[part.name, part.kind, str(part.numbers)] for part in one.moving.parts]
    total = sum(part.numbers for part in one.moving.parts)
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


def report(
    arguments: argparse.Namespace, scores: Scores, one: Any, first: Any, tuned: Any, seconds: float
) -> dict[str, Any]:
    """Write and print what was found; returns the report.

    Args:
        arguments: The command line.
        scores: What it says of the command.
        one: The run on the checkpoint.
        first: What the run on settings found; None without any.
        tuned: What the run on the checkpoint found.
        seconds: How long both took.
    """
    from metricopt_ext.experiment.style import print_table, print_written
    from metricopt_ext.utils.files import write_json
    from metricopt_ext.utils.versions import versions
    from metricopt_ext.utils.words import decimals

    result, settings = tuned.result, scores.settings
    own = queries = dict(tuned.queries)
    if first is not None:
        own["score"] -= arguments.repeats  # the first trial was one of the settings
        aside = first.queries.get("held out", 0) + own.get("held out", 0)
        queries = {"settings": first.queries["score"], **own, **({"held out": aside} if aside else {})}
    content = {
        "task": "checkpoint",
        "metric": {"name": result.metric, "maximize": one.maximize},
        **{key: each for key, each in result.to_json().items() if key not in ("metric", "queries")},
        "queries": queries,
        "failed": tuned.failed,
        "seconds": seconds,
        "moved": [part._asdict() for part in one.moving.parts],
        "versions": versions(),
        "config": as_written(arguments),
    }
    written = [arguments.output_dir / "report.json", arguments.output_dir / LOG, arguments.output]
    if first is not None and settings is not None:
        command = shlex.join(one.score.command({CHECKPOINT: str(arguments.output), TRIAL: "tuned"}))
        content |= {"settings first": told_of_settings(settings, first), "command": command}
        written.insert(2, arguments.output_dir / INFERENCE)
        save_inference(written[2], settings, first.values, factors=False)
        print_settings(settings, first.values)
    write_json(written[0], content)
    header = ["score", "before", "best", "after", "guard", "queries", "failed"]
    rows = [] if first is None else [["settings", *first.row()]]
    numbers = [decimals(each) for each in (result.before, result.best, result.after)]
    guard = "unguarded" if result.guard == "none" else result.guard
    spent = " + ".join(map(str, own.values()))
    print_table(
        header, [*rows, ["validation" if first is None else "checkpoint", *numbers, guard, spent, str(tuned.failed)]]
    )
    for line in [] if first is None else [*first.lines(settings), *unguarded(arguments, first.guard)]:
        print(plain(f"settings: {line}"))
    print(*map(plain, [*result.findings(), *unguarded(arguments, result.guard), *result.on_search()]), sep="\n")
    print_written(*written)
    if tuned.changed:
        print(plain(f"{arguments.output} is tuned: {decimals(result.before)} -> {decimals(result.after)}"))
    else:
        print(plain(f"nothing was kept: {arguments.output} is {arguments.checkpoint}, byte for byte"))
    if first is not None:
        print(plain(f"with the settings: {decimals(first.before.value)} -> {decimals(result.after)}; to use both:"))
        print(plain(command, lines=True))
    return content


if __name__ == "__main__":
    main()
