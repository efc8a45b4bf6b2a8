"""metricopt-ext: finetune a trained model for the metric that it is judged by.

Attach an adapter (`attach_film`, `attach_input_bias`, `attach_outputs`), describe the task (`FinetuneTask`, `Metric`),
and call `optimize_metric` with a number of metric queries: a guided search (`GuidedTrustRegion`) then finds phi, from
the best of the starts (`Start`, `batchnorm_start`). For many starts under one value function there are `Recipe`,
`meta_train` and `tune_start`; the optimizer `MetricOpt` follows a value function in your own loop. `metricopt_learned`
learns an optimizer instead, which `LearnedOptimizer` takes to any loop. What can go wrong is in `metricopt_ext.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metricopt_ext import errors
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs, load_adapter
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe, Setting
from metricopt_ext.methods.result import MetricOptResult, Result, SearchRun
from metricopt_ext.methods.rounds import meta_train
from metricopt_ext.methods.siblings.algorithm_s1 import AlgorithmS1
from metricopt_ext.methods.siblings.learned import LearnedResult, metricopt_learned
from metricopt_ext.methods.starts import Start, batchnorm_start, load_buffers
from metricopt_ext.methods.tuning import Tuned, tune_start
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.learned_optimizer import LearnedOptimizer
from metricopt_ext.search.optimizer import MetricOpt
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.search.update_rule import UpdateRule, load_update_rule
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.batches import ClassBatches, DatasetBatches, TensorBatches
from metricopt_ext.tasks.metric import Evaluation, Ledger, Metric
from metricopt_ext.tasks.task import FinetuneTask, OutputLoss
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore, load_trajectories
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.value.fitting import Fit, fit_value_function
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.learners import NeuralLearner, RidgeLearner
from metricopt_ext.value.loading import load_value_function
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.reptile import ReptileLearner
from metricopt_ext.value.value_function import NeuralValueFunction, Quality, RidgeValueFunction, ValueFunction

if TYPE_CHECKING:
    from metricopt_ext.evidence.correlation import correlation_report
    from metricopt_ext.value.labels import GaussianProcessLabels, LinearLabels

__all__ = [
    "CMAES",
    "Adapter",
    "AlgorithmS1",
    "BatchMetric",
    "ClassBatches",
    "DatasetBatches",
    "Evaluation",
    "FinetuneTask",
    "Fit",
    "GPValueFunction",
    "GaussianProcessLabels",
    "GuidedES",
    "GuidedTrustRegion",
    "LearnedOptimizer",
    "LearnedResult",
    "Ledger",
    "LinearLabels",
    "Metric",
    "MetricOpt",
    "MetricOptResult",
    "NeuralLearner",
    "NeuralValueFunction",
    "Observations",
    "OutputLoss",
    "Outputs",
    "Quality",
    "Recipe",
    "ReptileLearner",
    "Result",
    "RidgeLearner",
    "RidgeValueFunction",
    "SearchRun",
    "Setting",
    "Start",
    "TensorBatches",
    "Trajectory",
    "TrajectoryStore",
    "Tuned",
    "UpdateRule",
    "ValueFunction",
    "Watcher",
    "attach_film",
    "attach_input_bias",
    "attach_outputs",
    "batchnorm_start",
    "correlation_report",
    "errors",
    "fit_value_function",
    "load_adapter",
    "load_buffers",
    "load_trajectories",
    "load_update_rule",
    "load_value_function",
    "meta_train",
    "metricopt_learned",
    "optimize_metric",
    "tune_start",
]

LAZY = {
    **dict.fromkeys(("GaussianProcessLabels", "LinearLabels"), "metricopt_ext.value.labels"),  # import gpytorch
    "correlation_report": "metricopt_ext.evidence.correlation",  # a floor above all others that are exported
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    if name in errors.__all__:
        # Python hides the text of an AttributeError from `from metricopt_ext import ...`, and no other error's.
        raise ImportError(f"metricopt_ext.{name} is now metricopt_ext.errors.{name}")
    raise AttributeError(f"module 'metricopt_ext' has no attribute {name!r}")
