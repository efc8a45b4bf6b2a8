"""The command `metricopt`: each tool is a subcommand, named as its file in `tools/`.

Nothing but the tool that is called is imported, so that help and lists come at once.
"""

import argparse
import ast
import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from metricopt_ext.errors import ConfigError
from metricopt_ext.plain import escape_unprintable
from metricopt_ext.utils.extras import naming_extras
from metricopt_ext.utils.packaged import PACKAGE, PROGRAM, existing_config, packaged_configs
from metricopt_ext.utils.versions import versions

CONFIGS = "list the configs that come with the package, or print the one that is named"


def tools() -> dict[str, Path]:
    """Return the file of each tool by its subcommand, sorted."""
    files = sorted((PACKAGE / "tools").glob("[!_]*.py"))
    return {path.stem.replace("_", "-"): path for path in files}


def main() -> None:
    """Run the subcommand that the command line names."""
    escape_unprintable()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in tools():
        sys.argv = [f"{PROGRAM} {name}", *arguments]  # argparse takes the program's name from here
        with naming_extras():
            import_module(f"metricopt_ext.tools.{tools()[name].stem}").main()
        return
    parsed = parser().parse_args([name, *arguments])
    try:
        if parsed.name is None:
            print(*packaged_configs(), sep="\n")
        else:
            print(existing_config(parsed.name).read_text(encoding="utf-8"), end="")
    except UnicodeDecodeError:
        sys.exit(f"error: {parsed.name} is no config: it is not text in UTF-8")
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


def parser() -> argparse.ArgumentParser:
    """Return what shows the subcommands, and reads the only one that is no tool."""
    found = argparse.ArgumentParser(
        prog=PROGRAM,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=25),
        description="Finetune a trained model for the metric it is judged by.",
        epilog=f"`{PROGRAM} COMMAND --help` explains a command. A --config-file that does not exist is looked for among"
        f" those that come with the package, which `{PROGRAM} configs` lists.",
    )
    found.add_argument("--version", action="version", version=f"%(prog)s: {shown_versions()}")
    commands = found.add_subparsers(metavar="COMMAND", required=True)
    configs = commands.add_parser("configs", help=CONFIGS, description=CONFIGS)
    configs.add_argument("name", nargs="?", metavar="NAME", help="e.g. configs/classification/digits.yaml")
    for name, path in tools().items():
        commands.add_parser(name, help=summary(path))
    return found


def summary(path: Path) -> str:
    """Return the first line of a Python file's docstring, up to a colon, without running the file."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"[:.]?$|: ", docstring.partition("\n")[0])[0].replace("%", "%%")


def shown_versions() -> str:
    """Return the versions of what numbers depend on, in a line."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())


if __name__ == "__main__":
    main()
