"""The classification tool end to end on tiny runs, and the parts it builds from a config."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import sklearn.metrics
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers import own, programs
from helpers.pictures import check_figures, coloured
from helpers.refusals import assert_refused, assert_warned, having
from metricopt_ext.adapters.attach import load_adapter
from metricopt_ext.classification.classifier import classifier
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.metrics import METRICS
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.halves import stratified_halves
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import DataError
from metricopt_ext.siblings.ala.loss_policy import load_loss_policy
from metricopt_ext.siblings.reloss.relational_loss import load_relational_loss
from metricopt_ext.siblings.sl.set_loss import load_set_loss
from metricopt_ext.tools import finetune_classifier as tool
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint
from metricopt_ext.value.loading import load_value_function
from testers.tool import SMALL, FinetuneTester, report_of, whole

call, refused = partial(programs.call, tool), partial(programs.refused, tool)


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "finetune_classifier.py"
DIGITS, A9A_SHIFTED = (ROOT / "configs" / "classification" / f"{name}.yaml" for name in ("digits", "a9a_shifted"))
# One round of four tasks with two observations, three queries to choose and three for the guard.
SIZES = [
    *("finetune.steps=3", "queries=16"),
    *("model.epochs=1", "adapter.dim=3", "population=4", "best_evals=2", "workers=1"),
    *("seeds=1", "device=cpu"),
]
RECIPE = [
    *("method.name=recipe", "method.evals=2", "method.rounds=1", "method.folds=2", "method.trials=0"),
]
TINY = [*RECIPE, *SIZES]
MLP = ["model.name=tabular_mlp", "adapter.kind=input_bias", "adapter.layers=[]"]


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


class TestClassifier(FinetuneTester):
    program = tool
    config: ClassVar = {
        "data": {"name": "helpers.own:digits", "folder": own.FOLDER},
        "model": {"name": "helpers.own:net", "folder": own.FOLDER, "epochs": 20, "lr": 0.02},
        "adapter": {"dim": 4, "outputs": True},
        "methods": ["loss_finetune_best", "class_offsets"],
        "metric": {"name": "accuracy"},
        **SMALL,
    }
    counted = "accuracy"
    beside = "macro_f1"
    refused = (
        (["metric.name=sklearn.metrics:nothing"], ["sklearn.metrics:nothing"]),
        (["methods=[sl_r]", "siblings.sl.iteratons=3"], ["siblings.sl", "iteratons", "iterations"]),
        (["method.name=recipe", "queries=15", "method.evals=3"], ["15", "queries"]),
    )
    refused_by_data = (
        (["adapter.layers=[9]"], ["9"]),
        (["methods=[cma_es]", "search_queries=10"], ["10", "cma_es", "adapter.dim=4"]),
        ({"data": {"name": "mnist"}}, ["mnist", "digits"]),
        ({"data": {"name": "a9a"}}, ["data.root=PATH"]),
        ({"model": {"name": "resnet18"}}, ["model.name=resnet18"]),
        ({"model": {"name": "small_cnn", "weights": "nowhere.pt"}}, ["nowhere.pt"]),
        ({"model": {"name": "small_cnn", "kwargs": {"width": 5}}}, ["model.kwargs.width"]),
        (["batch_size=5"], ["batch_size", "5", "10"]),
        (["device=abacus"], ["device=", "abacus"]),
        (["metric.name=sklearn.metrics:f1_score"], ["'macro'"]),
        (["metric.name=sklearn.metrics:mean_squared_error"], ["metric.bounds"]),
        (["metric.name=expected_cost", "metric.costs=[[0.0,1.0],[5.0,0.0]]"], ["2", "10"]),
        ({"data": {"name": "digits"}, "shift": {"kind": "class_ratio", "ratio": [0.5, 0.5]}}, ["shift", "10"]),
    )

    def judge(self, state: Any, folder: Path) -> float:
        x, y = own.digits()["test"]
        net = own.net(10, (1, 8, 8)).eval()
        net.load_state_dict(state)
        return float(sklearn.metrics.accuracy_score(y, net(x).argmax(1)))


def test_rows_that_were_asked_for_are_counted_too(tmp_path: Path) -> None:
    more = ("methods=[loss_finetune_best,class_offsets,cma_es]", "search_queries=18", "starts=[]", "pictures=[curves]")
    words = TestClassifier.counted_words(tmp_path / "run", *more)
    with own.counting() as asked:
        call(*words)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    (told,) = content["evaluations"]
    assert whole(asked) == sorted(told.values())
    assert told["test"] == len(content["methods"])
    named = {name: each["queries_total"] for name, each in content["methods"].items() if each["queries_total"]}
    assert named == {"metricopt": 20, "loss_finetune_best": 3, "class_offsets": 20, "cma_es": 18}
    judged, curves, start = 3, 2 * (4 + 1), 1  # cma_es began where MetricOpt had, whose query it counts too
    assert told["validation"] == sum(named.values()) - start + judged + curves


@pytest.mark.parametrize(
    "share", [pytest.param(0.55, marks=pytest.mark.slow), 0.8, pytest.param(0.97, marks=pytest.mark.slow)]
)
def test_stopped_in_another_method_no_query_is_asked_again_and_what_is_tuned_is_there(
    share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor any of those by which ends are judged, on validation and on test; before and after were printed first."""
    more = ("methods=[loss_finetune_best,class_offsets,guided_es,cma_es]", "search_queries=18", "starts=[]")
    runs = {name: TestClassifier.counted_words(tmp_path / name, *more) for name in ("whole", "stopped")}
    with own.counting() as asked:
        call(*runs["whole"])
        once = list(asked)
    capsys.readouterr()
    with own.counting(round(share * len(once))) as asked, pytest.raises(SystemExit):
        call(*runs["stopped"])
    first = list(asked)
    assert re.search(r"accuracy [.\d]+ -> [.\d]+", capsys.readouterr().out)
    assert (tmp_path / "stopped" / "seed-0" / "tuned.safetensors").exists()
    with own.counting() as asked:
        call(*runs["stopped"], "--resume")
    assert sum(whole(first + asked)) <= sum(whole(once)) + 1
    both = [report_of(tmp_path / name) for name in runs]
    for report in both:
        for method in report["methods"].values():
            del method["seconds"]
    assert both[0]["methods"] == both[1]["methods"]
    assert both[0]["evaluations"] == both[1]["evaluations"]


