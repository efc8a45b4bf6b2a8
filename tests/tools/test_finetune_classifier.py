"""The command-line tool end to end on tiny runs, and the parts it builds from a config."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers import programs
from helpers.pictures import check_figures, coloured
from helpers.refusals import assert_refused, assert_warned, having
from helpers.runs import KEPT, check_needs_resume
from metricopt_ext.adapters.attach import load_adapter
from metricopt_ext.classification import classifier as making
from metricopt_ext.classification.classifier import classifier
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.classification.metrics import METRICS
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.probe import output_scale
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.halves import stratified_halves
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.experiment.method import SIBLINGS
from metricopt_ext.experiment.siblings import SiblingsConfig
from metricopt_ext.siblings.ala.ala import AdaptiveLossAlignment
from metricopt_ext.siblings.ala.loss_policy import load_loss_policy
from metricopt_ext.siblings.reloss.relational_loss import load_relational_loss
from metricopt_ext.siblings.sl.set_loss import SetLoss, load_set_loss
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tools import finetune_classifier as tool
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint
from metricopt_ext.value.loading import load_value_function

call, refused = partial(programs.call, tool), partial(programs.refused, tool)

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "finetune_classifier.py"
DIGITS, A9A, A9A_SHIFTED = (
    ROOT / "configs" / "classification" / f"{name}.yaml" for name in ("digits", "a9a", "a9a_shifted")
)
# One round of four tasks with two observations, three queries to choose and three for the guard.
SIZES = [
    *("finetune.steps=3", "queries=16"),
    *("model.epochs=1", "adapter.dim=3", "population=4", "best_evals=2", "workers=1"),
    *("seeds=1", "device=cpu"),
]
RECIPE = [
    *("method.name=recipe", "method.evals=2", "method.rounds=1", "method.folds=2", "method.trials=0"),
    "method.learners=[ridge]",  # the others take seconds to fit
]
METHODS = {"search": [], "paper": ["method.name=paper", "method.evals=2"]}
TINY = [*RECIPE, *SIZES]
NAMED = ("methods=[loss_finetune_best,class_offsets,logit_adjustment_tuned]", "pictures=[curves]")


def config_of(*overrides: str, file: Path = DIGITS) -> ClassificationConfig:
    return load_config(ClassificationConfig, file, [*TINY, *overrides])


def numbers(folder: Path) -> Any:
    """Return report.json without what may differ between equal runs."""
    content = json.loads((folder / "report.json").read_text())
    for method in content["methods"].values():
        del method["seconds"]
    for name in ("workers", "device", "seed", "seeds"):
        del content["config"][name]
    return content


def answers(config: ClassificationConfig, folder: Path, seed: int, tuned: bool) -> tuple[Tensor, Tensor]:
    """Return test labels and logits of the model, bare or with the adapter, that a run left in its folder."""
    splits = load_splits(config, seed)
    config.model.weights = str(folder / f"seed-{seed}" / "model.safetensors")
    model = build_model(config.model.name, splits.train.x.shape[1:], splits.num_classes)
    load_checkpoint(model, Path(config.model.weights))
    model.eval()
    if tuned:
        load_adapter(model, folder / f"seed-{seed}" / "adapter.safetensors")
    with torch.no_grad():
        return splits.test.y, model(splits.test.x)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two seeds of tiny settings, once for all tests that only look at what is left."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    tool.run(config_of("seeds=2", *NAMED), folder, resume=False)
    return folder


def test_everything_is_written(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        *KEPT,
        *("seed-0", "seed-1"),
        *("methods.png", "finetuning.png", "value_function.png"),
    }
    check_figures([*finished.glob("*.png"), *finished.glob("seed-*/examples.png")])
    for seed in (0, 1):
        folder = finished / f"seed-{seed}"
        assert {"record.json", "examples.png", "evaluations.json"} <= {path.name for path in folder.iterdir()}
        assert len(list((folder / "trajectories").glob("round-0-task-*.safetensors"))) == 4
        f = load_value_function(folder / "value_function.safetensors", dim=3)
        assert f(torch.zeros(3)).shape == ()
        assert f.quality is not None
    assert (finished / "report.md").read_text().count("\n| ") >= 7
    assert len(list(finished.glob("events/seed-*/metricopt/events.out.tfevents.*"))) == 2


def test_the_report_states_what_the_kept_models_do(finished: Path) -> None:
    content = json.loads((finished / "report.json").read_text())
    assert content["task"] == "classification/digits"
    assert content["metric"] == {"name": "accuracy", "maximize": True}
    assert content["seeds"] == [0, 1]
    assert content["methods"]["metricopt"]["queries_total"] <= content["config"]["queries"] == 16
    assert content["methods"]["metricopt"]["queries_per_start"] in (2, 3, 5)
    assert content["methods"]["loss_finetune_best"]["queries_total"] == 2
    assert content["config"]["finetune"]["steps"] == 3
    for seed in (0, 1):
        for name, tuned in (("pretrained", False), ("metricopt", True)):
            labels, logits = answers(config_of(), finished, seed, tuned)
            accuracy = sklearn.metrics.accuracy_score(labels, logits.argmax(1))
            assert content["methods"][name]["test"][seed] == pytest.approx(accuracy)
        kept = content["kept"][seed]
        if kept == "start":
            assert not load_adapter_phi(finished, seed).any()
        validation = content["methods"]["metricopt"]["validation"][seed]
        assert validation >= content["methods"]["pretrained"]["validation"][seed]


def load_adapter_phi(folder: Path, seed: int) -> Tensor:
    model = build_model("small_cnn", torch.Size((1, 8, 8)), 10)
    return load_adapter(model, folder / f"seed-{seed}" / "adapter.safetensors").phi


def test_a_second_call_needs_resume(finished: Path) -> None:
    check_needs_resume(tool, DIGITS, finished, [*TINY, *NAMED, "seeds=2"])


def test_a_finished_run_resumes_without_any_training(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((finished / "report.json").read_text())
    monkeypatch.setattr(making, "train", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr(FinetuneTask, "loss_and_gradient", lambda *_: pytest.fail("finetuned"))
    monkeypatch.setattr(FinetuneTask, "cost", lambda *_: pytest.fail("asked"))
    (finished / "report.json").unlink()
    settings = [*TINY[:-2], *NAMED]
    call("seeds=2", "--config-file", DIGITS, *settings, "--resume", "--output-dir", finished, "device=cpu")
    assert json.loads((finished / "report.json").read_text()) == before
    shown = capsys.readouterr().out
    assert "MetricOpt" in shown
    assert str(finished / "report.json") in shown
    assert len(list(finished.glob("events/seed-*/metricopt/events.out.tfevents.*"))) == 2


def test_methods_on_request(finished: Path, tmp_path: Path) -> None:
    names = NAMED[0].replace("]", ",guided_es,cma_es]")
    settings = ["search_queries=15", names]
    report = tool.run(config_of("seed=1", *settings), tmp_path / "all", resume=False)
    plain = json.loads((finished / "report.json").read_text())["methods"]
    content = json.loads((tmp_path / "all" / "report.json").read_text())["methods"]
    spent = {name: (int(method["queries_total"]), int(method["queries_per_start"])) for name, method in content.items()}
    assert {name: spent[name] for name in spent if name not in plain} == {
        "guided_es": (15, 15),
        "cma_es": (15, 15),
    }
    for name in plain:
        assert content[name]["test"] == plain[name]["test"][1:]  # they change nothing for the others
    for name in ("guided_es", "cma_es"):
        assert content[name]["validation"][0] >= content["pretrained"]["validation"][0]
    assert "| CMA-ES on the metric |" in (tmp_path / "all" / "report.md").read_text()
    assert report.records[0].split_half is not None


def test_the_committed_settings_of_siblings_are_the_paper_s_and_shorter_ones() -> None:
    folder, overrides = ROOT / "benchmarks" / "configs" / "siblings", ["data.root=FOLDER"]
    paper, short = (load_config(ClassificationConfig, folder / f"a9a_{n}.yaml", overrides) for n in ("paper", "30k"))
    for config in (paper, short):
        config.check()
        assert config.siblings.trains == "scratch"
        assert config.data.fractions == [0.72, 0.08, 0.2]
        assert config.methods == ["sl_u", "sl_s", "sl_r"]
    for name in paper.methods:
        assert replace(paper.siblings.build(name), evals=0) == SIBLINGS[name]
    assert (paper.seeds, short.seeds, short.siblings.sl["iterations"]) == (1, 5, 30_000)


def test_the_committed_table_runs_each_system_on_about_as_many_queries() -> None:
    config = load_config(
        ClassificationConfig, ROOT / "benchmarks" / "configs" / "table_a9a.yaml", ["data.root=FOLDER", "metric.name=f1"]
    )
    config.check()
    rows = ["loss_finetune_best", "guided_es", "cma_es", "threshold", "class_offsets", "logit_adjustment_tuned"]
    assert config.methods == ["metricopt_paper", "metricopt_learned", "sl_r", "reloss", "ala", *rows]
    assert (config.siblings.trains, config.search_queries) == ("model", None)
    ala = config.siblings.build("ala")
    assert ala.children * (1 + ala.iterations // ala.action_steps * ala.reward_evals) == config.queries + 10


SL = [
    "siblings.sl.iterations=4",
    "siblings.sl.universal.steps=6",
    "siblings.sl.evals=2",
    "siblings.sl.model_lr=0.01",
]


@pytest.mark.parametrize("trains", ["phi", "model", "scratch"])
def test_sibling_methods_on_request(trains: str, tmp_path: Path) -> None:
    settings = ["data.name=breast_cancer", "data.standardise=true", *MLP, "shift.kind=none", "metric.name=mcr"]
    siblings = ["methods=[sl_u,sl_r]", f"siblings.trains={trains}", "siblings.threshold_evals=7", *SL]
    tool.run(config_of(*settings, *siblings), tmp_path / "run", resume=False)
    content = json.loads((tmp_path / "run" / "report.json").read_text())["methods"]
    spent = {name: content[name] for name in ("sl_u", "sl_r", "metricopt")}
    assert (spent["sl_u"]["queries_total"], spent["sl_r"]["queries_total"]) == (9, 9)
    assert {name: each["batch_queries"] for name, each in spent.items()} == {"sl_u": 6, "sl_r": 46, "metricopt": 0}
    folder = tmp_path / "run" / "seed-0"
    assert load_set_loss(folder / "sl_r.safetensors").metric == "mcr"
    trained, before = load_file(folder / "sl_u_model.safetensors"), load_file(folder / "model.safetensors")
    assert ("metricopt.phi" in trained) == (trains == "phi")
    same = {name for name in before if torch.equal(before[name], trained[name])}
    assert bool(same >= {"head.weight", "body.0.weight"}) == (trains == "phi")
    moved = (trained["body.0.weight"] - before["body.0.weight"]).abs().max()
    assert (moved > 0.13) == (trains == "scratch")  # twelve steps of Adam at 0.01 reach no further
    with Image.open(tmp_path / "run" / "siblings.png") as picture:
        assert picture.width > 400
    if trains != "scratch":
        return
    (folder / "record.json").unlink()
    (folder / "sl_r.json").write_text((folder / "sl_r.json").read_text().replace('"universal": 6', '"universal": 7'))
    tool.run(config_of(*settings, *siblings), tmp_path / "run", resume=True)
    again = json.loads((tmp_path / "run" / "report.json").read_text())["methods"]
    assert again["sl_r"]["batch_queries"] == 47  # from the file: it did not train again
    assert again["sl_r"]["test"] == content["sl_r"]["test"]


@pytest.mark.slow
def test_reloss_on_request(tmp_path: Path) -> None:
    overrides = [
        *("siblings.reloss.steps=4", "siblings.reloss.evals=2", "siblings.reloss.source.training=20"),
        *("siblings.reloss.source.heldout=8", "siblings.reloss.source.checkpoints={count: 2, steps: 3}"),
        "siblings.reloss.training={steps: 2, batches: 6}",
    ]
    settings = ["methods=[reloss,reloss_only]", "loss.name=torch.nn:CrossEntropyLoss"]
    tool.run(config_of(*settings, *overrides), tmp_path / "run", resume=False)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    folder = tmp_path / "run" / "seed-0"
    for name in ("reloss", "reloss_only"):
        spent = content["methods"][name]
        assert (spent["batch_queries"], spent["queries_total"]) == (28, 2)
        assert load_relational_loss(folder / f"{name}.safetensors").metric == "accuracy"


def test_a_sibling_method_on_ten_classes(tmp_path: Path) -> None:
    tool.run(config_of("methods=[sl_s]", *SL), tmp_path / "run", resume=False)
    content = json.loads((tmp_path / "run" / "report.json").read_text())["methods"]["sl_s"]
    assert (content["queries_total"], content["batch_queries"]) == (2, 40)
    assert load_set_loss(tmp_path / "run" / "seed-0" / "sl_s.safetensors").outputs == 10


def test_baselines_that_move_the_logits(finished: Path) -> None:
    """Offsets have MetricOpt's budget, and a model of several logits no threshold."""
    methods = json.loads((finished / "report.json").read_text())["methods"]
    assert "threshold" not in methods
    spent = {name: methods[name]["queries_total"] for name in methods if name.startswith(("class", "logit"))}
    assert spent == {"class_offsets": 16, "logit_adjustment": 0, "logit_adjustment_tuned": 21}
    for name in ("class_offsets", "logit_adjustment_tuned"):
        for before, after in zip(methods["pretrained"]["validation"], methods[name]["validation"], strict=True):
            assert after >= before


