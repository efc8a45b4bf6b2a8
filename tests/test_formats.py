"""Files of earlier releases, which later ones read: each release's are in tests/formats/VERSION.

``python tests/test_formats.py`` writes those of this version, and ``expected.json`` with what reading them gives. They
are made with the release; afterwards they stay as they are. Where a later release no longer reads a file, its entry in
``expected.json`` goes, with a line in the changelog.
"""

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.records import QUALITY, record
from metricopt_ext.adapters.attach import attach_input_bias, attach_lora_scales
from metricopt_ext.comparison import comparison_content, comparison_report
from metricopt_ext.comparison.comparison_file import FILE_FORMAT
from metricopt_ext.errors import FileFormatError
from metricopt_ext.experiment.record import SeedRecord
from metricopt_ext.search.update_rule import UpdateRule, load_update_rule
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.inference_file import save_inference
from metricopt_ext.tasks.kept_evaluations import KeptEvaluation, KeptEvaluations, KeptPoint
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore, load_trajectories
from metricopt_ext.utils.files import read_json, write_json
from metricopt_ext.utils.versions import versions
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.loading import KINDS
from metricopt_ext.value.value_function import NeuralValueFunction, RidgeValueFunction, ValueFunction

FORMATS = Path(__file__).parent / "formats"
RELEASES = sorted(path.name for path in FORMATS.glob("*") if path.is_dir())


def steps(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
    """Return sixteenths from -11 to 11, of either sign, which any machine has alike."""
    return ((torch.arange(torch.Size(shape).numel()) * 7 + 3) % 23 - 11).to(of).view(shape) / 16


def fill(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for value in module.state_dict().values():
            value.copy_(steps(*value.shape)) if value.is_floating_point() else value.fill_(3)
    return module.eval()


def net() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2)))


def lora_net() -> nn.Module:
    peft = pytest.importorskip("peft")
    return fill(peft.inject_adapter_in_model(peft.LoraConfig(r=1, target_modules=["0"]), net()))


def digest(tensors: dict[str, Tensor]) -> str:
    """Return a digest of names, types, shapes and bits."""
    text = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        text.update(f"{name} {value.dtype} {list(value.shape)}".encode() + value.detach().numpy().tobytes())
    return text.hexdigest()[:16]


# ----- How each file is written, and what reading it gives


def write_adapter(adapter: mo.Adapter, path: Path, **replaced: dict[str, Tensor]) -> None:
    adapter.apply(mo.Start(steps(adapter.dim), **replaced))
    adapter.save(path)


def read_adapter(path: Path, model: nn.Module) -> list[Any]:
    adapter = mo.load_adapter(model, path)
    own = [modulation for _, modulation in adapter.modulations()]
    matrices = {f"{i}.{name}": each for i, modulation in enumerate(own) for name, each in modulation.named_buffers()}
    replaced = digest(adapter.as_start().replaced)
    return [adapter.signature.to_json(), adapter.phi.tolist(), digest(matrices), replaced]


def write_f(f: ValueFunction, path: Path) -> None:
    f.signature, f.quality = mo.attach_film(net(), dim=2).signature, QUALITY
    f.save(path)


def read_f(path: Path) -> list[Any]:
    f = mo.load_value_function(path)
    assert f.quality == QUALITY
    assert f.signature == mo.attach_film(net(), dim=2).signature
    return [type(f).__name__, f.settings(), digest(f.state_dict())]


def write_trajectories(folder: Path) -> None:
    cost, signature = steps(2, of=torch.float64), mo.attach_film(net(), dim=2).signature
    TrajectoryStore(folder, {"seed": 1}).add(
        Trajectory(
            1, 2, steps(3, 2), steps(2), torch.tensor([0, 2]), cost, cost[:, None] * steps(2), signature, cost / 2
        )
    )


def read_trajectories(folder: Path) -> list[Any]:
    (each,) = load_trajectories(folder)
    tensors = {name: getattr(each, name) for name in ("phi", "loss", "observed", "cost", "halves", "noise")}
    return [each.round, each.index, digest(tensors), len(TrajectoryStore(folder, {"seed": 1}))]


def metric(function: Callable[..., Any] = lambda: 0.0) -> mo.Metric:
    return mo.Metric(function, maximize=True, name="share")


def write_evaluations(path: Path) -> None:
    file, points = KeptEvaluations(path, metric()), [KeptPoint(i, steps(2).tolist(), "") for i in range(4)]
    file.ask(points[:1])
    halves = ((0.1, 0.3), (0.2, 0.2))
    found = Evaluation(0.1 + 0.2, halves[0], 0.01, pairs=halves, also={"a": 1 / 3})
    file.tell(KeptEvaluation.evaluated(points[1], found, 2))
    file.tell(KeptEvaluation.evaluated(points[2], Evaluation(1.0, None, None, failed=True), 1))
    file.tell(KeptEvaluation.without(points[3]))


