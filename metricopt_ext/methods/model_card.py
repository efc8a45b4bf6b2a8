"""The page of a run's folder that says what the adapter in it is of, as model hubs show it."""

from pathlib import Path
from typing import Any

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.methods.result import Result
from metricopt_ext.plain import in_markdown
from metricopt_ext.utils.files import write_atomically

CARD = "README.md"


def model_card(result: Result[Any], adapter: Adapter) -> str:
    """Return a card in Markdown: what was tuned, what came of it, and how it is loaded.

    Its head is what hubs read (YAML between dashes). Names are shown as text, whatever they hold.

    Args:
        result: The run's.
        adapter: What is kept, applied to the model.
    """
    name = in_markdown(type(adapter.model).__name__)
    said = [f"- {in_markdown(line)}" for line in result.lines()]
    load = '`mo.load_run(model, "FOLDER")` applies it to the model as it was trained, and `.merge()` folds it in.'
    return "\n".join(
        [
            *("---", "library_name: metricopt-ext", "tags: [metricopt-ext, black-box-optimization]", "---", ""),
            *(f"# {name}, tuned for {in_markdown(result.metric)}", ""),
            *(f"An adapter of {adapter.dim} numbers, phi, for a frozen model, which is not included.", ""),
            *(*said, "", load, ""),
        ]
    )


def write_card(folder: Path, result: Result[Any], adapter: Adapter) -> None:
    """Write a run's card into its folder."""
    write_atomically(folder / CARD, model_card(result, adapter).encode())
