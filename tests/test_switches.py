"""What a message tells the user to type exists: the switches of the tools, the keys of their configs."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from helpers.programs import DETECTRON2
from metricopt_ext.classification.data_config import DATA, KINDS_OF_DATA
from metricopt_ext.detection.config import DATA as DETECTION_DATA
from metricopt_ext.experiment.brought_sections import section_of
from metricopt_ext.experiment.cli import TASKS, experiment_of
from metricopt_ext.experiment.method_config import METHODS
from metricopt_ext.retrieval.config import OwnDataConfig
from metricopt_ext.utils.config import is_optional_section, known_keys

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("classification", "detection", "retrieval", "tools", "metricopt_ext")
OF_OTHERS = {"--no-build-isolation", "--help", "--version"}  # pip's, argparse's, and that of `metricopt`
SWITCH = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
KEY = re.compile(r"(?<![\w.])([a-z]\w*(?:\.[a-z]\w*)+)(?==)")
NODE = re.compile(r"METRICOPT((?:\.[A-Z0-9_]+)+)")


def sources() -> list[Path]:
    """Return our modules, each once: metricopt_ext has links to the folders beside it."""
    found = (file for folder in FOLDERS for file in sorted((ROOT / folder).glob("**/*.py")))
    return list({file.resolve(): file for file in found}.values())


def texts(source: str) -> Iterator[str]:
    """Yield the strings of a module that are not docstrings; what an f-string fills in is a gap."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body]
    seen = {id(each.value) for each in first if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):  # parents come before their parts
        if isinstance(node, ast.JoinedStr):
            seen |= {id(part) for part in node.values}
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield node.value


def switches_of(file: Path) -> set[str]:
    """Return the switches that a file adds to a parser."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    added = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"]
    given = [part.value for node in added for part in node.args if isinstance(part, ast.Constant)]
    # `main_of(..., choices={NAME: VALUES})` adds --NAME.
    choices = [word.value for node in calls for word in node.keywords if word.arg == "choices"]
    chosen = [key.value for each in choices if isinstance(each, ast.Dict) for key in each.keys]  # type: ignore[union-attr]
    return {name for name in given if name.startswith("--")} | {f"--{name}" for name in chosen}


# What tools that name these words have from a module besides their own.
SHARED = {
    "main_of": switches_of(ROOT / "metricopt_ext/experiment/cli.py"),  # those that finetune
    "program_switches": switches_of(ROOT / "metricopt_ext/experiment/program_switches.py"),  # those that run a command
}
SHOW = "--show-config"
TOOLS = {
    file: switches_of(file)
    | {SHOW}
    | set().union(*(those for word, those in SHARED.items() if word in file.read_text()))
    for file in sorted((ROOT / "tools").glob("*.py"))
}
TOOLS[ROOT / "tools/train_detector.py"] |= DETECTRON2


def allowed_in(file: Path) -> set[str]:
    """Return what a module's messages may name: a tool's its own switches, any other's those of some tool."""
    return OF_OTHERS.union(TOOLS[file]) if file in TOOLS else OF_OTHERS.union(*TOOLS.values())


def test_switches_in_messages_exist() -> None:
    found = {(file.relative_to(ROOT), name) for file in sources() for name in named(file, SWITCH)}
    assert len(found) > 40
    unknown = {(str(file), name) for file, name in found if name not in allowed_in(ROOT / file)}
    assert not unknown


def named(file: Path, pattern: re.Pattern[str]) -> set[str]:
    """Return what a module's strings name."""
    return {name for text in texts(file.read_text()) for name in pattern.findall(text)}


def keys_of(task: str) -> set[str]:
    """Return all keys that a task's config can have, whatever is chosen."""
    schema: Any = experiment_of(task).config_type
    keys = set(known_keys(schema))
    keys |= {f"method.{key}" for method in METHODS.values() for key in known_keys(method)}
    of_data = {
        "classification": (*DATA.values(), *KINDS_OF_DATA.values()),
        "detection": (*DETECTION_DATA.values(),),
        "retrieval": (OwnDataConfig,),
    }
    keys |= {f"data.{key}" for kind in of_data.get(task, ()) for key in known_keys(kind)}  # which data.name brings
    if schema.OWN_METRIC:
        keys |= {f"metric.{key}" for key in known_keys(schema.OWN_METRIC)}
    if schema.NAMED_MODEL:
        keys |= {f"model.{key}" for key in known_keys(schema.NAMED_MODEL)}

    def sections(kind: Any, prefix: str) -> None:
        for each in fields(kind):
            if is_optional_section(each.type):
                keys.update(f"{prefix}{each.name}.{key}" for key in known_keys(section_of(each.type)))
                sections(section_of(each.type), f"{prefix}{each.name}.")

    sections(schema, "")
    return keys


def test_keys_in_messages_exist() -> None:
    pytest.importorskip("torchvision")
    known = {task: keys_of(task) for task in TASKS}
    checked, unknown = 0, []
    for file in sources():
        folder = file.relative_to(ROOT).parts[0]
        keys = known.get(folder) or set().union(*known.values())
        sections = {key.partition(".")[0] for key in keys if "." in key}
        for name in named(file, KEY):
            if name.partition(".")[0] in sections:
                checked += 1
                unknown += [(str(file.relative_to(ROOT)), name)] if name not in keys else []
    assert checked > 60
    assert not unknown


@pytest.mark.detectron2
def test_nodes_in_messages_exist() -> None:
    pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")
    from metricopt_ext.detection.detectron2.config import Settings

    keys = {key.upper() for key in known_keys(Settings)}
    found = {(str(file), name.removeprefix(".")) for file in sources() for name in named(file, NODE)}
    assert len(found) > 15
    assert not {each for each in found if each[1] not in keys}