def read_evaluations(path: Path) -> list[Any]:
    file = KeptEvaluations(path, metric())
    return [[each.fields for each in kept.values()] for kept in (file.open, file.evaluations)]


def read_record(path: Path) -> list[Any]:
    read = SeedRecord.load(path)
    assert read == record()
    return [read.outcomes["metricopt"][0].validation, read.outcomes["metricopt"][0].test]


def write_comparison(path: Path) -> None:
    column = {"validation": [0.1, 0.2], "test": [0.1 + 0.2, 1 / 3]}
    cell = {**column, "queries": [5, 5], "seconds": [1.0, 2.0]}
    content = {
        "format": FILE_FORMAT,
        "task": "classification/toy",
        "title": "net on toy",
        "metric": {"name": "accuracy", "maximize": True},
        "budgets": [5],
        "seeds": [700, 701],
        "starts": {"pretrained": column},
        "best_start": {**column, "queries": 2, "chosen": ["pretrained"] * 2, "seconds": [1.0, 1.0]},
        "methods": {"metricopt": {"least": 3, "cells": {"5": cell}, "errors": {}}},
        "guards": [{"seed": 700, "method": "metricopt", "budget": 5, "accepted": True, "change": 0.1, "error": None}],
        "machines": ["A processor"],
        "versions": versions(),
        "config": {"task": "classification", "config": "a.yaml", "overrides": []},
    }
    write_json(path, comparison_content.paired(content))


def read_comparison(path: Path) -> list[Any]:
    content = comparison_content.load(path)
    comparison_report.markdown(content)
    return [content["methods"]["metricopt"]["cells"]["5"]["test"], content["starts"]["pretrained"]["test"]]


def settings() -> mo.Settings:
    @contextmanager
    def applied(values: dict[str, Any]) -> Iterator[None]:
        at.update(values)
        yield
        at.clear()

    at: dict[str, Any] = {}
    made = mo.Settings([mo.Setting("cut", 0.0, 1.0, default=0.25)], applied, set_on=lambda _, values: "")
    made.at = at  # type: ignore[attr-defined]
    return made


def write_inference(path: Path) -> None:
    save_inference(path, settings(), {"cut": 0.1 + 0.2})


def write_run(folder: Path) -> None:
    model, own = net(), settings()
    x, y = steps(23, 3), (torch.arange(23) % 3 == 0).double()

    def share(model: nn.Module) -> float:
        found = model(x).softmax(1)[:, 1]
        return float((1 - (found - y).abs()).mean()) * (1 - (own.at.get("cut", 0.25) - 0.5) ** 2)  # type: ignore[attr-defined]

    task = mo.FinetuneTask(mo.attach_film(model, dim=2), metric=metric(share), settings=own)
    mo.optimize_metric(task, queries=24, output_dir=folder)


def read_run(folder: Path) -> list[Any]:
    adapter = mo.load_run(net(), folder, settings())
    kept = KeptEvaluations(folder / "evaluations.json", metric()).evaluations
    f, values = mo.load_value_function(folder / "value_function.safetensors"), mo.load_inference(folder)
    costs = [kept[id].cost for id in sorted(kept)]
    return [adapter.phi.tolist(), digest(f.state_dict()), costs, values, read_json(folder / "identity.json")["format"]]


def gp() -> GPValueFunction:
    return GPValueFunction.conditioned(steps(4, 2), steps(4), torch.eye(2), 0.1)


def states() -> list[dict[str, Tensor]]:
    return [{name: value * scale for name, value in net().state_dict().items()} for scale in (2, 3)]


