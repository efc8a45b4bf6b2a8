"""What a message tells the user to type exists: the switches of the tools."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers.programs import DETECTRON2

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("classification", "detection", "retrieval", "tools", "metricopt_ext")
OF_OTHERS = {"--no-build-isolation", "--help", "--version"}  # pip's, argparse's, and that of `metricopt`
SWITCH = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


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
