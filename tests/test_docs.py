"""The README and the documentation: their code against the library, their commands against the tools, their links."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import metricopt_ext as mo
from helpers.programs import DETECTRON2
from metricopt_ext.experiment.cli import TASKS, experiment_of
from metricopt_ext.utils.config import load_config

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
BENCHMARKS = ROOT / "benchmarks" / "README.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), BENCHMARKS, *RESULTS]
FINETUNE = {  # the tools whose configs are those of a task
    "finetune_classifier.py": "classification",
    "finetune_detector.py": "detection",
    "finetune_retrieval.py": "retrieval",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command that runs a tool or a benchmark."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            called = words[words.index("python") + 1 :] if "python" in words else []
            if called and called[0].startswith(("tools/", "benchmarks/")):
                yield called


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_have_options_and_keys_that_exist(page: Path) -> None:
    for tool, *words in commands(page):
        script = ROOT / tool
        assert script.is_file(), tool
        config = words[words.index("--config-file") + 1] if "--config-file" in words else ""
        if "/" in config:
            assert (ROOT / config).is_file(), config
        options = options_of(tool)
        for word in words:
            assert not word.startswith("--") or word in options, f"{tool} has no {word}"
        if script.name in FINETUNE and "/" in config:
            schema: Any = experiment_of(FINETUNE[script.name]).config_type
            load_config(schema, ROOT / config, [word for word in words if re.match(r"[a-z_.]+=", word)])


def options_of(tool: str) -> set[str]:
    """Return the options that a tool's source names, and the shared ones that it gets from elsewhere."""
    common = "program_switches" if "tools/tune_" in tool else "cli"
    shared = DETECTRON2 if "train_detector" in tool else options_in(ROOT / f"metricopt_ext/experiment/{common}.py")
    return options_in(ROOT / tool) | shared


def options_in(source: Path) -> set[str]:
    return set(re.findall(r"--[a-z][a-z0-9-]*", source.read_text()))


def test_there_are_commands_to_check() -> None:
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 30
    assert {Path(tool).name for tool, *_ in found} >= set(FINETUNE)
    assert set(FINETUNE.values()) == set(TASKS)


@pytest.mark.parametrize("page", [ROOT / "README.md", BENCHMARKS, *RESULTS], ids=name_of)
def test_links_of_pages_outside_the_site_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" in link:
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), f"{link}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """The headings of a page, as GitHub and the site spell them in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_site_names_result_pages_that_exist() -> None:
    """The site can't link to what is not in docs/, so it names files by their paths."""
    named = {name for page in PAGES for name in re.findall(r"`(benchmarks/[\w./-]+)`", page.read_text())}
    assert "benchmarks/results/comparison.md" in named
    assert not [name for name in named if not (ROOT / name).exists()]
    evidence = (ROOT / "benchmarks/results/evidence.md").read_text()
    others = {page.name for page in RESULTS} - {"evidence.md"}
    assert not [name for name in others if f"`{name}`" not in evidence], "a result page that nothing names"


def test_the_reference_has_each_public_name_once() -> None:
    shown = re.findall(r"^::: metricopt_ext\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(mo.__all__)


NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


# What makes a run short: the numbers that stand in a notebook, and those that it is run with.
SHORT = {
    "detector": {"images=(240, 80, 160)": "images=(24, 16, 16)", "steps=250": "steps=25", "queries=40": "queries=20"},
    "retrieval": {"range(150)": "range(20)", "queries=60": "queries=20"},
    "table": {"range(60)": "range(20)", "queries=60": "queries=30"},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    saved = [kinds_of(cell) for cell in notebook.cells]
    for long, short in SHORT[path.stem].items():
        (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and long in cell.source]
        cell.source = cell.source.replace(long, short)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [kinds_of(cell) for cell in notebook.cells] == saved


def kinds_of(cell: Any) -> set[str]:
    """What a cell shows: text, pictures, warnings; not which digits, as training differs between processors."""
    shown = cell.get("outputs", [])
    return {output.get("name") or max(output["data"], key=lambda kind: kind.startswith("image")) for output in shown}