def test_a_finished_run_goes_on_with_more_queries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To where a run of so many ends; what is paid besides is the first end."""
    more = ("methods=[guided_es]", "starts=[]", "search_queries=18")
    runs = {name: TestClassifier.counted_words(tmp_path / name, *more) for name in ("grown", "whole")}
    with own.counting() as asked:
        call(*runs["grown"], "queries=24")
        first, asked[:] = list(asked), []
        call(*runs["grown"], "queries=36", "--resume")
        second, asked[:] = list(asked), []
        call(*runs["whole"], "queries=36")
        whole_run = list(asked)
    assert "it goes on from 24 queries, whose end is a query besides" in capsys.readouterr().out
    assert len(first) + len(second) > len(whole_run) > len(second)
    grown, fresh = (report_of(tmp_path / name) for name in runs)
    assert fresh["methods"]["metricopt"]["queries_total"] == 36
    assert grown["methods"]["metricopt"]["queries_total"] == 37
    for name in ("pretrained", "metricopt", "guided_es"):
        for part in ("validation", "test"):
            assert grown["methods"][name][part] == fresh["methods"][name][part]
    with pytest.raises(SystemExit, match=r"queries.*24"):
        call(*runs["grown"], "queries=24", "--resume")


SL = [
    "siblings.sl.iterations=4",
    "siblings.sl.universal.steps=6",
    "siblings.sl.evals=2",
    "siblings.sl.model_lr=0.01",
]


@pytest.mark.parametrize("trains", ["phi", "scratch"])
def test_sibling_methods_on_request(trains: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["data.name=breast_cancer", "data.standardise=true", *MLP, "shift.kind=none", "metric.name=mcr"]
    siblings = ["methods=[sl_u,sl_r]", f"siblings.trains={trains}", "siblings.threshold_evals=7", *SL]
    tool.run(config_of(*settings, *siblings), tmp_path / "run", resume=False)
    assert capsys.readouterr().out.count("begins anew") == 2
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
    check_figures([tmp_path / "run" / "siblings.png"])
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


@pytest.mark.slow
def test_constraints_are_respected_and_what_a_gain_costs_is_shown(tmp_path: Path) -> None:
    """From a YAML file; what is written agrees with the kept model's own outputs, and a run that is resumed with it."""
    own = '{also: [mcc], subject_to: {"recall[3]": ">= start", macro_f1: ">= start - 0.02"}, '
    config, text = tmp_path / "digits.yaml", DIGITS.read_text()
    assert text.count("metric: {") == 1
    config.write_text(text.replace("metric: {", f"metric: {own}"))
    settings = [*SIZES, "queries=24", "adapter.dim=8", "starts=[]"]
    call("--config-file", config, "--output-dir", tmp_path / "run", *settings)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    assert list(content["also"]) == ["recall[3]", "macro_f1", "mcc"]
    (holding,) = content["holding"]
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
    lines = map(json.loads, (tmp_path / "run" / "seed-0" / "log.jsonl").read_text().splitlines())
    told = [each for each in lines if "value" in each]
    assert len(told) == 24
    assert all(set(each["outcomes"]) == {"recall[3]", "macro_f1"} for each in told)
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
    assert re.fullmatch(r"error: [^\n]*\n", done.stderr)  # and no traceback
    assert f"metric.folder={tmp_path}" in done.stderr
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


