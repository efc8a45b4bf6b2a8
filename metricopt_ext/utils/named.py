"""What a config names as ``MODULE:NAME``: a metric, a model, a loss or data of the user's own."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.imports import import_named
from metricopt_ext.utils.words import brief


def named(key: str, name: str, folder: str = "", kwargs: Mapping[str, Any] | None = None, *, made: bool = True) -> Any:
    """Return what a config names, to be called; importing its module runs it.

    Args:
        key: The key that has the name, such as ``metric.name``; the section's ``folder`` says where the module is.
        name: ``MODULE:NAME``, see `import_named`.
        folder: Where the module may be, if it is not installed; empty for none.
        kwargs: Further arguments by name, which are bound to a function.
        made: Of a class, whether an object is made with these arguments, to be called in its place.

    Raises:
        ConfigError: There is no such module or nothing of that name in it, it is nothing that can be called, or a class
            does not take the arguments.
    """
    of_folder, more = f"{key.partition('.')[0]}.folder", dict(kwargs or {})
    try:
        found = import_named(name, folder, of_folder)
        if made and isinstance(found, type):
            found, more = found(**more), {}
        if not callable(found):
            raise TypeError(f"it is {brief(found)}; name a function or a class")
    except ModuleNotFoundError as error:
        places = f"modules are imported from the installed packages and {of_folder} alone"
        raise ConfigError(f"{key}={name}: {error}; {places}") from error
    except ConfigError as error:
        raise ConfigError(f"{key}={name}: {error}") from error
    except Exception as error:  # a module of the user's own may raise anything
        raise ConfigError(f"{key}={name}: {type(error).__name__}: {brief(error)}") from error
    return partial(found, **more) if more else found


def unbound(function: Any) -> Any:
    """Return what a partial function calls in the end; anything else as it is."""
    while isinstance(function, partial):
        function = function.func
    return function


def name_of(function: Any) -> str:
    """Return what a function is called: of a partial one's that of what it calls, of an object that of its class."""
    function = unbound(function)
    return str(getattr(function, "__name__", type(function).__name__)).replace("<lambda>", "metric")
