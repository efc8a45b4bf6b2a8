"""Make sure that a type checker knows the type of all that the public names are, take and return.

`make quality` runs it: ``pyright --verifytypes``, whose verdict counts for the names of public_names.txt and what
belongs to them. A class is known if its attributes and base classes are, and so are the classes that these name. Types
of other packages count as known. It is no test, because pyright needs longer than all that a change of code needs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "metricopt_ext"


def symbols() -> dict[str, dict[str, Any]]:
    """Return what pyright knows of each symbol of the package, by its full name."""
    # It looks for packages where the first python on the path does, and does not follow an editable install.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", PACKAGE, "--ignoreexternal", "--outputjson"],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if not done.stdout.startswith("{"):
        sys.exit(f"pyright failed: {done.stdout}{done.stderr}")
    return {each["name"]: each for each in json.loads(done.stdout)["typeCompleteness"]["symbols"]}


def definitions() -> dict[str, str]:
    """Return where each public name is from."""
    stub = (ROOT / PACKAGE / "__init__.pyi").read_text()
    imports = re.findall(r"^from \.(\S*) import (\w+) as \w+$", stub, re.M)
    return {name: ".".join(filter(None, (PACKAGE, module, name))) for module, name in imports}


def main() -> None:
    """Name what is not known and end with an error, or say that all is."""
    known, public = symbols(), definitions()
    frozen = (ROOT / "tests" / "public_names.txt").read_text().split()
    problems = [f"{name}: not in {PACKAGE}/__init__.pyi" for name in frozen if name not in public]
    count = 0
    for name, full in public.items():
        own = [each for each in known if each == full or each.startswith(f"{full}.")]
        problems += [] if own else [f"{name}: pyright has not found {full}"]
        count += len(own)
        for each in own:
            if not known[each]["isTypeKnown"] or known[each]["isTypeAmbiguous"]:
                reasons = [found["message"] for found in known[each]["diagnostics"]]
                problems.append(f"{each}: {'; '.join(reasons) or 'of a class or attribute whose type is not known'}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"types known of {len(public)} public names: {count} symbols")


if __name__ == "__main__":
    main()
