"""The page of a run's folder that says what the adapter in it is of, as model hubs show it."""

from pathlib import Path
from typing import Any

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.methods.result import Result
from metricopt_ext.plain import in_markdown
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.files import write_atomically
from metricopt_ext.utils.installation import DISTRIBUTION, installed
from metricopt_ext.utils.words import and_more, counted, decimals

CARD = "README.md"


def model_card(result: Result[Any], adapter: Adapter, metric: Metric) -> str:
    """Return a card in Markdown: what was tuned, for which metric, on what, by how many queries, and what is doubtful.

    Its head is what hubs read (YAML between dashes). Names of metrics and layers are shown as text, whatever they hold.

    Args:
        result: The run's.
        adapter: What is kept, applied to the model.
        metric: The run's.
    """
    better = "higher" if metric.maximize else "lower"
    model, (_, *said) = adapter.model, result.lines()
    parameters = sum(each.numel() for each in model.parameters()) - adapter.dim
    queried = ", ".join(f"{counted(number, 'query')} for {purpose}" for purpose, number in result.queries.items())
    return "\n".join(
        [
            "---",
            "library_name: metricopt-ext",
            "tags: [metricopt-ext, black-box-optimization]",
            "---",
            "",
            f"# {in_markdown(type(model).__name__)}, tuned for {in_markdown(metric.name)}",
            "",
            f"An adapter of {adapter.dim} numbers, phi, for a frozen model with {parameters:,} parameters. The model is"
            " not included.",
            "",
            f"| | {in_markdown(metric.name)} ({better} is better) |",
            "|---|---|",
            f"| as it was trained | {decimals(result.before)} |",
            f"| as it is now | {decimals(result.after)} |",
            "",
            "Both are on the metric's data, on which phi was chosen: expect a smaller gain on other data.",
            "",
            f"- **What was tuned**: {in_markdown(described(adapter))}",
            f"- **Queries**: {queried}",
            f"- **Guard**: {GUARDED[result.guard]}",
            f"- **Kept**: {in_markdown(result.what_was_kept())}",
            *(f"- {in_markdown(line)}" for line in said),
            "",
            "```python",
            "import metricopt_ext as mo",
            "",
            'adapter = mo.load_run(model, "FOLDER")  # model: with the weights that it was trained to',
            "adapter.merge()  # an ordinary model again; adapter.remove() gives the old one back, bit for bit",
            "```",
            "",
            f"Made by {DISTRIBUTION} {installed(DISTRIBUTION) or '(not installed)'}.",
            "",
        ]
    )


GUARDED = {
    "halves": "chance was estimated from the metric's values on two halves of its data",
    "repeats": "chance was estimated from repeats of the metric",
    "held-out": "chance was estimated on data that the search does not see",
    "none": "none. Nothing told a gain from chance, and any gain was kept",
}


def described(adapter: Adapter) -> str:
    """Say what an adapter acts on."""
    place = adapter.signature.to_json()
    outputs = " and offsets of the outputs" if adapter.outputs is not None and adapter.layers else ""
    layers = f" on {counted(len(adapter.layers), 'layer')}: {and_more(adapter.layers)}" if adapter.layers else ""
    replaced = sorted(adapter.as_start().replaced)
    more = f"; {counted(len(replaced), 'tensor')} replaced besides: {and_more(replaced)}" if replaced else ""
    return f"{place['kind']}{outputs}{layers}{more}"


def write_card(folder: Path, result: Result[Any], adapter: Adapter, metric: Metric) -> None:
    """Write a run's card into its folder."""
    write_atomically(folder / CARD, model_card(result, adapter, metric).encode())
