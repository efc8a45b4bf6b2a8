"""What to install for a module that is missing."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

from metricopt_ext.utils.versions import DISTRIBUTION

# Modules that extras bring, with the names of their distributions.
OPTIONAL = {
    "PIL": "pillow",
    "botorch": "botorch",
    "diffsort": "diffsort",
    "faiss": "faiss-cpu",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "nevergrad": "nevergrad",
    "omegaconf": "omegaconf",
    "optuna": "optuna",
    "pyarrow": "pyarrow",
    "pycocotools": "pycocotools",
    "pytorch_metric_learning": "pytorch-metric-learning",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "torchvision": "torchvision",
    "yaml": "pyyaml",
}
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
            raise ModuleNotFoundError(f"No module named {module!r}: {install(module)}", name=module)


def needed(error: ImportError) -> str | None:
    """Return what a failed import needs and the command that installs it; None if the module is not optional.

    Args:
        error: Raised by the import, or from the error that the import raised.
    """
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    module = (cause.name or "").partition(".")[0]
    return f"this needs {module}: {install(module)}" if module in (*OPTIONAL, *DETECTRON2) else None


def install(module: str) -> str:
    """Return the command that installs a module, in a version that this package takes."""
    if module in DETECTRON2:
        return f"pip install --no-build-isolation {DETECTRON2_SOURCE}"
    name = OPTIONAL.get(module, module)
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # it is on the path alone
        lines = []
    asked = [line.partition(";")[0].strip() for line in lines]
    own = next((each for each in asked if re.split(r"[^\w.-]", each)[0].lower() == name), name)
    return f"pip install '{own}'"