@pytest.mark.parametrize("name", ["auc", "aucpr", "f1"])
def test_a_class_of_a_single_example_leaves_no_halves_and_is_said(name: str) -> None:
    part = Split(torch.randn(12, 5), torch.tensor([0] * 11 + [1]))
    metric = model_metric(METRICS[name], part, stratified_halves(part.y, seed=0))
    told = assert_warned(lambda: metric.evaluate(nn.Linear(5, 2), "test"), name, "1", "2")
    assert told.halves is None
    unlucky = (torch.arange(0, 12, 2), torch.arange(1, 12, 2))  # the first of which lacks class 1
    if name == "f1":
        assert model_metric(METRICS[name], part, unlucky).evaluate(nn.Linear(5, 2), "test").halves is not None
        return
    with pytest.warns(UserWarning, match=having(name, "DataError")):
        assert model_metric(METRICS[name], part, unlucky).evaluate(nn.Linear(5, 2), "test").halves is None


def test_the_tuned_model_is_a_plain_one(finished: Path) -> None:
    for seed in (0, 1):
        _, expected = answers(config_of(), finished, seed, tuned=True)
        plain = build_model("small_cnn", torch.Size((1, 8, 8)), 10).eval()
        plain.load_state_dict(load_file(finished / f"seed-{seed}" / "tuned.safetensors"), strict=True)
        with torch.no_grad():
            torch.testing.assert_close(plain(load_splits(config_of(), seed).test.x), expected, rtol=1e-4, atol=1e-4)


