"""A search with a trainer class of Detectron2: its loss, data and evaluator, what it writes, and what it refuses."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.data import DatasetMapper, build_detection_train_loader
from detectron2.engine import DefaultTrainer
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import build_model

import metricopt_ext as mo
from metricopt_ext.detection.detectron2.build import with_film
from metricopt_ext.detection.detectron2.datasets import records_of, register
from metricopt_ext.detection.detectron2.hooks import LOGGER
from metricopt_ext.detection.detectron2.search import LoaderBatches, checkpoints_beside, search, training_loss
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from metricopt_ext.detection.detectron2.weights import load_weights
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import ConfigError, DataError, FileFormatError, MetricError
from metricopt_ext.search.optimizer import MetricOptStep

pytestmark = pytest.mark.detectron2

QUERIES = 14
GOAL = torch.tensor([0.8, -0.6, 0.4, -0.2])


@pytest.fixture(autouse=True)
def _squares_in_catalog(catalog: Any, squares: Callable[..., DetectionSet]) -> None:
    for seed, name in enumerate(("squares_train", "squares_val", "squares_test")):
        register(name, squares(4, seed=seed))


@pytest.fixture
def to_search(tiny_config: Any, tmp_path: Path) -> Callable[..., Any]:
    """Make the config of a search, of one detector."""

    def make(*options: Any) -> Any:
        settings = [
            *("METRICOPT.METRIC.SET", "squares_val", "METRICOPT.SEARCH.QUERIES", QUERIES),
            *("DATASETS.TRAIN", ("squares_train",), "DATASETS.TEST", (), "METRICOPT.FINETUNE.LR", 0.0),
        ]
        cfg = tiny_config("fpn", "BN", *settings, *options)
        cfg.MODEL.WEIGHTS = str(tmp_path / "detector.pth")
        if not Path(cfg.MODEL.WEIGHTS).exists():
            torch.save({"model": build_model(cfg).state_dict()}, cfg.MODEL.WEIGHTS)
        return cfg

    return make


@pytest.fixture
def logged() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    yield messages
    LOGGER.removeHandler(handler)


def ap50_at(phi: Tensor) -> float:
    return float(100 * torch.exp(-(phi.detach() - GOAL).square().sum() / 2))


class Known(DatasetEvaluator):
    """Evaluates a model that tells its phi, without looking at what it finds."""

    model: Any
    fails_after: int | None = None
    evaluated = 0

    def evaluate(self) -> dict[str, Any]:
        Known.evaluated += 1
        if Known.fails_after is not None and Known.evaluated > Known.fails_after:
            raise OSError("the evaluation server is down")
        return {"bbox": {"AP50": ap50_at(self.model.metricopt.phi)}}


class Theirs(MetricOptTrainer):
    """A user's trainer with a loss, data and an evaluator of its own."""

    seen: list[Any]

    @classmethod
    def build_model(cls, cfg: Any) -> Any:
        model = super().build_model(cfg)
        detect = model.forward

        def forward(batch: Any) -> Any:
            cls.seen += [("trained on" if model.training else "judged on", image["image_id"]) for image in batch]
            if not model.training:
                return detect(batch)
            return {"loss_phi": (model.metricopt.value() - 1).square().sum() / 2}

        model.forward, Known.model = forward, model
        return model

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Any:
        (record, *_) = records_of("squares_test")
        return build_detection_train_loader(cfg, dataset=[record], mapper=DatasetMapper(cfg, is_train=True))

    @classmethod
    def build_evaluator(cls, cfg: Any, dataset_name: str) -> DatasetEvaluator:
        cls.seen.append(("evaluator of", dataset_name))
        return Known()


@pytest.fixture(autouse=True)
def _forget() -> None:
    Theirs.seen, Known.evaluated, Known.fails_after = [], 0, None


