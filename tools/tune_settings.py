r"""Tune the settings of a command of yours for a number that it prints.

    metricopt tune-settings --score 'python evaluate.py --nms {nms} --size {size}' --parse 'AP50: ([0-9.]+)' \
        --setting nms=0.3:0.9 --default nms=0.5 --setting size=320,480,640 --queries 10 --output-dir out/settings

COMMAND is started without a shell, in this directory, once for each query. {nms} and {size} are replaced by values of
the settings, and {trial} by the trial's number. LOW:HIGH is an interval: of integers if LOW, HIGH and the default are
integers, else of numbers. LOW:HIGH:log and LOW:HIGH:logit use a logarithmic and a log-odds scale. A,B,C are values,
tried one by one. --default gives a setting's present value; else it is the middle of its interval, or the first of its
values. The defaults are the first query; gains are measured from them.

COMMAND's output is kept in DIR/trials. The number is the last match of --parse, in standard output or else in standard
error, or is in a JSON file that COMMAND writes. An exit status other than 0, no number, or nan is a failed trial.
With --combine worst the number is the worst of several: REGEX, as '^(\w+)=(\S+)', has groups for name and number.
--also 'accuracy=acc: ([0-9.]+)' reads another number, and --subject-to 'accuracy: >= start - 0.005' limits it: what
violates the limit is not kept.

The guard keeps what gains more than chance, as shown by two halves of the data (--halves), repeats, or held-out data;
without any of them a run is `unguarded`. The last line printed is COMMAND with the settings kept, which
DIR/inference.yaml has too. --dry-run scores the defaults once and says what would be tried. docs/checkpoint.md has
more.
"""

import argparse
import shlex
import sys
import time
from contextlib import ExitStack
from typing import Any

from metricopt_ext.errors import ConfigError
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
from metricopt_ext.experiment.settings_run import SettingsOutcome, SettingsRun
from metricopt_ext.experiment.style import print_table, print_written
from metricopt_ext.plain import plain
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.progress import Bars
from metricopt_ext.runtime.run_log import run_log, telling_warnings
from metricopt_ext.tasks.inference_file import INFERENCE, save_inference
from metricopt_ext.tasks.program_score import TRIAL, Score
from metricopt_ext.tasks.program_settings import ProgramSettings
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.versions import versions
from metricopt_ext.utils.words import counted, decimals, duration


def main() -> None:
    """Read the command line, tune, report; an error that a user can fix is printed in few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_setting_switches(parser, required=True)
    add_score_switches(parser, "settings, whose names are in braces in it")
    parser.add_argument("--dry-run", action="store_true", help="score the defaults, say what would be tried, and stop")
    arguments = parser.parse_args()
    try:
        scores = read_scores(arguments)
    except ConfigError as error:
        parser.error(str(error))
    with errors_in_one_line(keeps=arguments.output_dir, resume="--resume"):
        try:
            content = run(arguments, scores)
        except TrialError as error:
            show_end(error.log)
            raise
    if content.get("broken"):
        sys.exit(LIMIT_BROKEN)


def run(arguments: argparse.Namespace, scores: Scores) -> dict[str, Any]:
    """Tune the settings and write the report; returns it, an empty one of a dry run.

    Raises:
        MetricOptError, OSError: As from `SettingsRun`.
    """
    settings = scores.settings
    assert settings is not None  # --setting is required
    one = SettingsRun(
        settings,
        scores.score,
        arguments.output_dir,
        holdout=scores.holdout,
        maximize=not arguments.minimize,
        subject_to=scores.subject_to,
    )
    one.check(arguments.queries)
    with ExitStack() as held:
        held.enter_context(sole_writer(arguments.output_dir))
        if one.started() and not (arguments.resume or arguments.dry_run):
            one.claim(identity_of(arguments), resume=False)
        defaults = None
        if not one.started() or arguments.dry_run:
            defaults = one.score_defaults()
            print(f"score with the defaults: {defaults.value:.6g} ({defaults.seconds:.1f} s)")
        if arguments.dry_run and defaults is not None:
            show_plan(arguments, settings, defaults)
            return {}
        one.claim(identity_of(arguments), arguments.resume)
        log = held.enter_context(run_log(arguments.output_dir / LOG))
        held.enter_context(telling_warnings(log))
        began = time.monotonic()
        with Bars(log=log) as bars:
            callback = bars.watch("score", arguments.queries, "score")
            tuned = one.tune(
                arguments.queries,
                defaults=defaults,
                jobs=arguments.jobs,
                failures=arguments.failures,
                callback=callback,
            )
            callback.outcome(tuned.before.value, tuned.after.value)
            callback.done()
        return report(arguments, scores, tuned, time.monotonic() - began)


def show_plan(arguments: argparse.Namespace, settings: ProgramSettings, defaults: Score) -> None:
    """Print what would be tried, and how long the run would take."""
    print_settings(settings)
    seconds = defaults.seconds / arguments.repeats * arguments.queries / arguments.jobs
    print(f"{counted(arguments.queries, 'query')} would take up to about {duration(seconds)}")


def report(arguments: argparse.Namespace, scores: Scores, tuned: SettingsOutcome, seconds: float) -> dict[str, Any]:
    """Write and print what was found; returns the report."""
    settings = scores.settings
    assert settings is not None  # --setting is required
    command = shlex.join(scores.at(tuned.values)[0].command({TRIAL: "tuned"}))
    content = {
        "task": "settings",
        "metric": {"name": "score", "maximize": not arguments.minimize},
        **told_of_settings(settings, tuned),
        "command": command,
        "seconds": seconds,
        "versions": versions(),
        "config": as_written(arguments),
    }
    path, inference = arguments.output_dir / "report.json", arguments.output_dir / INFERENCE
    write_json(path, content)
    save_inference(inference, settings, tuned.values, factors=False)
    print_settings(settings, tuned.values)
    header = ["score", "before", "best", "after", "guard", "queries", "failed"]
    print_table(header, [["validation", *tuned.row()]])
    print(*map(plain, [*tuned.lines(settings), *unguarded(arguments, tuned.guard)]), sep="\n")
    print_written(path, arguments.output_dir / LOG, inference)
    if tuned.changed:
        print(plain(f"tuned: {decimals(tuned.before.value)} -> {decimals(tuned.after.value)}; to use it:"))
    else:
        print("nothing was kept: the defaults stay")
    print(plain(command, lines=True))
    return content


if __name__ == "__main__":
    main()