MLP = ["model.name=tabular_mlp", "adapter.kind=input_bias", "adapter.layers=[]"]


def test_a_run_says_what_its_metric_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused("--config-file", DIGITS, "--output-dir", tmp_path, *TINY, "metric.name=f1", "device=abacus")
    assert "f1: F-measure of the positive class; with 3 or more classes macro, the mean" in capsys.readouterr().out
    own = ["metric.name=sklearn.metrics:f1_score", "metric.kwargs={average: macro, zero_division: 0}"]
    refused("--config-file", DIGITS, "--output-dir", tmp_path, *TINY, *own, "device=abacus")
    assert "f1_score: average=macro, zero_division=0" in capsys.readouterr().out


def test_any_metric_of_scikit_learn(tmp_path: Path) -> None:
    overrides = ["metric.name=sklearn.metrics:matthews_corrcoef", "metric.bounds=[-1,1]"]
    call("--config-file", DIGITS, "--output-dir", tmp_path, "--seed", "3", *TINY, *overrides)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["metric"] == {"name": "matthews_corrcoef", "maximize": True}
    assert content["seeds"] == [3]
    for name, tuned in (("pretrained", False), ("metricopt", True)):
        labels, logits = answers(config_of(), tmp_path, 3, tuned)
        expected = sklearn.metrics.matthews_corrcoef(labels, logits.argmax(1))
        assert content["methods"][name]["test"] == [pytest.approx(expected)]


