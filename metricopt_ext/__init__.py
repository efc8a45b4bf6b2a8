"""metricopt-ext: finetune a trained model for the metric it is judged by.

Attach an adapter (`attach_film`, `attach_input_bias`), describe the task (`FinetuneTask`, `Metric`), and call
`optimize_metric` with a number of metric queries. `meta_train` and the optimizer `MetricOpt` are the pieces for your
own loop.
"""

from .batches import DatasetBatches, TensorBatches
from .errors import (
    AdapterError,
    BudgetError,
    ConfigError,
    DataError,
    FileFormatError,
    MetricError,
    MetricOptError,
    ValueFunctionError,
)
from .film import Adapter, attach_film, attach_input_bias, load_adapter
from .metric import Ledger, Metric
from .optimizer import MetricOpt
from .pipeline import Recipe, Result, meta_train, optimize_metric
from .task import FinetuneTask
from .trajectory import Trajectory, TrajectoryStore
from .value_function import NeuralValueFunction, Quality, RidgeValueFunction, ValueFunction, load_value_function

__all__ = [
    "Adapter",
    "AdapterError",
    "BudgetError",
    "ConfigError",
    "DataError",
    "DatasetBatches",
    "FileFormatError",
    "FinetuneTask",
    "Ledger",
    "Metric",
    "MetricError",
    "MetricOpt",
    "MetricOptError",
    "NeuralValueFunction",
    "Quality",
    "Recipe",
    "Result",
    "RidgeValueFunction",
    "TensorBatches",
    "Trajectory",
    "TrajectoryStore",
    "ValueFunction",
    "ValueFunctionError",
    "attach_film",
    "attach_input_bias",
    "load_adapter",
    "load_value_function",
    "meta_train",
    "optimize_metric",
]
