"""Imports what a config names, from installed modules and from one folder that the user gives."""

import ast
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError


def import_named(name: str, folder: str, key: str) -> Any:
    """Return what a config names as ``MODULE:NAME``; importing the module runs it.

    The module must be installed (`installed_path`, or found by an import hook such as an editable install's) or be in
    the folder; neither the working directory, nor the program's folder, nor ``PYTHONPATH`` counts. Its own imports are
    limited in the same way while it is imported. The folder then stays at the end of ``sys.path``, so that worker
    processes unpickle what is in it, and functions can import from it when they are called.

    Args:
        name: The module, with dots if it is in a package, a colon and the name of what is in it.
        folder: Where the module may be, if it is not installed; empty for none.
        key: The config's key for the folder, for error messages.

    Raises:
        ConfigError: There is no such module, it is elsewhere, there is an installed one and another in the folder, or
            one that was imported before has its name.
        ImportError: A module that it needs is missing, or so is the submodule.
        AttributeError: The module has nothing of that name.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{name!r} must be MODULE:FUNCTION, e.g. sklearn.metrics:f1_score")
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"{key}={folder}: there is no such folder")
    installed = [entry for entry in sys.path if entry in installed_path()]
    given = [os.path.abspath(folder)] if folder else []
    top = module.partition(".")[0]
    with _sys_path(installed):
        found = _found_by_hooks(top)
    in_folder = PathFinder.find_spec(top, given)
    if found and in_folder and in_folder.origin and _file(in_folder) != _file(found):
        raise ConfigError(f"{key}={folder} has a module {top!r}, but {_place(found)} is installed; rename yours")
    found = found or in_folder
    if found is None:
        raise ConfigError(_missing(top, folder, key))
    if top in sys.modules:
        loaded = getattr(sys.modules[top], "__spec__", None)
        if loaded is None or _file(loaded) != _file(found):
            where = "this program" if loaded is None else _place(loaded)
            raise ConfigError(f"module {top!r} is {_place(found)}, but {where} was imported by this name before")
    with _sys_path([*installed, *given]):
        value = getattr(importlib.import_module(module), attribute)
    sys.path += [entry for entry in given if entry not in sys.path]
    return value


@functools.cache
def installed_path() -> frozenset[str]:
    """Return the entries that ``sys.path`` has in this environment without a program and without ``PYTHONPATH``.

    They are those of the standard library, of site-packages, and what the ``.pth`` files there add, such as editable
    installs. The interpreter itself is asked, as every distribution of Python has its own rules.
    """
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print(ascii(sys.path))"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=sys.prefix,  # -c puts the working directory first, from which nothing must come
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    entries: list[str] = ast.literal_eval(done.stdout.splitlines()[-1])
    return frozenset(entries) - {""}


@contextmanager
def _sys_path(entries: list[str]) -> Iterator[None]:
    before = sys.path[:]
    sys.path[:] = entries
    try:
        yield
    finally:
        sys.path[:] = before


def _found_by_hooks(module: str) -> ModuleSpec | None:
    """Find a module as ``import`` does, but not among those imported before, which may be from elsewhere."""
    specs = (finder.find_spec(module, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _missing(module: str, folder: str, key: str) -> str:
    elsewhere = PathFinder.find_spec(module, [*sys.path, ""])
    if elsewhere is None:
        places = f"installed or in {folder}" if folder else f"installed; {key}=FOLDER lets one in a folder be imported"
        return f"there is no module {module!r} {places}"
    place = Path(_place(elsewhere))
    parent = place.parent.parent if elsewhere.origin and elsewhere.submodule_search_locations else place.parent
    return f"module {module!r}, {place}, is not installed, so it is not imported; {key}={parent} would allow it"


def _file(spec: ModuleSpec) -> str | None:
    """The file of a module, or ``built-in`` or ``frozen``; None for a namespace package, which has none."""
    return os.path.realpath(spec.origin) if spec.origin and spec.has_location else spec.origin


def _place(spec: ModuleSpec) -> str:
    return spec.origin or next(iter(spec.submodule_search_locations or ["a package without files"]))