@pytest.mark.slow
def test_constraints_are_respected_and_what_a_gain_costs_is_shown(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a YAML file; what is written agrees with the kept model's own outputs, and a run that is resumed with it."""
    own = '{also: [mcc], subject_to: {"recall[3]": ">= start", macro_f1: ">= start - 0.02"}, '
    config, text = tmp_path / "digits.yaml", DIGITS.read_text()
    assert text.count("metric: {") == 1
    config.write_text(text.replace("metric: {", f"metric: {own}"))
    weights = f"model.weights={finished / 'seed-0' / 'model.safetensors'}"
    settings = [*SIZES, "queries=24", "adapter.dim=8", "starts=[]", weights]
    call("--config-file", config, "--output-dir", tmp_path / "run", *settings)
    assert "What it cost elsewhere" in capsys.readouterr().out
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    assert list(content["also"]) == ["recall[3]", "macro_f1", "mcc"]
    (holding,), (kept,) = content["holding"], content["kept"]
    assert 0 < holding <= 24
    read = load_config(ClassificationConfig, config, settings)
    for when, tuned in (("before", False), ("after", True)):
        labels, logits = answers(read, tmp_path / "run", 0, tuned)
        predicted = logits.argmax(1)
        expected = {
            "recall[3]": sklearn.metrics.recall_score(labels, predicted, labels=[3], average=None)[0],
            "macro_f1": METRICS["macro_f1"].function(logits, labels),
            "mcc": sklearn.metrics.matthews_corrcoef(labels, predicted),
        }
        for name, value in expected.items():
            assert content["also"][name]["test"][when] == [pytest.approx(value, abs=1e-9)]
    bounded = {name: content["also"][name]["validation"] for name in ("recall[3]", "macro_f1")}
    assert bounded["recall[3]"]["after"][0] >= bounded["recall[3]"]["before"][0]
    assert bounded["macro_f1"]["after"][0] >= bounded["macro_f1"]["before"][0] - 0.02
    assert kept in ("start", "search")
    told = json.loads((tmp_path / "run" / "seed-0" / "evaluations.json").read_text())["evaluations"]
    assert all(set(each["also"]) == {"recall[3]", "macro_f1"} for each in told)
    assert "Subject to recall" in (tmp_path / "run" / "report.md").read_text()
    before = numbers(tmp_path / "run")
    for name in ("record.json", "adapter.safetensors"):
        (tmp_path / "run" / "seed-0" / name).unlink()
    call("--config-file", config, "--output-dir", tmp_path / "run", "--resume", *settings)
    assert numbers(tmp_path / "run") == before


def test_a_metric_beside_the_config_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "own_score.py").write_text("raise SystemExit('was run')\n")
    command = [sys.executable, SCRIPT, "--config-file", DIGITS, "--output-dir", "run", "metric.name=own_score:score"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{ROOT}:"}, capture_output=True, text=True
    )
    assert done.stderr == (
        f"error: metric.name=own_score:score: module 'own_score', {tmp_path / 'own_score.py'}, is not installed, so it"
        f" is not imported; metric.folder={tmp_path} would allow it\n"
    )
    assert not (tmp_path / "run").exists()


def small_a9a(folder: Path) -> list[str]:
    """Write the two files of a9a with few rows; returns the settings for them."""
    rng = np.random.default_rng(0)
    for name, rows in (("a9a", 260), ("a9a.t", 140)):
        lines = []
        for _ in range(rows):
            on = np.flatnonzero(rng.random(123) < 0.1) + 1
            label = "+1" if rng.random() < (0.8 if 7 in on or 9 in on else 0.15) else "-1"
            lines.append(f"{label} {' '.join(f'{index}:1' for index in on)}")
        (folder / name).write_text("\n".join(lines) + "\n")
    small = ["batch_size=20", "model.batch_size=20", "model.epochs=8", "method.start_std=2"]
    return [*small, f"data.root={folder}"]


def test_a9a_in_its_own_layout(tmp_path: Path) -> None:
    small = [*small_a9a(tmp_path), "metric.name=f1"]
    call("--config-file", A9A, "--output-dir", tmp_path / "run", *TINY, *small)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    assert content["metric"] == {"name": "f1", "maximize": True}
    config = config_of(*small, file=A9A)
    assert load_splits(config, 0).train.x.shape == (280, 123)
    labels, logits = answers(config, tmp_path / "run", 0, tuned=False)
    assert logits.shape == (80,)
    assert content["methods"]["pretrained"]["test"] == [pytest.approx(sklearn.metrics.f1_score(labels, logits > 0))]
    assert not (tmp_path / "run" / "seed-0" / "examples.png").exists()  # there is nothing to look at
    assert "batchnorm_validation" in content["methods"]


