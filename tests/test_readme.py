"""The README's code against the signatures of what it calls."""

import ast
import inspect
import re
from pathlib import Path

import metricopt_ext as mo

ROOT = Path(__file__).resolve().parents[1]


def test_calls_of_the_library_have_its_arguments() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    called = []
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "mo":
            signature = inspect.signature(getattr(mo, node.func.attr))
            signature.bind(*node.args, **{keyword.arg: keyword.value for keyword in node.keywords if keyword.arg})
            called.append(node.func.attr)
    assert "optimize_metric" in called
