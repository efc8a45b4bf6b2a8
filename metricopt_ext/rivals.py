"""The rivals that any task's tool can run beside MetricOpt."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from .baselines import finetune_on, reestimate_batchnorm
from .batches import Batches
from .evidence import Rival
from .result import MetricOptResult
from .run_config import RunConfig
from .search import CMAES, GuidedES, Search
from .task import FinetuneTask


def usual_rivals(
    config: RunConfig, inputs: Sequence[Tensor], batches: Batches, seed: int
) -> tuple[dict[str, Rival], dict[str, Rival]]:
    """Return rivals and follow-ups by name, as `evidence.compare` takes them; some run only if the settings say so.

    Args:
        config: The run.
        inputs: The validation data's inputs in parts of about one size, for BatchNorm to be re-estimated on.
        batches: Batches of the labelled validation data, as the loss takes them.
        seed: Seed of batches and searches.
    """
    recipe = config.recipe

    def batchnorm_on_validation(task: FinetuneTask, result: MetricOptResult) -> nn.Module | None:
        return reestimate_batchnorm(task.adapter.model, inputs)

    def finetune_on_validation(task: FinetuneTask, result: MetricOptResult) -> Tensor:
        return finetune_on(task, batches, recipe.lr, recipe.steps, seed)

    def searched(task: FinetuneTask, result: MetricOptResult, search: Search) -> Tensor | None:
        if not config.search_queries:
            return None
        return search(task, task.origin(), config.search_queries, seed=seed).phi

    def refined(task: FinetuneTask, result: MetricOptResult) -> Tensor | None:
        if not config.refine_queries:
            return None
        return CMAES()(task, result.ends[result.chosen], config.refine_queries, seed=seed).phi

    rivals: dict[str, Rival] = {
        "batchnorm_validation": batchnorm_on_validation,
        "loss_finetune_validation": finetune_on_validation,
        "guided_es": partial(searched, search=GuidedES(lr=recipe.lr)),
        "cma_es": partial(searched, search=CMAES()),
    }
    return rivals, {"refined": refined}
