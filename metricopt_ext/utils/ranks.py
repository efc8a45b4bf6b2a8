"""The former place of `metricopt_ext.runtime.distributed`, for scripts that import `joined` from here."""

import importlib
import warnings
from contextlib import AbstractContextManager
from typing import Any, cast


def joined(*arguments: Any, **options: Any) -> AbstractContextManager[None]:
    """Return `metricopt_ext.runtime.distributed.joined` of the same arguments, with a warning."""
    warnings.warn(
        "metricopt_ext.utils.ranks is now metricopt_ext.runtime.distributed; import it from there",
        DeprecationWarning,
        stacklevel=2,
    )
    distributed = importlib.import_module("metricopt_ext.runtime.distributed")  # a floor above this one
    return cast(AbstractContextManager[None], distributed.joined(*arguments, **options))
