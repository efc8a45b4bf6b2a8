"""A search with a trainer class of Detectron2: its loss, data and evaluator, what it writes, and what it refuses."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.data import DatasetMapper, build_detection_train_loader
from detectron2.engine import DefaultTrainer
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import build_model

import metricopt_ext as mo
from helpers.refusals import assert_refused
from metricopt_ext.detection.detectron2.build import with_film
from metricopt_ext.detection.detectron2.datasets import records_of, register
from metricopt_ext.detection.detectron2.hooks import LOGGER
from metricopt_ext.detection.detectron2.search import LoaderBatches, search, training_loss
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from metricopt_ext.detection.detectron2.weights import load_weights
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import ConfigError, FileFormatError

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


def test_a_search_goes_on_under_its_own_settings_alone(to_search: Callable[..., Any]) -> None:
    cfg = to_search()
    search(cfg, trainer_class=Theirs)
    asked = Known.evaluated
    assert_refused(lambda: search(cfg, trainer_class=Theirs), FileFormatError, "--resume")
    assert_refused(lambda: search(cfg, resume=True), FileFormatError, "trainer_class")
    other = to_search("METRICOPT.METRIC.IMAGES", 3)
    refused = lambda: search(other, resume=True, trainer_class=Theirs)  # noqa: E731
    assert_refused(refused, FileFormatError, "METRICOPT.METRIC.IMAGES", "0", "3")
    search(cfg, resume=True, trainer_class=Theirs)
    assert Known.evaluated == asked


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


class Averaging(Theirs):
    @classmethod
    def build_model(cls, cfg: Any) -> Any:
        model = super().build_model(cfg)
        model.ema_state = object()
        return model


@pytest.mark.parametrize(
    ("options", "trainer_class", "error", "message"),
    [
        ([], Averaging, ConfigError, "the model's ema_state averages weights"),
        (["MODEL.WEIGHTS", ""], Theirs, ConfigError, r"a search.*detector: MODEL.WEIGHTS is ''"),
        (["METRICOPT.METRIC.SET", ""], Theirs, ConfigError, r"needs METRICOPT\.METRIC\.SET, the set"),
        (["METRICOPT.SEARCH.QUERIES", 5], Theirs, ConfigError, r"SEARCH\.QUERIES.* must be at least 7"),
        ([], DefaultTrainer, TypeError, r"trainer_class.*MetricOptTrainer"),
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
    for name, value in soup.tensors.items():
        if not value.is_floating_point():  # the first's
            continue
        assert torch.equal(value, torch.stack([each[name].double() for each in states]).mean(0).float()), name
    assert "backbone.fpn_lateral2.weight" in soup.tensors
    assert search(cfg, resume=True).after == run.after
