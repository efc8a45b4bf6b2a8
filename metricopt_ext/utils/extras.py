"""What to install for a module that is missing: an extra of this package, or Detectron2."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# The modules that each extra brings. One of several extras is named by the task that is in use.
EXTRAS = {
    "classification": ("PIL", "jinja2", "matplotlib", "omegaconf", "sklearn", "tensorboard", "torchvision", "yaml"),
    "retrieval": (
        *("PIL", "faiss", "jinja2", "matplotlib", "omegaconf"),
        *("pytorch_metric_learning", "sklearn", "tensorboard", "torchvision", "yaml"),
    ),
    "detection": (
        *("PIL", "jinja2", "matplotlib", "omegaconf"),
        *("pycocotools", "sklearn", "tensorboard", "torchvision", "yaml"),
    ),
    "files": ("pyarrow",),
    "compare": ("botorch", "nevergrad", "optuna"),
    "siblings": ("diffsort",),
}
TASKS = ("classification", "retrieval", "detection")  # all of which the extra `all` brings
DETECTRON2 = ("detectron2", "fvcore", "iopath")
DETECTRON2_SOURCE = "git+https://github.com/facebookresearch/detectron2"


@contextmanager
def naming_extras() -> Iterator[None]:
    """End the process with one line that says what to install, if a module is missing that is optional."""
    try:
        yield
    except ImportError as error:
        said = needed(error)
        if said is None:
            raise
        sys.exit(f"error: {said}")


def require(*modules: str) -> None:
    """Refuse to go on without modules that would be missed only after work has been done.

    Raises:
        ModuleNotFoundError: One is not installed.
    """
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def needed(error: ImportError) -> str | None:
    """Return what a failed import needs and the command that installs it; None if the module is not optional.

    Args:
        error: Raised by the import, or from the error that the import raised.
    """
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    module = (cause.name or "").partition(".")[0]
    if module in DETECTRON2:
        return f"this needs {module}: pip install --no-build-isolation {DETECTRON2_SOURCE}"
    extras = [extra for extra, modules in EXTRAS.items() if module in modules]
    if not extras:
        return None
    in_use = [extra for extra in extras if f"metricopt_ext.{extra}" in sys.modules] or extras
    chosen = "all" if len(in_use) > 1 and in_use[0] in TASKS else in_use[0]
    return f"this needs {module}: pip install 'metricopt-ext[{chosen}]'"
