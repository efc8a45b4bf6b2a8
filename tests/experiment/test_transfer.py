"""Another run's f: read as it was written, followed as its formulas say, and refused where phi means something else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.adapters.signature import Outputs, Signature
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.detection.config import DetectionConfig
from metricopt_ext.errors import ConfigError, ValueFunctionError
from metricopt_ext.experiment.config_sections import AdapterConfig
from metricopt_ext.experiment.method_config import FinetuneConfig, PaperConfig, TransferConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.transfer import check_transfers, transferred_methods
from metricopt_ext.methods.tuning import FRESH, finetune
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.optimizer import MetricOptStep
from metricopt_ext.utils.config import load_config
from metricopt_ext.value.rotated import RotatedValueFunction
from metricopt_ext.value.value_function import RidgeValueFunction

HERE = Signature("film", ("norm1", "norm2"), (4, 8), 3, 6, "normal/1", None)
HOSTS: list[tuple[type[RunConfig], list[str]]] = [
    (ClassificationConfig, ["data.name=iris", "model.name=tabular_mlp", "adapter.kind=input_bias"]),
    (RetrievalConfig, ["data.name=digits", "model.name=conv4"]),
    (DetectionConfig, ["data.name=scenes"]),
]


class Saying(Callback):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def saved_f(path: Path, dim: int, signature: Signature | None = None) -> RidgeValueFunction:
    """Return an f of some numbers, and write it to a file."""
    rng = torch.Generator().manual_seed(dim)
    f = RidgeValueFunction(dim, 2)
    f.coefficients.normal_(generator=rng)
    f.intercept.fill_(0.3)
    f.set_domain(torch.randn(20, dim, generator=rng))
    f.signature = signature
    path.parent.mkdir(parents=True, exist_ok=True)
    f.save(path)
    return f


def following(file: Path, **settings: Any) -> RunConfig:
    return RunConfig(
        finetune=FinetuneConfig(steps=6, lr=0.2),
        methods=["transfer"],
        transfer=TransferConfig(str(file), loss_weight=0.7, metric_step=0.4),
        **settings,
    )


def test_a_recipes_f_is_followed_as_it_was_saved_beside_its_placebo_without_a_query(
    quadratic: Callable[..., Any], tmp_path: Path
) -> None:
    task, file = quadratic(), tmp_path / "f.safetensors"
    f = saved_f(file, task.dim)
    loaded = TransferConfig.load(file, task.dim)
    assert {name: value.tolist() for name, value in loaded.state_dict().items()} == {
        name: value.tolist() for name, value in f.state_dict().items()
    }
    methods = transferred_methods(following(file), task, 5, Callback())
    for name, each in (("transferred", f), ("placebo", RotatedValueFunction(f, 5))):
        (reached,) = methods[name]({}).run(task)
        policy = MetricOptStep(each, 0.2, 0.4, 0.7, 6, even_untrusted=True)
        assert torch.equal(reached.path, finetune(task, policy, 6, 5))  # type: ignore[arg-type]
        assert torch.equal(reached.end, reached.path[-1])  # type: ignore[arg-type, index]
        assert reached.queries == reached.queries_per_start == task.queries == 0  # what the report says, and the calls
    assert not transferred_methods(RunConfig(), task, 5, Callback())


def test_after_the_paper_f_is_followed_by_algorithm_1(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task, file = quadratic(dtype=torch.float32), tmp_path / "f.safetensors"
    f = saved_f(file, task.dim)
    config = following(file, method=PaperConfig(metric_rate=0.3, evals=3))
    (reached,) = transferred_methods(config, task, 5, Callback())["transferred"]({}).run(task)
    algorithm: Any = config.build_strategy()
    assert torch.equal(reached.path, algorithm.meta_test(task, f, task.origin(), seed=5, index=FRESH))  # type: ignore[arg-type]
    assert task.queries == 0


@pytest.mark.parametrize(("kind", "settings"), HOSTS, ids=["classification", "retrieval", "detection"])
def test_an_f_of_another_dimension_is_refused_before_any_work(
    kind: type[RunConfig], settings: list[str], tmp_path: Path
) -> None:
    file, transfer = (
        tmp_path / "f.safetensors",
        ["methods=[transfer]", f"transfer.value_function={tmp_path}/f.safetensors"],
    )
    saved_f(file, 4)
    load_config(kind, None, [*settings, *transfer, "adapter.dim=4"]).check()
    other = load_config(kind, None, [*settings, *transfer, "adapter.dim=5"])
    assert_refused(other.check, ValueFunctionError, "transfer.value_function", file, "4", "5", "adapter.dim")
    assert_refused(
        lambda: load_config(kind, None, [*settings, "methods=[transfer]"]).check(),
        ConfigError,
        "methods",
        "transfer.value_function=FILE",
    )
    paper = load_config(kind, None, [*settings, *transfer, "method.name=paper", "transfer.metric_step=0.3"])
    assert_refused(paper.check, ConfigError, "transfer.metric_step=0.3", "method.metric_rate")


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"kind": "input_bias"}, ("adapter.kind=input_bias",)),
        ({"outputs": Outputs()}, ("adapter.outputs=true",)),
        ({"seed": 4}, ("3", "seed=4", "seeds=1")),
    ],
)
def test_an_f_of_another_kind_of_phi_is_refused(other: dict[str, Any], names: tuple[str, ...]) -> None:
    check_transfers(HERE, HERE, "f")
    check_transfers(replace(HERE, layers=("a", "b"), channels=(4, 16), seed=9), HERE, "f")  # another network
    assert_refused(lambda: check_transfers(replace(HERE, **other), HERE, "f"), ValueFunctionError, *names)


def test_a_temperature_is_part_of_phi() -> None:
    own, hot = (replace(HERE, outputs=Outputs("head", 2.0, temperature)) for temperature in (False, True))
    check_transfers(replace(own, outputs=Outputs("fc", 3.0)), own, "f")  # measured on each model
    assert_refused(lambda: check_transfers(hot, own, "f"), ValueFunctionError, "adapter.temperature=true")


def test_of_a_runs_folder_each_seed_takes_its_own(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task = quadratic()
    own = task.adapter.signature
    fs = {
        seed: saved_f(tmp_path / f"seed-{seed}" / "value_function.safetensors", task.dim, signature)
        for seed, signature in ((0, own), (1, replace(own, layers=("other",))), (2, replace(own, kind="film")))
    }
    config, said = following(tmp_path, seeds=2, adapter=AdapterConfig(dim=task.dim)), Saying()
    config.check()
    for seed, f in list(fs.items())[:2]:
        config.seed = seed
        (reached,) = transferred_methods(config, task, seed, said)["transferred"]({}).run(task)
        policy = MetricOptStep(f, 0.2, 0.4, 0.7, 6, even_untrusted=True)
        assert torch.equal(reached.end, finetune(task, policy, 6, seed)[-1])  # type: ignore[arg-type]
        assert len(said.lines) == seed  # of other layers, the user is told
    assert "was fitted for other layers" in said.lines[0]
    assert_refused(
        lambda: transferred_methods(config, task, 2, said), ValueFunctionError, "adapter.kind=film", "input_bias"
    )
    config.seed = 2
    assert_refused(config.check, ConfigError, tmp_path, "seed-3/value_function.safetensors")
