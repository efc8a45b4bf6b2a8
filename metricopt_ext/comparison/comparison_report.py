"""A comparison's report: what came out in words, with its tables and picture, as files and on the terminal."""

from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.comparison.claims import OURS, baselines_of, entry_of, guard_blocks, pair, shown, tests
from metricopt_ext.comparison.comparison_content import FILE, known
from metricopt_ext.comparison.comparison_plot import PICTURE, plot
from metricopt_ext.comparison.comparison_tables import (
    LABELLED,
    PAIRED,
    PAIRS,
    UNGUARDED,
    means_table,
    of_seeds,
    on_all_seeds,
    pair_rows,
    rows_of,
)
from metricopt_ext.comparison.guarded import TRAINED
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.seeds import chance_in_words
from metricopt_ext.experiment.style import direction, markdown_table, print_points, print_table
from metricopt_ext.methods.guard import excess_in_words
from metricopt_ext.plain import in_markdown
from metricopt_ext.utils.files import write_atomically, write_json
from metricopt_ext.utils.words import counted

# What the terminal does not show.
COLUMN_NOTES = (
    "needs: what a method uses of the validation data: the metric's scores alone, the inputs, or the labels too; a"
    " method needs what its starts need",
    "training data, under needs: the method uses training examples (class shares alone do not count)",
    "passes: evaluations of the metric that ran the model over its data + batches whose loss gradient was computed",
    "seconds and passes are for a method's largest budget, starts included",
)


def write(content: dict[str, Any], folder: Path) -> list[Path]:
    """Write comparison.json, .md and .png; returns their paths."""
    paths = [folder / FILE, folder / "comparison.md", folder / PICTURE]
    write_json(paths[0], content)
    write_atomically(paths[1], markdown(content).encode())
    plot(content, paths[2])
    return paths


def markdown(content: dict[str, Any]) -> str:
    """Return the content of comparison.md."""
    lines = [
        f"# {in_markdown(heading(content))}",
        "",
        in_markdown(verdict(content)),
        "",
        *means_in_markdown(content),
        "",
        *(f"- {in_markdown(line)}" for line in (*notes(content), *COLUMN_NOTES)),
        "",
    ]
    if content["pairs"]:
        lines += [
            f"## {METHODS[OURS].title} against each",
            "",
            PAIRED,
            "",
            *markdown_table(PAIRS, pair_rows(content)),
            "",
        ]
    if content["guards"]:
        lines += ["## The guard", ""]
        for title, points in guard_blocks(content["guards"]):
            lines += [f"{title}:", "", *(f"- {point}" for point in points), ""]
    return "\n".join([*lines, in_markdown(computed_on(content)), ""])


def computed_on(content: dict[str, Any]) -> str:
    """Say which machines the digits are of."""
    return f"Computed on {'; '.join(content['machines'])}; other processors give other digits."


def heading(content: dict[str, Any]) -> str:
    """Return what a comparison is about."""
    metric = content["metric"]
    return f"{content['title']}: {metric['name']} ({direction(metric['maximize'])})"


def verdict(content: dict[str, Any]) -> str:
    """Say in a few sentences what came out at the largest number of queries, and whether it may be chance."""
    budget, titles = content["budgets"][-1], {name: entry_of(name).title for name in (*baselines_of(content), OURS)}
    values = {name: each for name in titles if (each := tests(content, name, budget)) and known(each)}
    means = {name: mean for name, each in values.items() if (mean := on_all_seeds(each)) is not None}
    top = (max if content["metric"]["maximize"] else min)(means, key=means.__getitem__, default=None)
    best = f"The best method on test is {titles[top]} with {means[top]:.4f}" if top else "Nothing ran on all seeds"
    said = f"{heading(content)}, {counted(budget, 'query')}, mean over {counted(len(content['seeds']), 'seed')}"
    if left := [titles[name] for name in values if name not in means]:
        best += f" (of what ran on all seeds, unlike {', '.join(left)})" if top else ""
    if OURS not in values:
        return f"{said}. {best}; the model as it was has {np.mean(known(values[TRAINED])):.4f}."
    seen = (content["starts"][TRAINED], content["methods"][OURS]["cells"][str(budget)])
    shared = [i for i, pair in enumerate(zip(*(each["test"] for each in seen), strict=True)) if None not in pair]
    on_test, on_validation = (
        " → ".join(f"{np.mean(known([each[part][i] for i in shared])):.4f}" for each in seen) + f" on {part}"
        for part in ("test", "validation")
    )
    few = of_seeds(values[OURS])
    on_validation += f" {few}" if few else ""
    judged = [each["whole"] for each in content["guards"] if (each["method"], each["budget"]) == (OURS, budget)]
    guard = (
        f" The guard accepted a change in {sum(each['accepted'] for each in judged)} of {len(judged)} seeds."
        if judged
        else ""
    )
    gain = f"The gain on test, with its 95% interval, is {_difference(content, TRAINED, budget)}."
    over = f"; MetricOpt's gain over it is {_difference(content, top, budget)}" if top not in (None, OURS) else ""
    return f"{said}. MetricOpt: {on_test} and {on_validation}.{guard} {gain} {best}{over}."