def made_set(folder: Path, features: int, kind: str) -> list[str]:
    """Write 400 examples of classes 1 and 2 with a feature of 0 to 3858 and others of 0 or 1; return its settings."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (400, features))
    x[:, 0] = rng.integers(0, 3859, 400)
    y = 1 + (x[:, 0] + 500 * rng.normal(size=400) > 2000)
    if kind == "libsvm":
        rows = [f"{c} " + " ".join(f"{i}:{v}" for i, v in enumerate(row, 1) if v) for c, row in zip(y, x, strict=True)]
    else:
        rows = [",".join([*(f"f{i}" for i in range(features)), "class"])]
        rows += [",".join(map(str, [*row, c])) for c, row in zip(y, x, strict=True)]
    (folder / "set").write_text("\n".join(rows) + "\n")
    return [f"data.root={folder / 'set'}", *(["data.name=csv", "data.target=class"] if kind == "csv" else [])]


@pytest.mark.parametrize(("name", "features"), [("covertype", 54), ("skin", 3)])
@pytest.mark.parametrize("kind", ["libsvm", "csv"])
def test_the_sets_of_sl_are_read_as_either_file(name: str, features: int, kind: str, tmp_path: Path) -> None:
    file = ROOT / "benchmarks" / "configs" / "siblings" / f"{name}.yaml"
    config = load_config(ClassificationConfig, file, made_set(tmp_path, features, kind))
    config.check()
    splits = load_splits(config, 0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [288, 32, 80]
    assert splits.class_names == ("1", "2")
    assert splits.train.x.shape[1:] == (features,)
    assert float(splits.train.x.mean(0).abs().max()) < 1e-5
    assert float((splits.train.x.std(0, unbiased=False) - 1).abs().max()) < 1e-5
    larger = splits.train.x[splits.train.y == 1, 0].mean() - splits.train.x[splits.train.y == 0, 0].mean()
    assert larger > 1  # class 2 counts as positive
    assert isinstance(config.siblings, SiblingsConfig)
    assert config.siblings.build("sl_s").iterations == 30_000  # type: ignore[attr-defined]


def test_a9a_under_another_class_ratio_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = small_a9a(tmp_path)
    call("--config-file", A9A_SHIFTED, "--output-dir", tmp_path / "run", *TINY, *small, "methods=[threshold]")
    assert "tabular_mlp on shifted a9a: expected_cost" in capsys.readouterr().out
    tail = load_config(ClassificationConfig, ROOT / "configs" / "classification" / "digits_longtail.yaml")
    assert ClassificationExperiment.describe(tail).title == "small_cnn on long-tailed digits"
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    assert content["metric"] == {"name": "expected_cost", "maximize": False}
    config = config_of(*small, file=A9A_SHIFTED)
    for name, tuned in (("pretrained", False), ("metricopt", True)):
        labels, logits = answers(config, tmp_path / "run", 0, tuned)
        assert labels.double().mean() == 0.5
        (_, in_vain), (missed, _) = sklearn.metrics.confusion_matrix(labels, logits > 0)
        assert content["methods"][name]["test"] == [pytest.approx((in_vain + 5 * missed) / len(labels))]
    before, after = (content["methods"][name]["validation"][0] for name in ("pretrained", "threshold"))
    assert after <= before


@pytest.mark.slow
def test_a_torchvision_classifier_on_an_image_folder(tmp_path: Path) -> None:
    overrides = [
        *("data.name=image_folder", f"data.root={coloured(tmp_path)}", "data.fractions=[0.5,0.25,0.25]"),
        *("model.name=resnet18", "model.batch_size=6", "adapter.layers=[layer4.*.bn2]", "batch_size=3"),
        *("metric.name=aucpr", "method.start_std=1", "model.epochs=3", "model.lr=0.003"),
    ]
    call("--config-file", DIGITS, "--output-dir", tmp_path / "run", *TINY, *overrides)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    assert content["task"] == "classification/image_folder"
    config = config_of(*overrides)
    for name, tuned in (("pretrained", False), ("metricopt", True)):
        labels, logits = answers(config, tmp_path / "run", 0, tuned)
        assert logits.shape == (9, 3)
        expected = sklearn.metrics.average_precision_score(nn.functional.one_hot(labels), logits.softmax(1))
        assert content["methods"][name]["test"] == [pytest.approx(expected)]
    assert (tmp_path / "run" / "seed-0" / "examples.png").stat().st_size > 1000


def test_a_model_of_ones_own_is_built_tuned_and_written_under_its_own_names(tmp_path: Path) -> None:
    (tmp_path / "our_nets.py").write_text(
        "from torch import nn\n"
        "def net(num_classes, input_shape, width=8):\n"
        "    first = nn.Conv2d(input_shape[0], width, 3, bias=False)\n"
        "    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))\n"
        "    return nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), head)\n"
    )
    overrides = ["model.name=our_nets:net", f"model.folder={tmp_path}", "model.kwargs.width=5", "adapter.layers=[]"]
    more = ["model.epochs=8", "model.lr=0.02", "method.start_std=1"]
    call("--config-file", DIGITS, "--output-dir", tmp_path / "run", *TINY, *overrides, *more)
    sys.path[:] = [each for each in sys.path if each != str(tmp_path)]
    net = sys.modules.pop("our_nets").net
    plain = net(10, (1, 8, 8), width=5).eval()
    plain.load_state_dict(load_file(tmp_path / "run" / "seed-0" / "tuned.safetensors"))
    test = load_splits(config_of(), 0).test
    with torch.no_grad():
        right = float((plain(test.x).argmax(1) == test.y).double().mean())
    methods = json.loads((tmp_path / "run" / "report.json").read_text())["methods"]
    assert methods["metricopt"]["test"] == [pytest.approx(right)]
    message = refused("--config-file", DIGITS, "--output-dir", tmp_path / "r", *TINY, *overrides[:1])
    assert re.search(r"'our_nets'.*lets one", message)
    message = refused("--config-file", DIGITS, "--output-dir", tmp_path / "r", *TINY, "model.kwargs.width=5")
    assert message.startswith("model.kwargs.width is a key of model.name=MODULE:FUNCTION, timm/NAME or a folder")


def hugging_face(folder: Path, classes: list[str]) -> str:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=len(classes))
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: i for i, name in enumerate(classes)}
    transformers.ResNetForImageClassification(config).save_pretrained(folder)
    said = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1]}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return str(folder)


def test_a_hugging_face_folder_brings_weights_and_normalisation(tmp_path: Path) -> None:
    data = ["data.name=image_folder", f"data.root={coloured(tmp_path)}", "data.fractions=[0.5,0.25,0.25]"]
    pixels = load_splits(config_of(*data), 0)
    folder = hugging_face(tmp_path / "hf", list(pixels.class_names))
    config = config_of(*data, f"model.name={folder}", "adapter.layers=[]")
    splits = load_splits(config, 0)
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.2, 0.1]).view(3, 1, 1)
    torch.testing.assert_close(splits.test.x, (pixels.test.x - mean) / std)
    model = classifier(config, splits, 0, tmp_path / "run")
    import transformers

    own = transformers.ResNetForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(predict(model, splits.test.x), own(splits.test.x).logits)
    own.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))

    config.model.name = hugging_face(tmp_path / "turned", list(reversed(pixels.class_names)))
    assert_refused(lambda: classifier(config, splits, 0, tmp_path / "other"), DataError)
    config.model.name = hugging_face(tmp_path / "others", ["x", "y", "z"])
    assert_warned(lambda: classifier(config, splits, 0, tmp_path / "other"), "names")
    (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps({"do_flip_channel_order": True}))
    # whatever the settings are
    assert_refused(
        lambda: load_splits(config_of(*data, f"model.name={folder}", "data.mean=[0,0,0]", "data.std=[1,1,1]"), 0),
        DataError,
        "hf/preprocessor_config.json",
        "do_flip_channel_order",
    )


@pytest.mark.parametrize("kind", ["film", "outputs"])
def test_offsets_of_the_logits_are_tuned_and_kept(tmp_path: Path, kind: str) -> None:
    overrides = [f"adapter.kind={kind}", f"adapter.outputs={kind == 'film'}"]
    overrides += ["adapter.layers=[]", "method.start_std=0.5"]
    call("--config-file", DIGITS, "--output-dir", tmp_path / "run", *TINY, *overrides)
    saved = tmp_path / "run" / "seed-0" / "adapter.safetensors"
    config = config_of(*overrides)
    labels, logits = answers(config, tmp_path / "run", 0, tuned=True)
    methods = json.loads((tmp_path / "run" / "report.json").read_text())["methods"]
    assert methods["metricopt"]["test"] == [pytest.approx(float((logits.argmax(1) == labels).double().mean()))]
    model = build_model("small_cnn", torch.Size((1, 8, 8)), 10)
    load_checkpoint(model, tmp_path / "run" / "seed-0" / "model.safetensors")
    adapter, x = load_adapter(model.eval(), saved), load_splits(config, 0).train.x
    outputs = adapter.outputs
    assert outputs is not None
    assert adapter.dim == 10 + (3 if kind == "film" else 0)
    assert outputs.scale == (output_scale(adapter, x) if kind == "film" else 1.0)


def table(folder: Path, positives: int) -> list[str]:
    path = folder / "table.csv"
    rows = [f"{i / 60},{i % 7},{'yes' if i < positives else 'no'}" for i in range(60)]
    path.write_text("\n".join(["age,weekday,answer", *rows]) + "\n")
    return [
        *("data.name=csv", f"data.root={path}", "data.target=answer", "data.fractions=[0.6,0.2,0.2]"),
        *("model.name=tabular_mlp", "adapter.kind=input_bias", "adapter.layers=[]", "shift.kind=none"),
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["metric.nmae=f1"], r"unknown.*you mean 'metric\.name'\?"),
        (["queries=many"], r"queries=many: .*'many'"),
        (["metric.name=acuracy"], r"metric\.name='acuracy'.*MODULE:FUNCTION"),
        (["metric.name=sklearn.metrics:nothing"], r"sklearn\.metrics:nothing.*'nothing'"),
        (["queries=15"], r"15 queries are too.*give at least 16"),
        (
            ["methods=[sl_r]", "siblings.sl.iteratons=3"],
            r"siblings\.sl: there is no 'iteratons'.*'iterations'",
        ),
    ],
)
def test_bad_settings_are_refused_before_the_folder_is_taken(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    out = tmp_path / "run"
    assert re.search(message, refused("--config-file", DIGITS, "--output-dir", out, *TINY, *overrides))
    assert not out.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.layers=[nrom*]"], r"layers='nrom\*'.*you mean \['norm"),
        (["adapter.layers=[conv1]"], r"layers='conv1'.*weight and a bias"),
        (["adapter.kind=lora"], r"adapter\.kind='lora'.*nor outputs"),
        (["adapter.kind=outputs", "adapter.layers=[norm1,head]"], r"\['norm1'.*layer gives the logits"),
        (["adapter.outputs=true", "adapter.layers=[head]"], r"layer 'head'.*outputs act"),
        (
            ["adapter.outputs=true", "methods=[cma_es]", "search_queries=10"],
            r"10 queries.*13 for phi of dimension 13",
        ),
        (["adapter.dim=0"], r"adapter.dim=0: it must be at least 1"),
        (["data.name=mnist"], r"data\.name='mnist' is none of .*digits"),
        (["data.fractions=[0.5,0.6]"], r"fractions.*\(0\.5, 0\.6\)"),
        (["shift.kind=odd"], r"shift\.kind='odd'.*image or class_ratio"),
        (["shift.kind=class_ratio"], r"shift: ratio.*10 classes, got \[\]"),
        (
            ["shift.kind=class_ratio", "shift.ratio=[0.991,0.001,0.001,0.001,0.001,0.001,0.001,0.001,0.001,0.001]"],
            r"the validation.*small for class shares",
        ),
        (["data.imbalance=0.5"], r"data.*0\.5; it must be at least 1"),
        (["data.largest_class=-1"], r"data: largest_class.*least 0"),
        (["data.imbalance=3", "data.largest_class=500"], r"too small.*500 examples of the first"),
        (["shift.contrast=2"], r"shift: contrast.*\(0, 1\], got 2"),
        (["model.name=resnet999"], r"model\.name='resnet999' is neither"),
        (["model.name=resnet18", "adapter.layers=[]"], r"model\.name=resnet18.*\(1, 8, 8\)"),
        (["model.name=tabular_mlp"], r"model\.name=tabular_mlp.*\(1, 8, 8\)"),
        (["model.weights=nowhere.pt"], r"nowhere\.pt.*weights for SmallCNN"),
        (["batch_size=5"], r"batch_size.*5, too.*each of 10 classes"),
        (["device=abacus"], r"device='abacus' is not available here"),
        (
            ["metric.name=sklearn.metrics:f1_score"],
            r"made-up.*\[None, 'micro', 'macro'",
        ),
        (
            ["metric.name=sklearn.metrics:f1_score", "metric.kwargs.averag=macro"],
            r"unexpected.*'averag'.*metric\.kwargs",
        ),
        (["metric.name=sklearn.metrics:mean_squared_error"], r"must be within.*see .* metric\.bounds"),
        (["metric.name=expected_cost", "metric.costs=[[0.0,1.0],[5.0,0.0]]"], r"costs are for 2 classes, got .* of 10"),
        (["data.positive=3"], r"data\.positive='3'.*data have 10"),
    ],
)
def test_bad_settings_end_in_one_line_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.setattr(making, "train", lambda *_: pytest.fail("trained"))
    assert re.search(message, refused("--config-file", DIGITS, "--output-dir", tmp_path / "run", *TINY, *overrides))
    assert not (tmp_path / "run" / "seed-0").exists()


def test_a_surrogate_of_other_logits_is_refused_before_any_query(tmp_path: Path) -> None:
    SetLoss(1, "accuracy").save(tmp_path / "loss.safetensors")
    overrides = ["methods=[sl_r]", f"siblings.sl.begin={tmp_path / 'loss.safetensors'}"]
    message = refused("--config-file", DIGITS, "--output-dir", tmp_path / "run", *TINY, *overrides)
    assert message == "the surrogate to begin with takes 1 logits, the model has 10"
    assert not list((tmp_path / "run" / "seed-0").glob("*.json"))


def test_a_learning_rate_that_diverges_ends_in_one_line(tmp_path: Path) -> None:
    out, overrides = tmp_path / "run", ["finetune.lr=1e30"]
    message = r"gradient of task \d is not finite .* lower the lr"
    assert re.search(message, refused("--config-file", DIGITS, "--output-dir", out, *TINY, *overrides))


@pytest.mark.parametrize(
    ("positives", "overrides", "message"),
    [
        (3, [], r"the validation split.*only class 0"),
        (0, [], r"at least two classes, got 1"),
        (1, [], r"class 'yes' has a single example"),
        (30, ["data.target=anwser"], r"'anwser'.*among 3: 'answer'"),
        (30, ["data.positive=maybe"], r"data\.positive='maybe'.*'no' or 'yes'"),
        (30, ["data.root=nowhere.csv"], r"nowhere\.csv not found"),
    ],
)
def test_unusable_tables_end_in_one_line(tmp_path: Path, positives: int, overrides: list[str], message: str) -> None:
    settings = [*TINY, *table(tmp_path, positives), *overrides]
    assert re.search(message, refused("--config-file", DIGITS, "--output-dir", tmp_path / "run", *settings))


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_table_is_read_as_the_settings_say(tmp_path: Path, delimiter: str) -> None:
    settings = table(tmp_path, 20)
    (tmp_path / "table.csv").write_text((tmp_path / "table.csv").read_text().replace(",", delimiter))
    settings += ["data.drop=[weekday]"]
    usual, turned = (load_splits(config_of(*settings, *more), 0) for more in ([], ["data.positive=no"]))
    assert usual.train.x.shape == (36, 1)
    assert (usual.class_names, turned.class_names) == (("no", "yes"), ("yes", "no"))
    assert torch.equal(usual.test.y, 1 - turned.test.y)
    assert int(usual.train.y.sum()) == 12


def stray(folder: Path) -> list[str]:
    """A table of 80 rows with two cells that are no numbers, in a column of large ones."""
    ages = [1_700_000_000 + i for i in range(80)]
    rows = [
        f"{'-' if i == 29 else 'x' if i == 50 else age},{i % 7},{'yes' if (i > 39) ^ (i % 5 == 0) else 'no'}"
        for i, age in enumerate(ages)
    ]
    (folder / "stray.csv").write_text("\n".join(["age,share,answer", *rows]) + "\n")
    return [
        *("data.name=csv", f"data.root={folder / 'stray.csv'}", "data.target=answer", "data.standardise=true"),
        *("model.name=tabular_mlp", "adapter.kind=input_bias", "adapter.layers=[]", "shift.kind=none"),
        *("data.missing=median", "seeds=1", "method.start_std=2", "model.epochs=8"),
    ]


def test_how_a_table_was_read_is_said_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("--config-file", DIGITS, "--output-dir", tmp_path / "run", *TINY, *stray(tmp_path))
    content = json.loads((tmp_path / "run" / "report.json").read_text())["reading"]
    assert content["found"] == "cells parted by ',', 80 rows"
    age, share, answer = content["columns"]
    assert (age["kind"], age["bad"], age["which"]) == ("number", 2, ["'-' in row 31", "'x' in row 52"])
    assert (share["kind"], share["bad"], answer["kind"]) == ("number", 0, "class")
    assert content["filled"].startswith("missing numbers are filled in by train's median: ")
    said = "column 'age': number, 78 values, 2 without one ('-' in row 31, 'x' in row 52)"
    assert said in (tmp_path / "run" / "log.txt").read_text()
    assert (
        "| 'age' | number | 1 | 78 | 2: '-' in row 31, 'x' in row 52 |" in (tmp_path / "run" / "report.md").read_text()
    )
    assert "Columns as they were read." in (tmp_path / "run" / "report.html").read_text()
    capsys.readouterr()
    call("--config-file", DIGITS, "--output-dir", tmp_path / "dry", "--dry-run", *TINY, *stray(tmp_path))
    assert said in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "dry").exists()


def test_missing_files_end_in_one_line(tmp_path: Path) -> None:
    out = ("--output-dir", tmp_path / "run")
    assert refused("--config-file", A9A, *out, *TINY) == (
        "data.name=a9a needs data.root=PATH, the file or folder that holds it"
    )
    assert "a9a.gz not found" in refused("--config-file", A9A, *out, *TINY, f"data.root={tmp_path}")
    assert refused("--config-file", "none.yaml", *out).startswith(
        "config file none.yaml does not exist, neither here nor"
    )
    (tmp_path / "taken").write_text("")
    assert "taken" in refused("--config-file", DIGITS, "--output-dir", tmp_path / "taken", *TINY)


def test_the_process_fails_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--config-file", DIGITS, "--output-dir", tmp_path / "run", "metric.nmae=f1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: unknown key 'metric.nmae'; did you mean 'metric.name'?\n"


@pytest.mark.outcome
@pytest.mark.parametrize("balanced", [True, False])
def test_training_and_finetuning_have_their_own_balance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, balanced: bool
) -> None:
    seen: list[TensorBatches] = []
    monkeypatch.setattr(making, "train_supervised", lambda model, loss, batches, **kwargs: seen.append(batches))
    settings = [f"model.balanced={balanced}", f"balanced={not balanced}"]
    config = config_of(*settings, "data.name=breast_cancer", *MLP, "shift.kind=none")
    experiment = ClassificationExperiment(config, tmp_path, 0)
    assert len(seen) == 1
    for batches, equal in ((seen[0], balanced), (experiment.task.batches, not balanced)):
        counts = sum(torch.bincount(batches(0, task, 0)[1], minlength=2) for task in range(20))
        assert (int(counts[0]) == int(counts[1])) is equal  # of 357 and 212 examples


@pytest.mark.parametrize("name", ["small_cnn", "resnet18"])
def test_building_a_model_leaves_it_untouched(name: str) -> None:
    model: Any = build_model(name, torch.Size((3, 32, 32)), 4)
    assert model.training
    norms: list[Any] = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(int(norm.num_batches_tracked) == 0 and not norm.running_mean.any() for norm in norms)
    make: Callable[[Tensor], Tensor] = model.eval()
    assert make(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


@pytest.mark.parametrize("strategy", ["search", "paper"])
def test_a_classifier_under_each_strategy(tmp_path: Path, strategy: str, check_strategy: Any) -> None:
    call("--config-file", DIGITS, "--output-dir", tmp_path / "run", *SIZES, *METHODS[strategy], "queries=20")
    check_strategy(tmp_path / "run", strategy)
    assert len(list((tmp_path / "run").glob("seed-*/tuned.safetensors"))) == 1


def test_a_learned_optimizer_is_run_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [
        "methods=[metricopt_learned]",
        "learned.evals=2",
        "learned.tasks=2",
    ]
    folder = tmp_path / "out"
    call("--config-file", DIGITS, "--output-dir", folder, *TINY, *more)
    assert "MetricOpt, learned" in capsys.readouterr().out
    content = json.loads((folder / "report.json").read_text())["methods"]["metricopt_learned"]
    # 16 queries: three meta-iterations of two tasks with two observations, one at meta-testing, three ends
    assert content["queries_total"] == 16
    assert content["queries_per_start"] == 4
    assert (folder / "seed-0" / "metricopt_learned" / "update_rule.safetensors").is_file()


ALA = [
    *("methods=[ala]", "siblings.trains=scratch", "siblings.ala.iterations=6"),
    *("siblings.ala.action_steps=3", "siblings.ala.reward_evals=2", "siblings.ala.children=2"),
]


@pytest.mark.slow
def test_a_loss_policy_of_ten_classes_serves_two_without_queries(tmp_path: Path) -> None:
    tool.run(config_of(*ALA), tmp_path / "ten", resume=False)
    content = json.loads((tmp_path / "ten" / "report.json").read_text())["methods"]["ala"]
    assert (content["queries_total"], content["batch_queries"]) == (2 * (1 + 2 * 2), 0)
    policy = tmp_path / "ten" / "seed-0" / "ala.safetensors"
    transferred = ["siblings.ala.children=1", "siblings.ala.learn=false", f"siblings.ala.begin={policy}"]
    two = ["data.name=breast_cancer", "data.standardise=true", *MLP, "shift.kind=none", "siblings.threshold_evals=0"]
    tool.run(config_of(*two, *ALA, *transferred), tmp_path / "two", resume=False)
    content = json.loads((tmp_path / "two" / "report.json").read_text())["methods"]["ala"]
    assert (content["queries_total"], content["batch_queries"]) == (0, 0)
    before, after = (load_loss_policy(path) for path in (policy, tmp_path / "two" / "seed-0" / "ala.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_the_committed_settings_of_ala_fit_their_descriptions() -> None:
    folder, queries = ROOT / "benchmarks" / "configs" / "siblings", {"digits": 6010, "cifar10": 122}
    for name, total in queries.items():
        config = load_config(ClassificationConfig, folder / f"ala_{name}.yaml", ["data.root=FOLDER"])
        config.check()
        ala = config.siblings.build("ala")
        assert isinstance(ala, AdaptiveLossAlignment)
        assert ala.children * (1 + ala.iterations // ala.action_steps * ala.reward_evals) == total
        assert (config.methods, config.seeds, ala.fresh_children) == (["ala"], 5, True)


def test_methods_that_train_embedders_are_not_for_classifiers() -> None:
    assert_refused(lambda: config_of("methods=[ala_focal]").check(), ConfigError, "ala_focal", "reloss_only")