def test_a9a_under_another_class_ratio_and_cost(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    small = small_a9a(tmp_path / "data")
    call("--config-file", A9A_SHIFTED, "--output-dir", tmp_path / "run", *TINY, *small, "methods=[threshold]")
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

    config.model.name = hugging_face(tmp_path / "turned", list(reversed(pixels.class_names)))
    assert_refused(lambda: classifier(config, splits, 0, tmp_path / "other"), DataError)
    config.model.name = hugging_face(tmp_path / "others", ["x", "y", "z"])
    assert_warned(lambda: classifier(config, splits, 0, tmp_path / "other"), "names")


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


def test_how_a_table_was_read_is_in_the_report(tmp_path: Path) -> None:
    call("--config-file", DIGITS, "--output-dir", tmp_path / "run", *TINY, *stray(tmp_path))
    content = json.loads((tmp_path / "run" / "report.json").read_text())["reading"]
    age, share, answer = content["columns"]
    assert (age["kind"], age["bad"], age["which"]) == ("number", 2, ["'-' in row 31", "'x' in row 52"])
    assert (share["kind"], share["bad"], answer["kind"]) == ("number", 0, "class")


@pytest.mark.parametrize("name", ["small_cnn", "resnet18"])
def test_building_a_model_leaves_it_untouched(name: str) -> None:
    model: Any = build_model(name, torch.Size((3, 32, 32)), 4)
    assert model.training
    norms: list[Any] = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(int(norm.num_batches_tracked) == 0 and not norm.running_mean.any() for norm in norms)
    make: Callable[[Tensor], Tensor] = model.eval()
    assert make(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


@pytest.mark.parametrize("strategy", [["method.name=paper", "method.evals=2"], RECIPE], ids=["paper", "recipe"])
def test_the_paper_s_strategies_are_run_on_request(tmp_path: Path, strategy: list[str]) -> None:
    folder = tmp_path / "run"
    call("--config-file", DIGITS, "--output-dir", folder, *SIZES, *strategy, "queries=20")
    content = json.loads((folder / "report.json").read_text())
    assert content["methods"]["metricopt"]["queries_total"] <= 20
    assert load_value_function(folder / "seed-0" / "value_function.safetensors").kind == "neural"
    (kept,) = content["kept"]
    before, after = (content["methods"][name]["validation"][0] for name in ("pretrained", "metricopt"))
    assert after > before if kept != "start" else after == before


def test_a_learned_optimizer_is_run_on_request(tmp_path: Path) -> None:
    more = ["methods=[metricopt_learned]", "learned.evals=2", "learned.tasks=2"]
    folder = tmp_path / "out"
    call("--config-file", DIGITS, "--output-dir", folder, *TINY, *more)
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
