"""metricopt-ext: finetune a trained model for the metric that it is judged by.

Attach an adapter (`attach_film`, `attach_input_bias`, `attach_outputs`), describe the task (`FinetuneTask`, `Metric`),
and call `optimize_metric` with a number of metric queries: a guided search (`GuidedTrustRegion`) then finds phi, from
the best of the starts (`Start`, `batchnorm_start`). For many starts under one value function there are `Recipe`,
`meta_train` and `tune_start`; the optimizer `MetricOpt` follows a value function in your own loop. `AlgorithmS1` learns
an optimizer instead, which `LearnedOptimizer` takes to any loop; `Algorithm1` is the paper's algorithm as printed. What
can go wrong is in `metricopt_ext.errors`.
"""

import lazy_loader

# The public names are listed in `__init__.pyi` alone and imported at their first use, so that `metricopt --help` does
# without torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
