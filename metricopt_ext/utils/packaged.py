"""What comes with the package: its command's name, and the repository's `configs/`, which a wheel holds too."""

import difflib
from pathlib import Path

from metricopt_ext.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
PROGRAM = "metricopt"  # the console command, as `project.scripts` in pyproject.toml has it


def packaged_configs() -> list[str]:
    """Return the names of all configs that come with the package, ``configs/<task>/<name>.yaml``, sorted."""
    return sorted(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "configs").glob("*/**/*.yaml"))


def find_config(name: str | Path) -> Path | None:
    """Return the config file of this path or, if there is none, the package's own of this name; None without either."""
    path = Path(name)
    if path.is_file():
        return path
    return PACKAGE / path if path.as_posix() in packaged_configs() else None


def existing_config(name: str | Path) -> Path:
    """Return what `find_config` finds.

    Raises:
        ConfigError: Nothing; the message has the package's own names that come nearest.
    """
    found = find_config(name)
    if found is None:
        given, own = Path(name).as_posix(), packaged_configs()
        stems = difflib.get_close_matches(Path(name).stem, {Path(each).stem for each in own})
        near = (
            [each for each in own if each.endswith(f"/{given}")]
            or difflib.get_close_matches(given, own)
            or [each for each in own if Path(each).stem in stems[:1]]
        )
        hint = f"the nearest is {' or '.join(near)}" if near else "`metricopt configs` lists them"
        raise ConfigError(f"config file {name} does not exist, neither here nor among the package's own; {hint}")
    return found
