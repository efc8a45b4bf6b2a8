"""A user's model on a GPU, from the adapter to the merged checkpoint. The CPU runs the same, to compare with."""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.played_gpu import PlayedGPU, can_play, register
from helpers.runs import stopped_after
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.methods.paper.recipe import Recipe, meta_train, tune_start
from metricopt_ext.methods.starts import batchnorm_line, em_prior_start, prior_line
from metricopt_ext.search.direct import CMAES
from metricopt_ext.value.value_function import NeuralValueFunction

PLAYED = "METRICOPT_PLAYED_GPU"  # in a process of its own, as `played_gpu.register` can't be undone
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
in_its_own_process = pytest.mark.skipif(
    PLAYED not in os.environ, reason="test_all_of_this_on_a_gpu_that_the_cpu_plays runs it"
)
DIM, CLASSES = 6, 4


@pytest.fixture(scope="session")
def played() -> torch.device:
    return register()


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=needs_gpu),
        pytest.param("played", marks=in_its_own_process),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device that there is; convolutions as exact on a GPU as elsewhere."""
    if request.param == "played":
        device = request.getfixturevalue("played")
        with PlayedGPU():
            yield device
        return
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield torch.device(request.param)
    torch.backends.cudnn.allow_tf32 = allowed


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, CLASSES))
    x, y = data("cpu", 200)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for part in torch.arange(200).split(20) * 6:
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return model.eval().to(device)


def data(device: Any, count: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Bars at one of four places, on noise; shifted, another contrast and light."""
    draw = torch.Generator().manual_seed(count)
    y = torch.arange(count) % CLASSES
    x = 0.7 * torch.randn(count, 1, 8, 8, generator=draw)
    for each, label in enumerate(y):
        x[each, 0, :, 2 * int(label)] += 1.5
    return (x * (1 - shift) + shift).to(device), y.to(device)


def accuracy_of(device: torch.device) -> Any:
    x, y = data(device, 160, shift=0.5)

    def accuracy(model: nn.Module) -> tuple[float, list[float]]:
        with torch.no_grad():
            right = (model(x).argmax(1) == y).float()
        return float(right.mean()), [float(right[half::2].mean()) for half in (0, 1)]

    return accuracy


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task_of(adapter: mo.Adapter, device: torch.device, **options: Any) -> mo.FinetuneTask:
    batches = mo.TensorBatches(*data(device, 120), 20)
    return mo.FinetuneTask(
        adapter, loss=loss, batches=batches, metric=mo.Metric(accuracy_of(device), maximize=True), **options
    )


