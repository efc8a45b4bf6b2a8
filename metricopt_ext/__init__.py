"""metricopt-ext: finetune a trained model for the metric it is judged by.

Attach an adapter (`attach_film`, `attach_input_bias`), describe the task (`FinetuneTask`, `Metric`), and call
`optimize_metric` with a number of metric queries. `meta_train` and the optimizer `MetricOpt` are the pieces for your
own loop.
"""

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, load_adapter
from metricopt_ext.errors import (
    AdapterError,
    BudgetError,
    ConfigError,
    DataError,
    FileFormatError,
    MetricError,
    MetricOptError,
    ValueFunctionError,
)
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.result import MetricOptResult, Result
from metricopt_ext.methods.rounds import meta_train
from metricopt_ext.methods.tuning import Tuned, tune_start
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.optimizer import MetricOpt
from metricopt_ext.tasks.batches import DatasetBatches, TensorBatches
from metricopt_ext.tasks.metric import Ledger, Metric
from metricopt_ext.tasks.task import FinetuneTask, OutputLoss
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.value_function import (
    NeuralValueFunction,
    Quality,
    RidgeValueFunction,
    ValueFunction,
    load_value_function,
)

__all__ = [
    "CMAES",
    "Adapter",
    "AdapterError",
    "BudgetError",
    "ConfigError",
    "DataError",
    "DatasetBatches",
    "FileFormatError",
    "FinetuneTask",
    "Fit",
    "GuidedES",
    "Ledger",
    "Metric",
    "MetricError",
    "MetricOpt",
    "MetricOptError",
    "MetricOptResult",
    "NeuralValueFunction",
    "OutputLoss",
    "Quality",
    "Recipe",
    "Result",
    "RidgeValueFunction",
    "TensorBatches",
    "Trajectory",
    "TrajectoryStore",
    "Tuned",
    "ValueFunction",
    "ValueFunctionError",
    "attach_film",
    "attach_input_bias",
    "load_adapter",
    "load_value_function",
    "meta_train",
    "optimize_metric",
    "tune_start",
]