def written(folder: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return {line["iteration"]: line[name] for line in lines if name in line}


def test_a_search_uses_the_user_s_trainer(
    to_search: Callable[..., Any], logged: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = to_search("DATASETS.TEST", ("squares_test",), "METRICOPT.METRIC.IMAGES", 2)
    run = search(cfg, trainer_class=Theirs)
    assert Known.evaluated == QUERIES + 1  # the last is of DATASETS.TEST
    assert {what for key, what in Theirs.seen if key == "trained on"} == {"2-0"}  # the first of squares_test
    assert [what for key, what in Theirs.seen if key == "evaluator of"] == [
        "squares_val_2_images_seed_0",
        "squares_test",
    ]
    assert run.metric == "squares_val/bbox/AP50"
    assert run.after == pytest.approx(ap50_at(run.ends[run.chosen]), rel=1e-6)
    assert run.after > run.before  # AP50 has a slope at phi = 0, and tells no halves
    assert run.chosen == "search"

    folder, name = Path(cfg.OUTPUT_DIR), "squares_val/bbox/AP50"
    told = written(folder, name)
    assert list(told) == list(range(1, QUERIES + 1))
    expected = [ap50_at(point) for point in run.points]
    assert list(told.values())[: len(expected)] == pytest.approx(expected)
    assert written(folder, f"{name}_after") == {QUERIES + 1: pytest.approx(run.after)}
    assert written(folder, f"{name}_before") == {QUERIES + 1: pytest.approx(run.before)}
    events = EventAccumulator(str(folder)).Reload().Scalars(name)
    assert [event.step for event in events] == list(told)
    assert [event.value for event in events] == pytest.approx(list(told.values()))
    assert logged[0] == f"{name}: {told[1]:.4f} at query 1 of {QUERIES}"
    assert logged[-1].startswith(str(run))
    # In percent everywhere, as Detectron2's evaluators have it: on the screen, in the log, in the files.
    verdict = f"{name}: {run.before:.4f} -> {run.after:.4f}"
    assert str(run).startswith(verdict)
    assert f"{name} {run.before:.4f} -> {run.after:.4f}" in capsys.readouterr().out.replace("AP50: ", "AP50 ")
    assert 1 < run.before < run.after

    plain = build_model(cfg)  # as a program without this package would load it
    load_weights(plain, str(folder / "model_merged.pth"))
    adapted = with_film(build_model(cfg), cfg.METRICOPT.FILM.LAYERS, dim=4)
    load_weights(adapted, cfg.MODEL.WEIGHTS)
    adapter = mo.Adapter(adapted)
    adapter.load(folder / "search" / "adapter.safetensors")
    assert torch.equal(adapter.phi.detach(), run.ends["search"])
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = [model.eval().backbone(x)["p3"] for model in (plain, adapted)]
        adapter.set_phi(torch.zeros(4))
        untuned = adapted.backbone(x)["p3"]
    torch.testing.assert_close(features[0], features[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(features[0], untuned, rtol=1e-2, atol=1e-2)


def test_its_f_is_followed_by_the_trainer(to_search: Callable[..., Any]) -> None:
    """Into the ball around its centre, each step by hand."""
    cfg = to_search("METRICOPT.SEARCH.QUERIES", 30)
    run = search(cfg, trainer_class=Theirs)
    file = Path(cfg.OUTPUT_DIR) / "search" / "value_function.safetensors"
    f = mo.load_value_function(file)
    assert torch.equal(f.centre, run.ends["search"])
    assert f.trusted
    cfg = to_search("METRICOPT.ENABLED", True, "METRICOPT.FINETUNE.VALUE_FUNCTION", str(file))
    cfg.METRICOPT.FINETUNE.update(STEPS=6, METRIC_STEP=0.3, TRUST=0.5, LR=0.01)
    cfg.METRICOPT.METRIC.update(SET="", EVALS=2)
    trainer = Theirs(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()
    phi, rule = torch.zeros(4), MetricOptStep(f, 0.01, 0.3, 0.3, 6, trust=0.5)
    gradients: list[Tensor] = []
    for step in range(6):
        gradients.append(phi - 1)
        phi = rule(phi, torch.stack(gradients[-3:]), step)
    torch.testing.assert_close(trainer.model.metricopt.phi.detach(), phi, rtol=1e-4, atol=1e-5)
    assert (phi - f.centre).norm() <= 0.5 * f.radius * (1 + 1e-5)
    assert f.centre.norm() > 0.5 * f.radius  # phi = 0, where it began, is outside


def test_a_killed_search_goes_on(to_search: Callable[..., Any], tmp_path: Path) -> None:
    cfg = to_search()
    whole = search(cfg, trainer_class=Theirs)
    other = to_search("OUTPUT_DIR", str(tmp_path / "killed"))
    Known.evaluated, Known.fails_after = 0, 9
    with pytest.raises(MetricError, match="the evaluation server is down"):
        search(other, trainer_class=Theirs)
    Known.fails_after = None
    with pytest.raises(FileFormatError, match=r"already holds.*--resume to continue it"):
        search(other, trainer_class=Theirs)
    with pytest.raises(FileFormatError, match=r"trainer_class.*'.*\.MetricOptTrainer'"):
        search(other, resume=True)
    moved = to_search("OUTPUT_DIR", str(tmp_path / "killed"), "METRICOPT.METRIC.IMAGES", 3)
    with pytest.raises(FileFormatError, match=r"METRICOPT\.METRIC\.IMAGES was 0, now 3"):
        search(moved, resume=True, trainer_class=Theirs)
    assert Known.evaluated == 10
    resumed = search(other, resume=True, trainer_class=Theirs)
    assert Known.evaluated == 10 + QUERIES - 9
    assert str(resumed) == str(whole)
    for name in ("adapter", "value_function"):
        files = [Path(each.OUTPUT_DIR) / "search" / f"{name}.safetensors" for each in (cfg, other)]
        first, second = (load_file(file) for file in files)
        assert all(torch.equal(first[key], second[key]) for key in first)
    name = "squares_val/bbox/AP50"
    assert written(Path(cfg.OUTPUT_DIR), name) == written(Path(other.OUTPUT_DIR), name)


def test_the_loss_of_a_step_can_be_replayed(to_search: Callable[..., Any]) -> None:
    """The detector's own loss, which samples, on batches of the loader that come again."""
    cfg = to_search("METRICOPT.ENABLED", True)
    model, batches = MetricOptTrainer.build_model(cfg), LoaderBatches(cfg, MetricOptTrainer)
    drawn = {place: batches(0, *place) for place in ((0, 0), (1, 0), (2, 0), (0, 1), (0, 0))}
    ids = {place: [image["image_id"] for image in batch] for place, batch in drawn.items()}
    again = {place: batches(0, *place) for place in ((2, 0), (0, 0), (1, 0))}
    for place, batch in again.items():
        assert [image["image_id"] for image in batch] == ids[place]
        assert all(torch.equal(a["image"], b["image"]) for a, b in zip(batch, drawn[place], strict=True))
    assert ids[0, 1] == ids[1, 0]
    assert sorted(ids[0, 0] + ids[1, 0]) == sorted(record["image_id"] for record in records_of("squares_train"))

    model.train()
    state = torch.get_rng_state()
    first, second = (training_loss(model, drawn[0, 0]) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    (slope,) = torch.autograd.grad(first, model.metricopt.phi)
    assert slope.norm() > 0
    model.eval()
    assert training_loss(model, drawn[0, 0]) == first.detach()
    assert not model.training


class WithoutMetric(MetricOptTrainer):
    @classmethod
    def build_metric(cls, cfg: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("options", "trainer_class", "error", "message"),
    [
        (["MODEL.WEIGHTS", ""], Theirs, ConfigError, r"a search.*detector: MODEL.WEIGHTS is ''"),
        (["METRICOPT.METRIC.SET", ""], Theirs, ConfigError, r"needs METRICOPT\.METRIC\.SET, the set"),
        (["METRICOPT.SEARCH.QUERIES", 5], Theirs, ConfigError, r"SEARCH\.QUERIES.* must be at least 7"),
        (["METRICOPT.SEARCH.QUERIES", 0], Theirs, ConfigError, r"METRICOPT\.SEARCH\.QUERIES.*least"),
        ([], DefaultTrainer, TypeError, r"trainer_class.*MetricOptTrainer"),
        ([], WithoutMetric, TypeError, r"WithoutMetric.build_metric.*metric"),
    ],
)
def test_what_a_search_refuses(
    options: list[Any], trainer_class: Any, error: type[Exception], message: str, to_search: Callable[..., Any]
) -> None:
    cfg = to_search()
    cfg.merge_from_list(options)
    with pytest.raises(error, match=message):
        search(cfg, trainer_class=trainer_class)
    assert Known.evaluated == 0


# --- Mixed precision, and averages of weights -----------------------------------------------------------------


def test_mixed_precision_of_the_training_leaves_a_search_as_it_is(
    to_search: Callable[..., Any], tmp_path: Path, logged: list[str]
) -> None:
    runs = {}
    for amp in (False, True):
        options = ["OUTPUT_DIR", str(tmp_path / f"amp_{amp}"), "METRICOPT.SEARCH.QUERIES", 7]
        cfg = to_search("SOLVER.AMP.ENABLED", amp, *options)
        logged.clear()
        runs[amp] = search(cfg, trainer_class=Theirs)
        assert sum("a search computes in float32" in line for line in logged) == amp
    assert str(runs[True]) == str(runs[False])
    assert all(map(torch.equal, runs[True].points, runs[False].points))
    files = [tmp_path / f"amp_{amp}" / "search" / "value_function.safetensors" for amp in (False, True)]
    first, second = map(load_file, files)
    assert all(torch.equal(first[key], second[key]) for key in first)


class Averaging(Theirs):
    @classmethod
    def build_model(cls, cfg: Any) -> Any:
        model = super().build_model(cfg)
        model.ema_state = object()
        return model


def test_the_average_that_is_named_is_searched_from(to_search: Callable[..., Any], tmp_path: Path) -> None:
    cfg = to_search()
    content = torch.load(cfg.MODEL.WEIGHTS)
    ema = {name: 1.5 * each if each.is_floating_point() else each for name, each in content["model"].items()}
    torch.save({**content, "ema_state": ema}, cfg.MODEL.WEIGHTS)
    with pytest.raises(ConfigError, match="the model's ema_state averages weights"):
        search(to_search("OUTPUT_DIR", str(tmp_path / "averaging")), trainer_class=Averaging)
    with pytest.raises(DataError, match=r"\?entry=ema_state or \?entry=model"):
        search(cfg, trainer_class=Theirs)
    cfg.MODEL.WEIGHTS += "?entry=ema_state"
    with pytest.raises(ConfigError, match=r"METRICOPT\.SOUP is 2.*set it to 0"):
        checkpoints_beside(cfg.MODEL.WEIGHTS, 2)
    search(cfg, trainer_class=Theirs)
    cfg.MODEL.WEIGHTS = cfg.MODEL.WEIGHTS.replace("ema_state", "model")
    with pytest.raises(FileFormatError, match="holds another run"):  # the other weights of the file are another start
        search(cfg, True, trainer_class=Theirs)
    merged = torch.load(Path(cfg.OUTPUT_DIR) / "model_merged.pth")["model"]
    assert torch.equal(merged["backbone.fpn_lateral2.weight"], ema["backbone.fpn_lateral2.weight"])


# --- A start from the detector's own training ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_keeps_its_last_checkpoints_and_a_search_begins_from_their_average(
    to_search: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "trained"
    training = to_search("METRICOPT.SOUP", 2, "SOLVER.MAX_ITER", 8, "OUTPUT_DIR", str(folder))
    trainer = MetricOptTrainer(training)
    trainer.resume_or_load(resume=False)
    trainer.train()
    kept = ["model_0000005.pth", "model_0000007.pth"]
    assert sorted(path.name for path in folder.glob("model_*.pth")) == [*kept, "model_final.pth"]

    cfg = to_search("METRICOPT.SOUP", 2)
    cfg.MODEL.WEIGHTS = str(folder / "model_final.pth")
    run = search(cfg)
    assert list(run.starts) == ["start", "uniform_soup"]
    states = [torch.load(folder / name, weights_only=True)["model"] for name in kept]
    soup = next(start for name, start in run.candidates.items() if name == "uniform_soup")
    for name, value in soup.parameters.items():
        assert torch.equal(value, torch.stack([each[name].double() for each in states]).mean(0).float()), name
    assert "backbone.fpn_lateral2.weight" in soup.parameters
    assert search(cfg, resume=True).after == run.after


def test_a_search_without_such_checkpoints_says_what_to_do(to_search: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"METRICOPT\.SOUP.* or set that to 0"):
        search(to_search("METRICOPT.SOUP", 3))
    with pytest.raises(ConfigError, match=r"METRICOPT\.SOUP.*2 checkpoints, or 0"):
        search(to_search("METRICOPT.SOUP", 1))
