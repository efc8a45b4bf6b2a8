"""The README and the documentation: their code against the library, their commands against the tools, their links."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
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


def python_of(page: Path) -> Iterator[str]:
    yield from blocks(page, "python")
    for block in blocks(page, "diff"):  # only whole statements: a line of a longer call is not one
        for line in (line.removeprefix("+").strip() for line in block.splitlines() if line.startswith("+")):
            if line.startswith(("from ", "import ")):
                yield line


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command that runs a tool or a benchmark."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            called = words[words.index("python") + 1 :] if "python" in words else []
            if called and called[0].startswith(("tools/", "benchmarks/")):
                yield called


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_calls_of_the_library_have_its_arguments(page: Path) -> None:
    for node in (node for block in python_of(page) for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mo":
            assert hasattr(mo, node.attr)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("metricopt_ext"):
            for alias in node.names:
                assert defines(node.module, alias.name), f"{node.module} has no {alias.name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "mo":
            signature = inspect.signature(getattr(mo, node.func.attr))
            given = [word for word in node.args if ast.unparse(word) != "..."]
            named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            (signature.bind if given == node.args else signature.bind_partial)(*given, **named)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_the_package_exist(page: Path) -> None:
    """Where they are said to be, not where they were: `metricopt_ext.moved` has those."""
    for name in re.findall(r"`metricopt_ext\.([\w.]+\w)[`(]", page.read_text()):
        first, _, rest = name.partition(".")
        assert first in mo.__all__ or (ROOT / "metricopt_ext" / first).is_dir(), f"metricopt_ext.{name}"
        if rest and "detectron2" not in rest:
            pkgutil.resolve_name(f"metricopt_ext.{name}")


def defines(module: str, name: str) -> bool:
    """Whether a module has a name at its top level; Detectron2's are read, as they can't be imported everywhere."""
    if not module.startswith("metricopt_ext.detection.detectron2"):
        return hasattr(importlib.import_module(module), name)
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    return name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


SITE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def sentences(page: Path) -> list[str]:
    """Return what is to be read, without code, tables, headings and where links lead."""
    text = re.sub(r"^```.*?^```|^[|#:].*?$", "\n", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?<=\])\(.*?\)", "", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=- |\d\. )", text)
    found = [each for part in paragraphs for each in re.split(r"(?<=[.!?:])[*)\"]*\s+(?=[A-Z`\"(*\[])", part)]
    return [each for each in found if len(each.split()) > 2]


@pytest.mark.parametrize("page", SITE, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    assert mean(len(each.split()) for each in sentences(page)) < 22, "words of a sentence, on average"


def test_sentences_are_told_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title of words\n\nOne is short. Another is [a\nlink](to.md#it): So.\n\n```sh\nnot this one. No\n```\n"
    )
    assert [each.split() for each in sentences(page)] == [["One", "is", "short."], ["Another", "is", "[a", "link]:"]]


def test_the_readme_shows_a_search() -> None:
    assert "mo.optimize_metric(" in "".join(python_of(ROOT / "README.md"))


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


@pytest.mark.parametrize(
    ("name", "keys"), [("algorithm", {"loss_weight", "metric_rate", "start_std"}), ("architecture", set[str]())]
)
def test_what_a_page_names_is_in_the_files_that_it_names(name: str, keys: set[str]) -> None:
    page = (ROOT / f"docs/{name}.md").read_text()
    files = {
        path: (ROOT / "metricopt_ext" / path).read_text()
        for path in re.findall(r"`([a-z_0-9/]+\.py)`", page)
        if "tests" not in path
    }
    assert len(files) > 8
    defined = set(re.findall(r"^(?:    )?(?:def|class) (\w+)", "\n".join(files.values()), re.MULTILINE))
    named = set(re.findall(r"`(?:mo\.|\w+\.)?([A-Za-z]\w+_\w+|[A-Z][a-z]+\w*[A-Z0-9]\w*)(?:\(.*?\))?`", page))
    assert named - defined <= {*keys, *mo.__all__}


def test_the_picture_has_each_floor_once_from_the_top() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = " ".join(next(each["layers"] for each in contracts if "layers" in each))
    shown = re.findall(r'class="name"[^>]*>([^<]*)', (ROOT / "docs/architecture.svg").read_text())
    floors = [name for name in re.findall(r"\.(\w+)", layers) if name not in ("__main__", "moved")]
    assert re.findall(r"\w+", " ".join(shown)) == floors


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


def test_there_are_links_to_check() -> None:
    assert "](" in (ROOT / "README.md").read_text()
    assert any("](../../docs/" in page.read_text() for page in RESULTS)


def test_every_benchmark_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)\.py` \|", BENCHMARKS.read_text(), re.MULTILINE)
    commands = [path.stem for path in BENCHMARKS.parent.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert sorted(rows) == sorted(commands)


def test_the_smoke_run_has_every_benchmark() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nbenchmarks-smoke:")[2].partition("\n\n")[0]
    commands = [path.stem for path in BENCHMARKS.parent.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert sorted(re.findall(r"python benchmarks/(\w+)\.py", recipe)) == sorted(commands)
    assert "make benchmarks-smoke" in (ROOT / ".ci/run").read_text()


def test_the_site_names_result_pages_that_exist() -> None:
    """The site can't link to what is not in docs/, so it names files by their paths."""
    named = {name for page in PAGES for name in re.findall(r"`(benchmarks/[\w./-]+)`", page.read_text())}
    assert "benchmarks/results/comparison.md" in named
    assert not [name for name in named if not (ROOT / name).exists()]
    evidence = (ROOT / "docs/evidence.md").read_text()
    assert not [page.name for page in RESULTS if f"`{page.name}`" not in evidence], "a result page that nothing names"
    assert len(evidence.splitlines()) <= 90, "two screens at most"


def test_the_reference_has_each_public_name_once() -> None:
    shown = re.findall(r"^::: metricopt_ext\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(mo.__all__)


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "site/api.html").read_text()
    assert all(f'id="metricopt_ext.{name}"' in page for name in mo.__all__), "a name without its docstring"
    assert "Examples:" in page
    assert "<blockquote>" not in page, "a docstring's >>> that is not in its section Examples"


def test_comparisons_do_not_say_where_they_ran() -> None:
    files = sorted((ROOT / "benchmarks" / "results" / "comparison").rglob("*.json"))
    assert files
    paths = {file.name: re.findall(r'"[/~][^"]*"', file.read_text()) for file in files}
    assert {name: found for name, found in paths.items() if found} == {}


NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def test_there_is_a_notebook_of_each_host_with_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["detector", "retrieval", "table"]
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert sum(bool(cell["outputs"]) for cell in cells) > len(cells) / 2, f"{path.name} was saved without outputs"
        assert not [cell for cell in cells if any(out["output_type"] == "error" for out in cell["outputs"])]


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