ADAPTERS: dict[str, Any] = {
    "film": lambda model: mo.attach_film(model, dim=DIM),
    "film and outputs": lambda model: mo.attach_film(model, dim=DIM, outputs=mo.Outputs(temperature=True)),
    "input bias": lambda model: attach_input_bias(model, dim=DIM),
    "outputs": lambda model: mo.attach_outputs(model),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_attached_saved_loaded_and_merged_computes_as_on_the_cpu(
    kind: str, device: torch.device, tmp_path: Path
) -> None:
    adapter = ADAPTERS[kind](network(device))
    phi = 0.3 * torch.randn(adapter.phi.numel(), generator=torch.Generator().manual_seed(1))
    adapter.set_phi(phi)  # of the CPU
    x, _ = data("cpu", 40)
    there = adapter.model(x.to(device)).detach().cpu()
    adapter.set_phi(0 * phi)
    with adapter.using(phi) as model:
        torch.testing.assert_close(model(x.to(device)).detach().cpu(), there, rtol=0, atol=0)
    adapter.set_phi(phi)
    adapter.save(tmp_path / "adapter")
    again = mo.load_adapter(network(torch.device("cpu")), tmp_path / "adapter")
    assert again.phi.device.type == "cpu"
    torch.testing.assert_close(again.model(x).detach(), there, rtol=1e-4, atol=1e-4)
    back = mo.load_adapter(network(device), tmp_path / "adapter")
    assert back.phi.device.type == device.type
    torch.testing.assert_close(back.model(x.to(device)).detach().cpu(), there, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(adapter.merge()(x.to(device)).detach().cpu(), there, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_losses_and_gradients_of_a_population_are_those_of_the_cpu(kind: str, device: torch.device) -> None:
    found = {}
    for where in (torch.device("cpu"), device):
        for size in (1, 4):
            task = task_of(ADAPTERS[kind](network(where)), where, population=size)
            phi = 0.2 * torch.randn(4, task.adapter.phi.numel(), generator=torch.Generator().manual_seed(1))
            losses, gradients = task.loss_and_gradient(phi.to(where), 0, list(range(4)), 0)
            assert gradients.device.type == where.type
            found[where.type, size] = losses.cpu(), gradients.cpu()
    for values in found.values():
        for ours, theirs in zip(values, found["cpu", 1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)


def starts_of(task: mo.FinetuneTask, device: torch.device) -> dict[str, Any]:
    inputs = data(device, 160, shift=0.5)[0].split(40)
    priors = torch.tensor([0.1, 0.2, 0.3, 0.4])
    starts = {
        "batchnorm": mo.batchnorm_start(task, inputs),
        "em": em_prior_start(task, inputs, priors),
        "line": batchnorm_line(task, mo.batchnorm_start(task, inputs)),
        "prior": prior_line(task, priors),
    }
    return {name: start for name, start in starts.items() if start is not None}


@pytest.mark.parametrize("kind", ["film and outputs", "outputs"])
def test_a_search_from_all_kinds_of_starts_leaves_what_loads_anywhere(
    kind: str, device: torch.device, tmp_path: Path
) -> None:
    task = task_of(ADAPTERS[kind](network(device)), device)
    before = task.metric.function(task.adapter.model)[0]
    starts = starts_of(task, device)
    assert {"batchnorm", "em", "line"} <= set(starts)
    run = mo.optimize_metric(task, queries=24, starts=starts, output_dir=tmp_path / "run")
    assert sum(run.queries.values()) == 24
    after = accuracy_of(device)(task.adapter.model)[0]
    assert after >= before
    for where in (torch.device("cpu"), device):
        loaded = mo.load_run(network(where), tmp_path / "run")
        assert accuracy_of(where)(loaded.model)[0] == pytest.approx(after, abs=0.02)  # of 160: three near a tie
    merged = task.adapter.merge()
    assert accuracy_of(device)(merged)[0] == pytest.approx(after, abs=0.02)


def test_a_stopped_search_goes_on_as_if_it_had_not_stopped(device: torch.device, tmp_path: Path) -> None:
    def run(folder: str, resume: bool = False) -> Any:
        task = task_of(ADAPTERS["film"](network(device)), device)
        inputs = data(device, 160, shift=0.5)[0].split(40)
        start = mo.batchnorm_start(task, inputs)
        assert start is not None
        starts = {"batchnorm": start}
        return mo.optimize_metric(task, queries=20, starts=starts, output_dir=tmp_path / folder, resume=resume)

    whole = run("whole")
    stopped_after(11, lambda: run("stopped"))
    resumed = run("stopped", resume=True)
    torch.testing.assert_close(resumed.points, whole.points, rtol=1e-3, atol=1e-4)
    assert resumed.costs == pytest.approx(whole.costs)
    assert resumed.chosen == whole.chosen


def test_a_search_of_several_outcomes(device: torch.device) -> None:
    """Of each class's recall, with what its loss promises, and a limit; on files they are as on the CPU."""
    x, y = data(device, 160, shift=0.5)

    def recalls(model: nn.Module) -> Any:
        right = model(x).argmax(1) == y

        def of(rows: slice) -> dict[str, Tensor]:
            found = {str(label): right[rows][y[rows] == label].float().mean() for label in range(CLASSES)}
            return {**found, "accuracy": right[rows].float().mean()}

        return of(slice(None)), (of(slice(0, 80)), of(slice(80, None)))

    metric = mo.Metric(recalls, maximize=True, combine="worst", subject_to={"accuracy": ">= 0.1"})
    train = data(device, 120)
    examples = {str(label): [tuple(each[train[1] == label] for each in train)] for label in range(CLASSES)}
    task = mo.FinetuneTask(
        ADAPTERS["film and outputs"](network(device)),
        loss=loss,
        batches=mo.TensorBatches(*train, 20),
        batches_of=examples,
        metric=metric,
    )
    run = mo.optimize_metric(task, queries=24)
    assert sum(run.queries.values()) == 24
    assert run.after >= run.before
    assert run.after == min(value for _, value in run.made_of.values())


def test_ask_and_tell(device: torch.device) -> None:
    adapter = ADAPTERS["film and outputs"](network(device))
    accuracy = accuracy_of(device)
    search = mo.Search(task_of(adapter, device), queries=12)
    while trials := search.ask():
        for trial in trials:
            with trial.applied() as model:
                search.tell(trial.id, *accuracy(model))
    assert sum(search.result().queries.values()) == 12


@pytest.mark.parametrize("members", [1, 4])
def test_metricopt_follows_an_f_from_a_file_wherever_phi_is(members: int, device: torch.device, tmp_path: Path) -> None:
    f = NeuralValueFunction(DIM, members)
    torch.manual_seed(3)
    f.set_domain(torch.randn(50, DIM))
    f.save(tmp_path / "f.safetensors")
    ends = {}
    for where, of_f in ((torch.device("cpu"), "cpu"), (device, "cpu"), (device, device)):
        adapter = ADAPTERS["film"](network(where))
        ours = mo.MetricOpt(
            adapter.parameters(), mo.load_value_function(tmp_path / "f.safetensors").to(of_f), even_untrusted=True
        )
        x, y = data(where, 40)
        for _ in range(5):
            ours.zero_grad()
            F.cross_entropy(adapter.model(x), y).backward()
            ours.step()
        assert adapter.phi.device.type == where.type
        resumed = mo.MetricOpt(adapter.parameters(), ours.f, even_untrusted=True)
        resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
        ours.zero_grad()
        F.cross_entropy(adapter.model(x), y).backward()
        resumed.step()
        ends[where, str(of_f)] = adapter.phi.detach().cpu()
    for end in ends.values():
        torch.testing.assert_close(end, ends[torch.device("cpu"), "cpu"], rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_a_recipe_learns_an_f_that_finetunes_a_start(device: torch.device) -> None:
    task = task_of(ADAPTERS["film"](network(device)), device, population=8)
    recipe = Recipe(steps=4, rounds=1, evals=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = meta_train(task, tasks=5, recipe=recipe)
        tuned = tune_start(task, fit, recipe=recipe)
    assert tuned.path.device.type == device.type
    assert set(tuned.ends) >= {"start", "loss_finetune", "metricopt"}


def test_mixtures_and_soups(device: torch.device, tmp_path: Path) -> None:
    files = []
    for seed in range(3):
        model = network(torch.device("cpu"))
        with torch.no_grad():
            list(model.parameters())[-2].add_(
                0.1 * torch.randn(CLASSES, 32, generator=torch.Generator().manual_seed(seed))
            )
        files.append(tmp_path / f"model-{seed}.pth")
        torch.save(model.to(device).state_dict(), files[-1])
    adapter = mo.attach_mixture(network(device), files, film=DIM)
    adapter.set_phi(torch.full((adapter.phi.numel(),), 0.2))
    x, _ = data("cpu", 40)
    there = adapter.model(x.to(device)).detach().cpu()
    beside = mo.attach_mixture(network(torch.device("cpu")), files, film=DIM)
    beside.set_phi(torch.full((beside.phi.numel(),), 0.2))
    torch.testing.assert_close(beside.model(x).detach(), there, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(adapter.merge()(x.to(device)).detach().cpu(), there, rtol=1e-4, atol=1e-4)

    task = task_of(ADAPTERS["film"](network(device)), device)
    inputs = data(device, 160, shift=0.5)[0].split(40)
    starts = mo.soup_starts(task, files)
    starts["anew"] = mo.batchnorm_start(task, inputs, starts["uniform_soup"]) or starts["uniform_soup"]
    run = mo.optimize_metric(task, queries=12, starts=starts)
    assert sum(run.queries.values()) <= 12


def test_other_searches_take_the_task_as_it_is(device: torch.device) -> None:
    run = mo.optimize_metric(task_of(ADAPTERS["film"](network(device)), device), queries=14, strategy=CMAES())
    assert sum(run.queries.values()) == 14


def test_assess(device: torch.device) -> None:
    task = task_of(ADAPTERS["film and outputs"](network(device)), device)
    assert mo.assess(task, queries=12).recommendation


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
def test_recall_of_an_embedder(distance: Any, device: torch.device) -> None:
    pytest.importorskip("faiss")
    from metricopt_ext.retrieval.recall import recall_at_k, recall_metric

    x, y = data("cpu", 400, shift=0.5)
    found = {}
    for where in (torch.device("cpu"), device):
        model = network(where)
        batches = list(zip(x.to(where).split(50), y.to(where).split(50), strict=True))
        found[where.type] = recall_metric(batches, (1, 2), distance=distance).cost(model, "test")
        embedded = model(x.to(where)).detach()
        assert recall_at_k(embedded, y.to(where), (1, 2), distance=distance).at == pytest.approx(
            recall_at_k(embedded.cpu().numpy(), y.numpy(), (1, 2), distance=distance).at
        )
    assert found[device.type] == pytest.approx(found["cpu"], abs=5e-3)


def test_recall_s_order_is_float64_s(device: torch.device) -> None:
    """FAISS searches on the GPU where it can: near ties are decided by exact distances all the same."""
    pytest.importorskip("faiss")
    from metricopt_ext.retrieval.recall import recall_at_k

    rng = np.random.default_rng(0)
    x = np.repeat(rng.standard_normal((300, 16)), 4, axis=0) + 1e-6 * rng.standard_normal((1200, 16)) + 100
    x = x.astype(np.float32)
    y = rng.integers(30, size=1200)
    squares = ((x[:, None].astype(float) - x[None].astype(float)) ** 2).sum(-1)
    np.fill_diagonal(squares, np.inf)
    nearest = y[squares.argsort(1, kind="stable")]
    expected = {k: float((nearest[:, :k] == y[:, None]).any(1).mean()) for k in (1, 2, 5)}
    assert recall_at_k(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device), (1, 2, 5)).at == expected


@pytest.mark.parametrize("training", [False, True])
def test_phi_before_an_rnn_has_the_gradient_of_the_cpu(training: bool, device: torch.device) -> None:
    """cuDNN has no backward pass through an RNN in evaluation mode."""
    if device.type != "cuda":
        pytest.skip("a played GPU has no RNN")

    def gradient(device: torch.device) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(6), nn.LSTM(6, 5, num_layers=2, dropout=0.5, batch_first=True))
        adapter = mo.attach_film(model.to(device).train(training), dim=DIM)
        adapter.set_phi(torch.linspace(-0.5, 0.5, DIM))
        model(torch.linspace(-1, 1, 2 * 4 * 6).view(2, 4, 6).to(device))[0].square().sum().backward()
        assert adapter.phi.grad is not None
        return adapter.phi.grad.cpu()

    torch.testing.assert_close(gradient(device), gradient(torch.device("cpu")), rtol=1e-4, atol=1e-5)


def test_mixed_precision_and_a_scaler(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        pytest.skip("torch has no mixed precision for a device of one's own")
    adapter = ADAPTERS["film and outputs"](network(device))
    f = NeuralValueFunction(adapter.phi.numel(), 2)
    f.set_domain(torch.randn(50, adapter.phi.numel()))
    ours = mo.MetricOpt(adapter.parameters(), f, even_untrusted=True)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    x, y = data(device, 40)
    for _ in range(4):
        ours.zero_grad()
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
            value = F.cross_entropy(adapter.model(x), y)
        scaler.scale(value).backward()
        scaler.step(ours)
        scaler.update()
    assert adapter.phi.dtype == torch.float32
    assert adapter.phi.isfinite().all()
    assert adapter.phi.detach().abs().sum() > 0


def detector() -> nn.Module:
    """A small R-CNN in double precision, whose scores are spread."""
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign

    torch.manual_seed(0)
    backbone: Any = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 4, 1), nn.ReLU()
    )
    backbone.out_channels = 32
    model: nn.Module = FasterRCNN(
        backbone,
        min_size=48,
        max_size=72,
        rpn_anchor_generator=AnchorGenerator(((12, 24),), ((0.5, 1.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 7, 2),
        box_head=TwoMLPHead(32 * 49, 64),
        box_predictor=FastRCNNPredictor(64, 3),
    )
    with torch.no_grad():
        model.get_parameter("roi_heads.box_predictor.cls_score.weight").mul_(40)
    return model.double().eval()


@pytest.mark.parametrize(
    "values",
    [{}, {"size": 1.41}, {"flip": True, "score_thresh": 0.01}, {"soft_nms": 0.2, "detections": 300}, {"nms": 0.3}],
    ids=lambda values: "-".join(values) or "defaults",
)
def test_a_detector_s_settings_find_what_they_find_on_the_cpu(values: dict[str, Any], device: torch.device) -> None:
    pytest.importorskip("torchvision")
    from metricopt_ext.detection.settings import detection_settings
    from metricopt_ext.utils.kept_outputs import KeptOutputs

    draw = torch.Generator().manual_seed(0)
    images = [torch.rand(3, *size, generator=draw, dtype=torch.float64) for size in ((48, 64), (64, 40), (48, 64))]
    found = {}
    for where in (torch.device("cpu"), device):
        for kept in (None, KeptOutputs()):
            model = detector().to(where)
            adapter = mo.attach_film(model, ["backbone.1"], dim=DIM)
            adapter.set_phi(torch.full((DIM,), 0.1))
            settings = detection_settings(
                model,
                names=["size", "score_thresh", "detections", "soft_nms", "flip", "nms"],
                kept=kept,
                boxes_only=True,
            )
            with torch.no_grad():
                for _ in range(2):
                    with settings.applied(values):
                        boxes = model([image.to(where) for image in images])
            found[where.type, kept is None] = [{name: value.cpu() for name, value in each.items()} for each in boxes]
    expected = found["cpu", True]
    assert sum(len(each["scores"]) for each in expected) > 9
    for each in found.values():
        for one, two in zip(each, expected, strict=True):
            for name in ("boxes", "scores", "labels"):
                torch.testing.assert_close(one[name], two[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not can_play(), reason="this torch has no backends in Python")
def test_all_of_this_on_a_gpu_that_the_cpu_plays() -> None:
    # Left by _exit: at a plain end autograd's thread of the played device may still want the interpreter, and aborts.
    script = "import os, sys, pytest; code = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", script, "-q", "-p", "no:cacheprovider", "-k", "played", __file__],
        env={**os.environ, PLAYED: "1"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(not can_play(), reason="this torch has no backends in Python")
def test_the_played_gpu_refuses_what_a_gpu_refuses() -> None:
    code = """
import torch
from helpers.played_gpu import PlayedGPU, register
device = register()
with PlayedGPU():
    x = torch.arange(6.0).to(device).requires_grad_()
    (2 * x).sum().backward()
    assert x.grad.device == device and x.grad.cpu().tolist() == [2.0] * 6
    assert x.detach()[torch.tensor([1, 2])].tolist() == [1.0, 2.0]
    for refused in (lambda: x + torch.ones(6), lambda: torch.ones(6)[x.detach().long()], lambda: x.detach().numpy()):
        try:
            refused()
        except (RuntimeError, TypeError):
            continue
        raise SystemExit("it met a tensor of the CPU")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
