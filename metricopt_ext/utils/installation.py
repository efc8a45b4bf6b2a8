"""What of the package's requirements is installed, extra by extra."""

import importlib.metadata
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from packaging.requirements import Requirement

from metricopt_ext.utils.extras import DETECTRON2, EXTRAS

DISTRIBUTION = "metricopt-ext"


class Extra(NamedTuple):
    """What of an extra is there.

    Attributes:
        name: The extra's; empty for what the package needs in any case.
        missing: Names of distributions that are not installed.
        outside: Those of another version than the package allows, e.g. ``"torch 2.5.1, not <3,>=2.6"``.
        broken: Modules that are installed, but whose import fails, each with the error.
    """

    name: str
    missing: list[str]
    outside: list[str]
    broken: list[str]

    @property
    def complete(self) -> bool:
        """Whether all of it is there and works."""
        return not (self.missing or self.outside or self.broken)

    @property
    def absent(self) -> bool:
        """Whether something of it was not installed, and what was is in order, as where nobody asked for it."""
        return bool(self.missing) and not (self.outside or self.broken)


def extras() -> Iterator[Extra]:
    """Check what the package needs in any case, and then the extras that bring modules which it imports.

    Raises:
        importlib.metadata.PackageNotFoundError: The package itself was not installed, but put on the path.
    """
    lines = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or ()]
    for name in ("", *EXTRAS):
        own = [each for each in lines if each.name != DISTRIBUTION and _belongs(each, name)]
        found = {each: installed(each.name) for each in own}
        yield Extra(
            name,
            [each.name for each, version in found.items() if version is None],
            [
                f"{each.name} {version}, not {each.specifier}"
                for each, version in found.items()
                if version is not None and not each.specifier.contains(version, prereleases=True)
            ],
            [said for module in EXTRAS.get(name, ()) if (said := failing(module))],
        )


def installed(distribution: str) -> str | None:
    """Return a distribution's version; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def failing(module: str) -> str | None:
    """Return what the import of an installed module fails with, as of one built for another torch; None if nothing."""
    if find_spec(module) is None:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of deprecations within
            import_module(module)
    except Exception as error:  # whatever it is, the user has to know
        return f"{module} does not import: {type(error).__name__}: {' '.join(str(error).split())}"
    return None


def detectron2() -> str | None:
    """Return what keeps Detectron2 from being imported; None if nothing does, or if it is not installed."""
    return next((said for module in DETECTRON2 if (said := failing(module))), None)


def _belongs(requirement: Requirement, extra: str) -> bool:
    """Whether an extra brings a requirement on this machine; without one, whether the package does."""
    marker = requirement.marker
    if marker is None:
        return not extra
    return marker.evaluate({"extra": extra}) and (not extra or not marker.evaluate({"extra": ""}))
