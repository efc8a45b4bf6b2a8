"""The retrieval tool end to end on tiny runs, and the parts it builds from a config."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers import own, programs
from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import load_adapter
from metricopt_ext.data.halves import class_draws, class_halves
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.retrieval import build
from metricopt_ext.retrieval.build import class_batches, embedder
from metricopt_ext.retrieval.config import LossConfig, MetricConfig, RetrievalConfig
from metricopt_ext.retrieval.models import Conv4, Embedder, build_model
from metricopt_ext.retrieval.named_loss import build_loss
from metricopt_ext.retrieval.named_metric import build_metric
from metricopt_ext.retrieval.splits import load_splits
from metricopt_ext.siblings.ala.loss_policy import load_loss_policy
from metricopt_ext.tasks.inference_file import load_inference
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tools import finetune_retrieval as tool
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint
from testers.tool import SMALL, FinetuneTester

call, refused = partial(programs.call, tool), partial(programs.refused, tool)

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "retrieval"
DIGITS, OMNIGLOT = CONFIGS / "digits.yaml", CONFIGS / "omniglot.yaml"

# One round of four tasks with two observations, three queries to choose and five for the guard.
SIZES = [
    *("finetune.steps=3", "queries=16"),
    *("model.epochs=1", "model.width=4", "model.embedding=6", "adapter.dim=3", "best_evals=2"),
    *("workers=1", "seeds=1", "device=cpu"),
]
RECIPE = [
    *("methods=[]", "method.name=recipe", "method.evals=2", "method.rounds=1", "method.folds=2", "method.trials=0"),
]
TINY = [*RECIPE, *SIZES]


def config_of(*overrides: str, file: Path = DIGITS) -> RetrievalConfig:
    return load_config(RetrievalConfig, file, [*TINY, *overrides])


def naive_recall(embeddings: Tensor, labels: Tensor, k: int) -> float:
    return own.naive_recall(embeddings.double().numpy(), labels.numpy(), k)


def kept_embeddings(config: RetrievalConfig, folder: Path, seed: int, tuned: bool) -> tuple[Tensor, Tensor]:
    """Return embeddings and labels of the test images by the model that a run left, bare or with its adapter."""
    splits = load_splits(config, seed)
    model = build_model(config.model.name, splits.test.x.shape[1:], config.model.embedding, config.model.width).eval()
    load_checkpoint(model, folder / f"seed-{seed}" / "model.safetensors")
    if tuned:
        load_adapter(model, folder / f"seed-{seed}" / "adapter.safetensors")
    with torch.no_grad():
        return model(splits.test.x), splits.test.y


class TestRetrieval(FinetuneTester):
    program = tool
    config: ClassVar = {
        "data": {"name": "helpers.own:digits_of_other_classes", "folder": own.FOLDER},
        "model": {"name": "helpers.own:net", "folder": own.FOLDER, "epochs": 5, "embedding": 6},
        "adapter": {"dim": 4},
        "loss": {"name": "fast_ap", "classes": 3, "samples": 4},
        "metric": {"ks": [1, 2]},
        "methods": ["loss_finetune_best"],
        **SMALL,
    }
    counted = "recall"
    beside = "mean_reciprocal_rank"
    refused = (
        (["loss.name=fastap"], ["loss.name=", "fastap"]),
        (["loss.params={margn: 1}"], ["loss", "fast_ap", "margn"]),
        (["loss.name=proxy_anchor", "loss.params={num_classes: 3, embedding_size: 6}"], ["tune_with_trainer"]),
        (["loss.samples=1"], ["loss.samples=1", "2"]),
        (
            {"data": {"name": "digits", "test_classes": ["7", "8"], "last_test": True}},
            ["data.last_test"],
        ),
        (["methods=[sl_r]"], ["sl_r", "ala_focal"]),
        (["methods=[settings]", "settings.names=[whitenning]"], ["whitenning", "whitening"]),
        (["methods=[settings]", "method.name=paper"], ["method.name=paper", "method.name=search"]),
    )
    refused_by_data = (
        ({"data": {"name": "cub"}}, ["cub", "stanford_online_products"]),
        ({"data": {"name": "omniglot"}}, ["data.root=PATH"]),
        ({"data": {"name": "digits", "fractions": [0.8, 0.1, 0.1]}}, ["10"]),
        (["shift.kind=odd"], ["shift.kind=", "odd", "image"]),
        (["adapter.layers=[nrom*]"], ["nrom"]),
        ({"model": {"name": "conv5"}}, ["conv5", "conv4"]),
        ({"model": {"name": "conv4", "weights": "nowhere.pt"}}, ["nowhere.pt"]),
        (["device=abacus"], ["abacus"]),
    )

    def judge(self, state: Any, folder: Path) -> float:
        images, labels = own.digits_of_other_classes()["test"]
        net = own.net(6, (1, 8, 8)).eval()
        net.load_state_dict({name.removeprefix("trunk."): value for name, value in state.items()})
        embeddings = nn.functional.normalize(net(images))
        return float(np.mean([naive_recall(embeddings, labels, k) for k in (1, 2)]))


# --- What else it takes ----------------------------------------------------------------------------------------


def omniglot(folder: Path, *, characters: int = 4, drawings: int = 4) -> Path:
    """Write drawings as Omniglot has them; each character has strokes of its own."""
    rng = np.random.default_rng(0)
    for alphabet in ("Greek", "Latin"):
        for c in range(characters):
            strokes = rng.random((7, 7)) < 0.4
            for i in range(drawings):
                pixels = np.kron(strokes ^ (rng.random((7, 7)) < 0.05), np.ones((15, 15), dtype=bool))
                path = folder / alphabet / f"character{c:02d}" / f"{c:04d}_{i:02d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.where(pixels, 0, 255).astype(np.uint8)).convert("1").save(path)
    return folder


def test_omniglot_with_other_methods_and_another_loss(tmp_path: Path) -> None:
    overrides = [
        *("loss.name=triplet_margin", "loss.params={margin: 0.2}", "loss.classes=2", "loss.samples=2"),
        *("data.fractions=[0.25,0.5,0.25]", "metric.ks=[1]", "search_queries=15", "methods=[guided_es,cma_es]"),
        f"data.root={omniglot(tmp_path / 'set')}",
    ]
    call("--config-file", OMNIGLOT, "--output-dir", tmp_path / "run", *TINY, *overrides)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    assert content["metric"]["name"] == "Recall@1"
    spent = {name: method["queries_total"] for name, method in content["methods"].items()}
    assert spent["guided_es"] == spent["cma_es"] == 15
    config = config_of(*overrides, file=OMNIGLOT)
    for name, tuned in (("pretrained", False), ("metricopt", True)):
        embeddings, labels = kept_embeddings(config, tmp_path / "run", 0, tuned)
        assert embeddings.shape == (8, 6)
        assert content["methods"][name]["test"] == [pytest.approx(naive_recall(embeddings, labels, 1))]


def test_class_folders_with_a_fixed_test_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for label in range(10):
        colour = rng.integers(0, 60, 3)  # so close to the others' that Recall@k depends on phi
        for i in range(4):
            path = tmp_path / "set" / f"{label:03d}.bird" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((colour + rng.integers(0, 196, (12, 10, 3))).astype(np.uint8)).save(path)
    overrides = [
        *("model.name=conv4", "adapter.layers=[]", "data.image_size=12", "loss.samples=2"),
        *("data.last_test=true", "data.fractions=[0.3,0.4,0.3]", "loss.classes=3"),
        f"data.root={tmp_path / 'set'}",
    ]
    call("--config-file", CONFIGS / "class_folders.yaml", "--output-dir", tmp_path / "run", *TINY, *overrides)
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    assert content["config"]["model"]["augment"]
    config = config_of(*overrides, file=CONFIGS / "class_folders.yaml")
    splits = load_splits(config, 0)
    assert [splits.class_names[label] for label in splits.test.y.unique()] == ["007.bird", "008.bird", "009.bird"]
    assert splits.train.x.dtype == torch.uint8
    embeddings, labels = kept_embeddings(config, tmp_path / "run", 0, tuned=True)
    expected = np.mean([naive_recall(embeddings, labels, k) for k in (1, 2, 4)])
    assert content["methods"]["metricopt"]["test"] == [pytest.approx(expected)]


# --- The parts -------------------------------------------------------------------------------------------------


def test_the_metric_and_its_halves_against_the_definition() -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(6).repeat_interleave(5)[torch.randperm(30, generator=rng)]
    part = Split(torch.randn(30, 7, generator=rng), y)
    halves = class_halves(y, seed=1)
    model = nn.Linear(7, 4)
    answer = build_metric(MetricConfig(ks=[1, 3]), part, halves).evaluate(model, "test")
    with torch.no_grad():
        embeddings = model(part.x)

    def cost(rows: Tensor) -> float:
        return -float(np.mean([naive_recall(embeddings[rows], y[rows], k) for k in (1, 3)]))

    assert answer.cost == pytest.approx(cost(torch.arange(30)))
    assert answer.halves == (pytest.approx(cost(halves[0])), pytest.approx(cost(halves[1])))
    assert build_metric(MetricConfig(ks=[1, 3]), part).evaluate(model, "test") == answer._replace(pairs=())
    draws = class_draws(y, seed=1)
    found = build_metric(MetricConfig(ks=[1, 3]), part, draws, new_classes=True).evaluate(model, "test")
    assert (found.cost, found.halves) == (answer.cost, answer.halves)
    for costs, pair in zip(found.costs_on_pairs, draws, strict=True):
        assert costs == (pytest.approx(cost(pair[0])), pytest.approx(cost(pair[1])))  # type: ignore[arg-type]


LOSSES = ["fast_ap", "margin"]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *((name, "{}") for name in LOSSES),
        ("retrieval_losses:SmoothAPLoss", "{}"),
        ("retrieval_losses:RecallLoss", "{lambda_val: 50}"),  # enough to change ranks
    ],
)
def test_losses_by_name_reach_phi(name: str, params: str) -> None:
    folder = [f"loss.folder={ROOT / 'benchmarks'}"] if ":" in name else []
    config = config_of(f"loss.name={name}", f"loss.params={params}", *folder)
    splits = load_splits(config, 0)
    torch.manual_seed(0)
    model = build_model("conv4", splits.train.x.shape[1:], 6, 4).double()  # in which no two similarities tie
    batches = class_batches(splits.train, config.loss)

    def double_batches(*address: int) -> tuple[Tensor, Tensor]:
        x, y = batches(*address)
        return x.double(), y

    task = FinetuneTask(
        build.attach(model.eval(), config, 0),
        loss=build_loss(config.loss),
        batches=double_batches,
        metric=build_metric(config.metric, splits.validation),
        population=1,
    )
    phi = task.starts(3.0, 0, range(3))
    loss, gradient = task.loss_and_gradient(phi, 0, range(3), 0)
    assert loss.shape == (3,)
    assert gradient.isfinite().all()
    assert gradient.any()
    task = replace(task, population=3)
    together = task.loss_and_gradient(phi, 0, range(3), 0)
    torch.testing.assert_close(together, (loss, gradient), rtol=1e-9, atol=1e-12)


def test_a_part_of_few_classes_gets_smaller_batches() -> None:
    part = Split(torch.zeros(7, 1, 2, 2), torch.tensor([0, 0, 1, 1, 2, 2, 3]))
    assert class_batches(part, LossConfig(classes=16, samples=2)).classes == 3
    assert_refused(
        lambda: class_batches(Split(part.x[:4], torch.tensor([0, 0, 1, 2])), LossConfig()), DataError, "2", "1"
    )


@pytest.mark.parametrize("side", [4, 33])
def test_embeddings_lie_on_the_unit_sphere(side: int) -> None:
    model = Embedder(Conv4(3, side, 5, width=4)).eval()
    pixels = torch.randint(256, (2, 3, side, side), dtype=torch.uint8)
    embeddings = model(pixels)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(model(pixels.float() / 255), embeddings)


def test_trunks_of_other_libraries_and_of_ones_own(tmp_path: Path) -> None:
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    shape, x = torch.Size((3, 32, 32)), torch.rand(2, 3, 32, 32)
    model = build_model("timm/test_vit", shape, 5, kwargs={"img_size": 32}).eval()
    own = timm.create_model("test_vit", img_size=32, num_classes=5).eval()
    own.load_state_dict(model.trunk.state_dict())
    assert own.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), nn.functional.normalize(own((x - 0.5) / 0.5)))

    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])
    transformers.ResNetModel(config).save_pretrained(tmp_path / "hf")
    splits = Splits(*(Split(x, torch.arange(2)) for _ in range(3)), ("a", "b"))
    settings = ["data.name=digits", f"model.name={tmp_path / 'hf'}", "model.embedding=8", "adapter.dim=2"]
    loaded = embedder(load_config(RetrievalConfig, None, settings), splits, 0, tmp_path / "run")
    trained = transformers.ResNetModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():  # without a preprocessor_config.json, pixels stay in [0, 1]
        pooled = trained(x).pooler_output.flatten(1)
        torch.testing.assert_close(loaded(x), nn.functional.normalize(pooled))

    (tmp_path / "our_trunks.py").write_text(
        "from torch import nn\n"
        "def trunk(num_classes, input_shape, width=2):\n"
        "    return nn.Sequential(nn.Conv2d(input_shape[0], width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),\n"
        "                         nn.Linear(width, num_classes))\n"
    )
    ours = build_model("our_trunks:trunk", shape, 5, folder=str(tmp_path), kwargs={"width": 3}).eval()
    sys.path.remove(str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), nn.functional.normalize(ours.trunk(x)))
    assert_refused(lambda: build_model("resnet81", shape, 5), ConfigError, "resnet81")


def test_a_torchvision_trunk_starts_from_a_classifiers_weights(tmp_path: Path) -> None:
    import torchvision

    classifier = torchvision.models.resnet18(num_classes=9)
    torch.save(classifier.state_dict(), tmp_path / "weights.pt")
    model = build_model("resnet18", torch.Size((3, 32, 32)), 5, trunk_weights=str(tmp_path / "weights.pt"))
    assert torch.equal(model.trunk.layer4[1].conv2.weight, classifier.layer4[1].conv2.weight)
    assert model.trunk.fc.weight.shape == (5, 512)
    assert model.eval()(torch.rand(2, 3, 32, 32)).shape == (2, 5)
    wrapped = {f"module.{name}": each for name, each in classifier.state_dict().items()}
    torch.save({"other": 1, "teacher": {"a": torch.ones(1)}, "student": wrapped}, tmp_path / "weights.pt")
    options: dict[str, Any] = {"trunk_weights": str(tmp_path / "weights.pt"), "entry": "student"}
    again = build_model("resnet18", torch.Size((3, 32, 32)), 5, **options)
    assert torch.equal(again.trunk.layer4[1].conv2.weight, classifier.layer4[1].conv2.weight)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    assert_refused(
        lambda: build_model("resnet18", torch.Size((3, 32, 32)), 5, trunk_weights=str(tmp_path / "weights.pt")),
        DataError,
        "weights.pt",
        "ResNet",
    )


# --- Sibling methods -------------------------------------------------------------------------------------------

ALA = [
    *("methods=[ala_mixture,ala_focal]", "siblings.ala.iterations=6", "siblings.ala.action_steps=3"),
    *("siblings.ala.reward_evals=2", "siblings.ala.children=2", "siblings.ala.optimizer=adam"),
]


@pytest.mark.slow
@pytest.mark.parametrize("trains", ["phi", "scratch"])
def test_sibling_methods_on_request(trains: str, tmp_path: Path) -> None:
    tool.run(config_of(*ALA, f"siblings.trains={trains}", "siblings.ala.model_lr=0.01"), tmp_path / "run", resume=False)
    content = json.loads((tmp_path / "run" / "report.json").read_text())["methods"]
    folder = tmp_path / "run" / "seed-0"
    before = load_file(folder / "model.safetensors")
    for name in ("ala_mixture", "ala_focal"):
        assert (content[name]["queries_total"], content[name]["batch_queries"]) == (10, 0)
        assert load_loss_policy(folder / f"{name}.safetensors").family == name.removeprefix("ala_")
        trained = load_file(folder / f"{name}_model.safetensors")
        assert ("metricopt.phi" in trained) == (trains == "phi")
        assert bool(torch.equal(before["trunk.head.weight"], trained["trunk.head.weight"])) == (trains == "phi")
        moved = (trained["trunk.head.weight"] - before["trunk.head.weight"]).abs().max()
        assert (moved > 0.07) == (trains == "scratch")  # six steps of Adam at 0.01 reach no further


@pytest.mark.slow
@pytest.mark.parametrize(("starts", "power"), [([], 0.5), (["starts=[batchnorm,lda_whitening]"], 0.75)])
def test_a_whitening_that_is_kept_is_merged_and_no_setting_then(
    starts: list[str], power: float, tmp_path: Path
) -> None:
    """The first query is the model as trained, the second whitened; the tuned model has it in its last layer alone."""
    call("--config-file", DIGITS, "--output-dir", tmp_path / "run", *SIZES, "queries=20", *starts)
    folder = tmp_path / "run" / "seed-0"
    asked = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines() if '"value"' in line]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["methods"]["pretrained"]["validation"] == [asked[0]["value"]]
    assert [each.get("settings", {}).get("whitening") for each in asked[:3]] == [None, power, power]
    assert ["replaced" in each for each in asked[:3]] == [False, False, True]
    before, after = load_file(folder / "model.safetensors"), load_file(folder / "tuned.safetensors")
    assert load_inference(folder) == {"whitening": 0.0, "covariance": "all", "augmentation": 0}
    assert "merged" in (folder / "README.md").read_text()
    assert not torch.equal(before["trunk.head.weight"], after["trunk.head.weight"])


@pytest.mark.slow
def test_settings_of_inference_are_tuned_first(tmp_path: Path) -> None:
    """What is kept is judged by them, on validation and on test."""
    more = ["methods=[settings]", "queries=40", "guard.confidence=0.5"]
    call("--config-file", DIGITS, "--output-dir", tmp_path / "run", *SIZES, *more)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    (queries,) = report["queries"]
    assert queries["settings"] == sum(queries.values()) - queries["starts"] - queries["search"] > 3
    alone = report["methods"]["settings"]  # of the model as it was trained, or of a free start
    assert alone["queries_total"] == queries["starts"] + queries["settings"]
    assert report["methods"]["metricopt"]["validation"][0] >= alone["validation"][0] - 1e-12
