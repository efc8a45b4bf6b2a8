"""A run as a page to hand on: what report.md says, the pictures beside it, and what to do with the outcome."""

from collections.abc import Sequence
from pathlib import Path

from metricopt_ext.data.reading import HEADER as COLUMNS
from metricopt_ext.experiment.page import Code, Figure, Folded, Page, Part, Points, Section, Table, Text
from metricopt_ext.experiment.report import IN_USE, Report
from metricopt_ext.experiment.report_text import (
    ELSEWHERE,
    GAINS,
    MORE_NOTES,
    OVER,
    PREDICTED,
    PREDICTORS,
    QUANTITIES,
    SPENT,
    UNITS,
)
from metricopt_ext.utils.files import to_json
from metricopt_ext.utils.versions import versions

FILE = "report.html"
TERMS = (
    "MetricOpt freezes a trained model and moves a small vector, phi, that modulates it. Each evaluation of the metric"
    " on the validation data is a query. A value function, f, fitted to all queries so far, predicts the metric from"
    " phi and proposes the next ones. At the end the guard keeps a change only if its gain on validation exceeds what"
    " chance and the choice of the best among many explain. The test data are not looked at until then."
)
TRUST = (
    "f is trusted if three things hold at points that it was not fitted to. It ranks them above chance. It errs less"
    " than a constant. At the points it considers best, it errs less than they gain over the start. If f is not"
    " trusted, do not let it steer a training of your own. The outcome above was measured by the metric itself, and"
    " does not depend on f."
)
NOT_COUNTED = (
    "The other methods' queries and seconds are in the table of methods. Evaluations on test are no queries, as no"
    " method sees them."
)
PATHS = "Paths are relative to this report's folder. Each seed has its own model; these lines use that of {}."
REFUSED = (
    "The guard kept no change in any seed, so the tuned models equal the originals. With more validation examples,"
    " smaller gains can be told from chance. More layers in phi, or more queries, may find larger gains."
)
MORE_SEEDS = (
    "For narrower intervals, repeat this run's command with --resume and more seeds, e.g. seeds={}. Finished seeds are"
    " not run again."
)
# What the pictures show, by the names of their files.
CAPTIONS = {
    "methods": "Each method's metric on test. The means are in the table above.",
    "search": "The metric on validation at each query of the search, and the best so far.",
    "outcomes": "What the metric is made of on validation, before and after.",
    "settings": "The metric on validation as one setting varies and the others stay fixed.",
    "finetuning": "The metric on validation along finetuning, and what the guard kept.",
    "value_function": "f's predictions against the metric's values: the nearer to the diagonal, the better.",
    "siblings": "What the sibling methods measured while they trained, a line for each seed.",
    "recalls": "Recall@k on test for many k, before and after.",
    "examples": "Test images on which the classifier changed its mind, with the classes before and after.",
    "neighbours": "Test queries whose nearest neighbours changed, before and after.",
    "detections": "Detections on test images, before and after.",
}


def report_page(report: Report, folder: Path, pictures: Sequence[Path], tuned: str) -> Page:
    """Return a run as a page; its numbers are those of report.md.

    Args:
        report: The report.
        folder: The run's folder.
        pictures: Those of the whole run, PNG; the first seed's are found in its folder.
        tuned: Name of a seed's file with the tuned model.
    """
    header, rows = report.table()
    ours = [row for row, name in enumerate(report.methods) if name == "metricopt"]
    best = {(report.methods.index(name), header.index(part)) for part in COMPARED for name in report.best(part)}
    methods = Table(
        "Methods on the same data. Marked: best in its column.", header, rows, best, ours, {0, len(header) - 1}
    )
    gains = Table(f"{GAINS}.", OVER, report.gains(), words={0, 3})
    first = report.records[0].seed
    own = sorted((folder / f"seed-{first}").glob("*.png"))
    return Page(
        report.heading,
        report.verdict(),
        [
            Section("Methods", [Text(TERMS), methods, Points([*report.notes(), *MORE_NOTES])]),
            Section("Gains", [gains, Points([*report.on_outcomes(), *report.on_guard()])]),
            *_elsewhere(report),
            Section(
                "Plots",
                [
                    *(_figure(path, report.metric) for path in pictures),
                    *(_figure(path, report.metric, f" Seed {first}.") for path in own),
                ],
            ),
            Section("Quality of f", _quality(report)),
            *_data(report),
            Section("Queries", [Table(SPENT, *report.spent()), Text(f"{report.evaluations()}. {NOT_COUNTED}")]),
            settings(report.config),
            environment(report.computed_on(), versions()),
            Section("What to do next", _next_steps(report, folder, tuned)),
        ],
    )