OUTPUTS = mo.Outputs(scale=2.0, temperature=True)
WRITERS: dict[str, Callable[[Path], None]] = {
    "film.safetensors": lambda path: write_adapter(
        mo.attach_film(net(), dim=3), path, parameters={"1.weight": steps(4) + 1}
    ),
    "film_outputs.safetensors": lambda path: write_adapter(mo.attach_film(net(), dim=3, outputs=OUTPUTS), path),
    "outputs.safetensors": lambda path: write_adapter(mo.attach_outputs(net(), OUTPUTS), path),
    "input_bias.safetensors": lambda path: write_adapter(attach_input_bias(net(), dim=3), path),
    "lora.safetensors": lambda path: write_adapter(attach_lora_scales(lora_net()), path),
    "mixture.safetensors": lambda path: write_adapter(mo.attach_mixture(net(), states()), path),
    "neural.safetensors": lambda path: write_f(fill(NeuralValueFunction(2)), path),  # type: ignore[arg-type]
    "ridge.safetensors": lambda path: write_f(fill(RidgeValueFunction(2, 2)), path),  # type: ignore[arg-type]
    "gp.safetensors": lambda path: write_f(gp(), path),
    "update_rule.safetensors": lambda path: fill(UpdateRule(dim=2, hidden=3)).save(path),  # type: ignore[operator]
    "trajectories": write_trajectories,
    "evaluations.json": write_evaluations,
    "record.json": lambda path: record().save(path),
    "comparison.json": write_comparison,
    "inference.yaml": write_inference,
    "run": write_run,
}
READERS: dict[str, Callable[[Path], list[Any]]] = {
    **{f"{kind}.safetensors": lambda path: read_adapter(path, net()) for kind in ("film", "film_outputs", "outputs")},
    **{f"{kind}.safetensors": lambda path: read_adapter(path, net()) for kind in ("input_bias", "mixture")},
    "lora.safetensors": lambda path: read_adapter(path, lora_net()),
    **{f"{kind}.safetensors": read_f for kind in ("neural", "ridge", "gp")},
    "update_rule.safetensors": lambda path: [
        (rule := load_update_rule(path)).settings(),
        digest({"weights": rule.weights}),
    ],
    "trajectories": read_trajectories,
    "evaluations.json": read_evaluations,
    "record.json": read_record,
    "comparison.json": read_comparison,
    "inference.yaml": lambda path: [mo.load_inference(path)],
    "run": read_run,
}


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("release", RELEASES)
def test_a_file_of_a_release_is_read_to_the_last_bit(release: str, name: str) -> None:
    expected = json.loads((FORMATS / release / "expected.json").read_text())
    if name not in expected:
        pytest.skip(f"{release} has none, or it is no longer read")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an adapter's of other weights than the model's
        assert as_json(READERS[name](FORMATS / release / name)) == expected[name]


def test_the_first_release_has_a_file_of_each_kind_with_what_was_put_in() -> None:
    """By what was written, not by what reading gave."""
    folder = FORMATS / "0.1.0"
    expected = json.loads((folder / "expected.json").read_text())
    assert list(expected) == list(WRITERS)
    assert set(WRITERS) == set(READERS)
    assert {name.removesuffix(".safetensors") for name in expected} >= KINDS.keys()
    for name in ("film", "film_outputs", "outputs", "input_bias", "mixture"):
        adapter = mo.load_adapter(net(), folder / f"{name}.safetensors")
        assert torch.equal(adapter.phi, steps(adapter.dim))
    replaced = mo.load_adapter(net(), folder / "film.safetensors").as_start().replaced
    assert torch.equal(replaced["1.weight"], steps(4) + 1)
    assert mo.load_inference(folder) == {"cut": 0.1 + 0.2}
    (trajectory,) = load_trajectories(folder / "trajectories")
    assert torch.equal(trajectory.phi, steps(3, 2))
    weights = load_update_rule(folder / "update_rule.safetensors").weights
    assert torch.equal(weights, steps(len(weights)))


@pytest.mark.parametrize("release", RELEASES)
def test_each_file_names_its_format(release: str) -> None:
    for path in sorted((FORMATS / release).rglob("*")):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                assert file.metadata()["format"].startswith("metricopt_ext/"), path
        elif path.suffix == ".yaml":
            assert path.read_text().startswith("# metricopt_ext/"), path
        elif path.suffix == ".json" and path.name not in ("expected.json", "identity.json"):
            assert json.loads(path.read_text())["format"].startswith("metricopt_ext/"), path
    assert isinstance(read_json(FORMATS / release / "run" / "identity.json")["format"], int)


@pytest.mark.parametrize("name", ["evaluations.json", "record.json", "comparison.json"])
def test_a_file_of_a_format_to_come_is_refused(name: str, tmp_path: Path) -> None:
    kind, text = Path(name).stem, (FORMATS / "0.1.0" / name).read_text()
    (tmp_path / name).write_text(text.replace(f'"metricopt_ext/{kind}/1"', f'"metricopt_ext/{kind}/9"'))
    with pytest.raises(FileFormatError, match=rf"{name} .*format.*one of"):
        READERS[name](tmp_path / name)


def write(version: str) -> None:
    """Write the files of a release, and what reading them gives."""
    folder = FORMATS / version
    if folder.exists():
        sys.exit(f"{folder} is there: a release's files are not written again")
    folder.mkdir(parents=True)
    for name, written in WRITERS.items():
        written(folder / name)
    (folder / "run" / ".lock").unlink()
    write_json(folder / "expected.json", {name: READERS[name](folder / name) for name in WRITERS})


if __name__ == "__main__":
    write(versions()["metricopt-ext"])
