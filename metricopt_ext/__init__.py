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
from .fitting import Fit
from .metric import Ledger, Metric
from .optimizer import MetricOpt
from .pipeline import meta_train, optimize_metric
from .recipe import Recipe
from .result import MetricOptResult, Result
from .search import CMAES, GuidedES
from .start import Tuned, tune_start
from .task import FinetuneTask, OutputLoss
from .trajectory import Trajectory, TrajectoryStore
from .value_function import NeuralValueFunction, Quality, RidgeValueFunction, ValueFunction, load_value_function

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