COMPARED = ("validation", "test")


def _figure(path: Path, metric: str, whose: str = "") -> Figure:
    caption = CAPTIONS.get(path.stem, f"{path.stem.replace('_', ' ').capitalize()}.") + whose
    return Figure(path, f"Plot, {metric}: {caption}", caption)


def _elsewhere(report: Report) -> list[Section]:
    """Return the section on other quantities than the metric, if there are any."""
    rows, said = report.elsewhere(), report.on_constraints()
    if not rows:
        return []
    return [
        Section(
            "Elsewhere", [Table(f"{ELSEWHERE}.", QUANTITIES, rows, words={0, 3}), *([Points(said)] if said else [])]
        )
    ]


def _data(report: Report) -> list[Section]:
    """Return the section on how the data were read, if there is something to say."""
    said, columns = report.read()
    if not said:
        return []
    table = [Table("Columns as they were read.", COLUMNS, columns, words={0, 1, 4})] if columns else []
    return [Section("Data", [Text(f"{said}."), *table])]


def _quality(report: Report) -> list[Part]:
    if not report.quality:
        return [Text("There is no f: the metric never varied.")]
    predictors = report.predictors()
    ours = [row for row, (name, *_) in enumerate(predictors) if name == IN_USE]
    parts: list[Part] = [
        Points(report.on_f()),
        Text(TRUST),
        Table(f"{PREDICTED}.", PREDICTORS, predictors, ours=ours),
    ]
    return [*parts, Text(UNITS)]


def settings(config: dict[str, object]) -> Section:
    """Return the section with all settings."""
    text = to_json(config, indent=2, ensure_ascii=False)
    return Section("Settings", [Folded("All settings, defaults included", [Code("Settings", text)])])


def environment(computed_on: str, found: dict[str, str]) -> Section:
    """Return the section with the machine and the versions."""
    table = Table("Versions that the numbers depend on.", ["package", "version"], list(found.items()), words={0, 1})
    return Section("Environment", [Folded("Machine and versions", [Text(computed_on), table])])


def _next_steps(report: Report, folder: Path, tuned: str) -> list[Part]:
    more = Text(MORE_SEEDS.format(max(5, 2 * len(report.records))))
    changed = [record for record in report.records if record.kept != "start"]
    if not changed:
        return [Text(REFUSED), more]
    record = changed[0]
    seed = f"seed-{record.seed}"
    load = "safetensors.torch.load_file" if tuned.endswith(".safetensors") else "torch.load"
    lines = [
        "import metricopt_ext as mo",
        "import safetensors.torch" if tuned.endswith(".safetensors") else "import torch",
        "",
        "# Export: the tuned model is an ordinary checkpoint, phi merged.",
        f'weights = {load}("{seed}/{tuned}")',
        "",
        "# Or merge phi into the model it was learned for; adapter.remove() would take it out again.",
        f'adapter = mo.load_run(model, "{seed}")',
    ]
    lines.append("adapter.merge()")
    if record.quality is not None and record.quality.trusted:
        lines += [
            "",
            "# Or let f steer a training of your own, instead of merge().",
            f'f = mo.load_value_function("{seed}/value_function.safetensors")',
            "optimizer = mo.MetricOpt(adapter.parameters(), f, lr=0.1, steps=50)",
        ]
    return [Text(PATHS.format(f"seed {record.seed}")), Code("Python lines", "\n".join(lines)), more]
