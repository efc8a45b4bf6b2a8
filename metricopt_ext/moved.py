"""Names and arguments that were public under another name or in another place: they work for one release."""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# What `metricopt_ext` exported, and where it is now.
MOVED = {
    "Watcher": "metricopt_ext.Callback",
    "Algorithm1": "metricopt_ext.methods.algorithm1.Algorithm1",
    "AlgorithmS1": "metricopt_ext.methods.algorithm_s1.AlgorithmS1",
    "Assessment": "metricopt_ext.methods.assessment.Assessment",
    "BatchMetric": "metricopt_ext.tasks.batch_metric.BatchMetric",
    "CMAES": "metricopt_ext.search.direct.CMAES",
    "ClassBatches": "metricopt_ext.tasks.batches.ClassBatches",
    "Evaluation": "metricopt_ext.tasks.evaluation.Evaluation",
    "Fit": "metricopt_ext.value.fitting.Fit",
    "GPValueFunction": "metricopt_ext.value.gp.GPValueFunction",
    "GaussianProcessLabels": "metricopt_ext.value.labels.GaussianProcessLabels",
    "GuidedES": "metricopt_ext.search.direct.GuidedES",
    "GuidedTrustRegion": "metricopt_ext.search.trust_region.GuidedTrustRegion",
    "KeptOutputs": "metricopt_ext.utils.kept_outputs.KeptOutputs",
    "LearnedDetails": "metricopt_ext.methods.algorithm_s1.LearnedDetails",
    "LearnedOptimizer": "metricopt_ext.search.learned_optimizer.LearnedOptimizer",
    "Ledger": "metricopt_ext.tasks.ledger.Ledger",
    "LinearLabels": "metricopt_ext.value.labels.LinearLabels",
    "MoreInference": "metricopt_ext.methods.more_inference.MoreInference",
    "NeuralLearner": "metricopt_ext.value.learners.NeuralLearner",
    "NeuralValueFunction": "metricopt_ext.value.value_function.NeuralValueFunction",
    "Observations": "metricopt_ext.value.observations.Observations",
    "OutputLoss": "metricopt_ext.tasks.task.OutputLoss",
    "Quality": "metricopt_ext.value.value_function.Quality",
    "RandomSearch": "metricopt_ext.search.random_search.RandomSearch",
    "Recipe": "metricopt_ext.methods.recipe.Recipe",
    "RecipeDetails": "metricopt_ext.methods.result.RecipeDetails",
    "ReptileLearner": "metricopt_ext.value.reptile.ReptileLearner",
    "RidgeLearner": "metricopt_ext.value.learners.RidgeLearner",
    "RidgeValueFunction": "metricopt_ext.value.value_function.RidgeValueFunction",
    "SearchDetails": "metricopt_ext.methods.result.SearchDetails",
    "StepWeights": "metricopt_ext.methods.recipe_settings.StepWeights",
    "Training": "metricopt_ext.methods.short_finetunes.Training",
    "Trajectory": "metricopt_ext.tasks.trajectory.Trajectory",
    "TrajectoryStore": "metricopt_ext.tasks.trajectory.TrajectoryStore",
    "Trial": "metricopt_ext.methods.trial.Trial",
    "Tuned": "metricopt_ext.methods.tuning.Tuned",
    "UpdateRule": "metricopt_ext.search.update_rule.UpdateRule",
    "ValueFunction": "metricopt_ext.value.value_function.ValueFunction",
    "attach_input_bias": "metricopt_ext.adapters.attach.attach_input_bias",
    "attach_lora_scales": "metricopt_ext.adapters.attach.attach_lora_scales",
    "batchnorm_line": "metricopt_ext.methods.batchnorm_starts.batchnorm_line",
    "correlation_report": "metricopt_ext.experiment.correlation.correlation_report",
    "em_prior_start": "metricopt_ext.methods.prior_starts.em_prior_start",
    "fit_value_function": "metricopt_ext.value.fitting.fit_value_function",
    "line_between": "metricopt_ext.methods.start_lines.line_between",
    "load_trajectories": "metricopt_ext.tasks.trajectory.load_trajectories",
    "load_update_rule": "metricopt_ext.search.update_rule.load_update_rule",
    "meta_train": "metricopt_ext.methods.rounds.meta_train",
    "more_inference": "metricopt_ext.methods.more_inference.more_inference",
    "prior_line": "metricopt_ext.methods.prior_starts.prior_line",
    "save_inference": "metricopt_ext.tasks.inference_file.save_inference",
    "tent_start": "metricopt_ext.methods.batchnorm_starts.tent_start",
    "tune_start": "metricopt_ext.methods.tuning.tune_start",
}


def moved(name: str) -> Any:
    """Return what a name that `metricopt_ext` exported stands for, with a warning that says where it is now.

    Raises:
        KeyError: It exported no such name.
    """
    module, _, new = MOVED[name].rpartition(".")
    warnings.warn(f"metricopt_ext.{name} is now {MOVED[name]}; import it from there", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(module), new)


def renamed_arguments(**new_of: str) -> Callable[[F], F]:
    """Let a function take keyword arguments by their former names, with a warning: ``former="new"``.

    Raises:
        TypeError: By the call, if an argument is given under both names.
    """

    def accepting(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for former in new_of.keys() & kwargs.keys():
                new = new_of[former]
                if new in kwargs:
                    raise TypeError(
                        f"{function.__name__}() got {new} and {former}, its former name; leave {former} out"
                    )
                warnings.warn(f"{former} is now called {new}; use that name", DeprecationWarning, stacklevel=3)
                kwargs[new] = kwargs.pop(former)
            return function(*args, **kwargs)

        return cast(F, call)

    return accepting