def _difference(content: dict[str, Any], baseline: str, budget: int) -> str:
    """Say by how much ours is better than a baseline, and whether that may be chance."""
    found = pair(content, baseline, budget)
    return "unknown" if found is None else f"{shown(found.interval)}, {chance_in_words(found.interval)}"


def means_in_markdown(content: dict[str, Any]) -> list[str]:
    """Return the table of means in Markdown, with what it is of."""
    said, header, rows = means_table(content)
    cells = [[row.title, row.needs, *row.cells("**{}**".format), row.seconds, row.passes] for row in rows]
    return [f"{said}; bold: best in its column.", "", *markdown_table(header, cells)]


def print_report(content: dict[str, Any]) -> None:
    """Print the table of means, what it leaves out, and our differences."""
    metric = content["metric"]
    print_table(
        ["method", *map(str, content["budgets"])],
        [[row.title, *row.cells("*{}".format)] for row in rows_of(content)],
        title=f"{content['title']}: test {metric['name']} ({direction(metric['maximize'])}),"
        f" {counted(len(content['seeds']), 'seed')}, by queries; *: best in its column",
    )
    print()
    print_points(notes(content))
    if content["pairs"]:
        print()
        ours = METHODS[OURS].title
        print_table(PAIRS, pair_rows(content), title=f"{ours} against each, paired by seed; positive favours {ours}")
        print()
        print_points([PAIRED])
    for title, points in guard_blocks(content["guards"]) if content["guards"] else ():
        print(f"\n{title}:")
        print_points(points)


def notes(content: dict[str, Any]) -> list[str]:
    """Say what the numbers count, which cells are impossible and which failed."""
    best = content["best_start"]
    often = {name: best["chosen"].count(name) for name in content["starts"]}
    chosen = ", ".join(f"{entry_of(name).title} in {count}" for name, count in often.items() if count)
    lines = [
        "every call of the metric is a query; methods that continue from the chosen start are charged the"
        f" {counted(best['queries'], 'query')} that choose it ({chosen})",
    ]
    if any(each["method"] == OURS for each in content["guards"]):
        lines.append(
            f"{UNGUARDED}: where the same searches ended, whether kept or not; for reference, so never marked as best"
        )
    if bounds := content.get("subject_to"):
        limits = " and ".join(f"{name} {limit}" for name, limit in bounds.items())
        lines.append(
            f"each method ends at its best queried point subject to {limits} on validation, if any satisfies this;"
            " free starts ignore it"
        )
        lines += [
            f"{METHODS[each['method']].title} with {counted(each['budget'], 'query')}, seed {each['seed']}: what is"
            f" kept violates {excess_in_words(each['broken'])} on validation; none of its points satisfies all limits"
            for each in content["guards"]
            if each.get("broken")
        ]
    if LABELLED in content["methods"] or LABELLED in content["starts"]:
        lines.append(
            f"{METHODS[LABELLED].title}: a third of the labels decides when to stop, then all are trained on; this"
            " counts no query"
        )
    most = content["config"].get("most", {})
    for name, method in content["methods"].items():
        title, seeds = METHODS[name].title, len(content["seeds"])
        if any(budget < method["least"] for budget in content["budgets"]):
            least = counted(method["least"], "query")
            lines.append(f"{title} needs at least {least}, including those that choose the start")
        above = [budget for budget in content["budgets"] if budget > most.get(name, budget)]
        if any(str(budget) not in method["cells"] for budget in above):
            lines.append(f"{title} is left out above {counted(most[name], 'query')}, by the key most")
        for budget, errors in method["errors"].items():
            lines.append(f"{title} failed with {budget} queries on {len(errors)} of {seeds} seeds: {errors[0]}")
        asked = [budget for budget in content["budgets"] if budget >= method["least"] and budget not in above]
        if not method["cells"] and not method["errors"] and asked:
            lines.append(f"{title} does not apply")
    return lines
