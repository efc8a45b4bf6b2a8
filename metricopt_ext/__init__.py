"""metricopt-ext: finetune a trained model for the metric that it is judged by.

`tune_model` tunes a model for a metric in one call. Or attach an adapter (`attach_film`, `attach_outputs`), describe
the task (`FinetuneTask`, `Metric`), and call `optimize_metric` with a number of metric queries: a guided search then
finds phi, from a start that surely gains (`Start`, `batchnorm_start`). The optimizer `MetricOpt` follows a value
function in your own loop. What can go wrong is in `metricopt_ext.errors`. Other strategies, learners and baselines are
imported from their modules, which docs/api.md lists.
"""

import lazy_loader

# The public names are listed in `__init__.pyi` alone and imported at their first use, so that `metricopt --help` does
# without torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
