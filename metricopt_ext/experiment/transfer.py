"""Another run's value function, followed on this run's model beside a placebo (paper, section 4.3 and Table 4)."""

from functools import partial

from torch import Tensor

from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.experiment.baselines import along_path
from metricopt_ext.experiment.method import Method
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.usual_methods import planned
from metricopt_ext.methods.algorithm1 import Algorithm1
from metricopt_ext.methods.tuning import FRESH, finetune
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.optimizer import MetricOptStep
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.value.rotated import RotatedValueFunction
from metricopt_ext.value.value_function import ValueFunction


def transferred_methods(config: RunConfig, task: FinetuneTask, seed: int, callback: Callback) -> dict[str, Method]:
    """Return what follows another run's f from phi = 0, trusted or not, and the same f turned.

    None without ``transfer``. Neither asks the metric, so no guard decides: their ends are what they are.

    Args:
        config: The run's settings.
        task: What is finetuned.
        seed: Seed of batches, perturbations and the placebo's rotation.
        callback: Told where f comes from other layers.

    Raises:
        ConfigError: There is no file for this seed.
        FileFormatError: It can't be read.
        ValueFunctionError: Its phi can't be this adapter's; see `check_transfers`.
    """
    if config.transfer is None:
        return {}
    path = config.transfer.file(seed)
    f = config.transfer.load(path, task.dim).to(task.adapter.phi.device)
    own = task.adapter.signature
    if f.signature is not None and own is not None:
        check_transfers(f.signature, own, str(path))
        if seed == config.seed and (f.signature.layers, f.signature.channels) != (own.layers, own.channels):
            callback.say(
                f"transfer: {path} was fitted for other layers, on which phi acts by other matrices; what it is worth"
                " here, the placebo beside it shows"
            )
    f.signature = None  # it is followed all the same
    fs = {"transferred": f, "placebo": RotatedValueFunction(f, seed)}
    return {name: planned(along_path(partial(followed, config, each)), 0, seed) for name, each in fs.items()}


def check_transfers(fitted: Signature, own: Signature, name: str) -> None:
    """Reject an adapter on which f's coordinates would mean something else for no reason.

    Other layers and channels pass: that is a transfer to another network. Then the matrices differ in any case.

    Args:
        fitted: The adapter that f was fitted for.
        own: This run's.
        name: What the message calls f.

    Raises:
        ValueFunctionError: phi acts in another way, or by other matrices on the same layers.
    """
    for key, theirs, ours in (
        ("adapter.kind", fitted.kind, own.kind),
        ("adapter.outputs", fitted.outputs is not None, own.outputs is not None),
        ("adapter.temperature", _has_temperature(fitted), _has_temperature(own)),
    ):
        if theirs != ours:
            shown, here = (str(each).lower() for each in (theirs, ours))
            raise ValueFunctionError(
                f"transfer.value_function: {name} was fitted with {key}={shown}, this run has {here}: give both runs"
                " the same, or learn f anew"
            )
    if (fitted.layers, fitted.channels) == (own.layers, own.channels) and fitted.seed != own.seed:
        raise ValueFunctionError(
            f"transfer.value_function: {name} was fitted under the matrices of seed {fitted.seed}, this run's are of"
            f" {own.seed}: set seed={fitted.seed} with seeds=1, or give the folder of a run that has each seed's own f"
        )


def followed(config: RunConfig, f: ValueFunction, task: FinetuneTask, start: Tensor, seed: int) -> Tensor:
    """Finetune under f as the run's own method would; returns the visited phi, ``(T + 1) x d``. No query.

    Args:
        config: The run's settings, with ``transfer``.
        f: The value function, of no known adapter.
        task: What is finetuned.
        start: phi_0, ``d``.
        seed: Seed of batches and perturbations.
    """
    strategy, settings, steps = config.build_strategy(), config.transfer, config.finetune.steps
    assert settings is not None
    if isinstance(strategy, Algorithm1):
        return strategy.meta_test(task, f, start, seed=seed, index=FRESH)
    policy = MetricOptStep(
        f, config.finetune.lr, settings.metric_step, settings.loss_weight, steps, even_untrusted=True
    )
    return finetune(task, policy, steps, seed, start)


def _has_temperature(signature: Signature) -> bool:
    return signature.outputs is not None and signature.outputs.temperature
