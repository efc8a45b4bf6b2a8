"""metricopt-ext: finetune a trained model for the metric that it is judged by.

Attach an adapter (`attach_film`, `attach_input_bias`, `attach_outputs`), describe the task (`FinetuneTask`, `Metric`),
and call `optimize_metric` with a number of metric queries: a guided search (`GuidedTrustRegion`) then finds phi, from
the best of the starts (`Start`, `batchnorm_start`). For many starts under one value function there are `Recipe`,
`meta_train` and `tune_start`; the optimizer `MetricOpt` follows a value function in your own loop. `AlgorithmS1` learns
an optimizer instead, which `LearnedOptimizer` takes to any loop; `Algorithm1` is the paper's algorithm as printed. What
can go wrong is in `metricopt_ext.errors`.
"""

from typing import Any

import lazy_loader

from metricopt_ext import errors

# The public names are listed in `__init__.pyi` alone and imported at their first use, so that `metricopt --help` does
# without torch.
_first_use, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in errors.__all__:
        # Python hides the text of an AttributeError from `from metricopt_ext import ...`, and no other error's.
        raise ImportError(f"metricopt_ext.{name} is now metricopt_ext.errors.{name}")
    if name in __all__:
        return _first_use(name)
    raise AttributeError(f"module 'metricopt_ext' has no attribute {name!r}")
