"""Attaching, merging and searching are interrupted at every line: modes, hooks and weights are as they were.

A tracer raises KeyboardInterrupt where a line of the package is about to run, once: at its first or at its last time.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metricopt_ext
from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs, load_adapter
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

pytestmark = pytest.mark.slow

PACKAGE = str(Path(metricopt_ext.__file__).parent)

Line = tuple[str, int]


class LikeNemotrons(nn.LayerNorm):
    """A norm with another forward pass, of which a pass through it tells whether phi can be folded into it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 6), LikeNemotrons(6), nn.Linear(6, 3)
    )
    model[0].weight.requires_grad_(False)
    model[1].eval()
    model[3].register_forward_hook(lambda module, args, output: output * 1.5)
    return model.double()


def state_of(model: nn.Module) -> list[Any]:
    """Return all that must stay: modules, modes, hooks, what is trained, all tensors, and torch's own mode."""
    state: list[Any] = [torch.is_grad_enabled()]
    for name, module in model.named_modules():
        hooks = [(key, list(held.items())) for key, held in sorted(vars(module).items()) if "hooks" in key]
        pinned = [key for key in vars(module) if key.startswith("_metricopt")]
        state.append((name, id(module), module.training, hooks, pinned))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state.append((name, id(tensor), tensor.requires_grad, tensor.tolist()))
    context = getattr(model, "metricopt", None)
    if context is not None:
        modulations = [(name, each.tolist()) for name, each in model.named_buffers() if "modulation" in name]
        originals = sorted((name, each.tolist()) for name, each in context.originals.items())
        state.append((context.override, context.seed, context.thawed, originals, modulations))
    return state


@contextmanager
def tracing(at_line: Callable[[Line], None]) -> Iterator[None]:
    """Call a function before each line of the package that runs."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) and "/metricopt_ext/" not in file:
            return None
        if event == "line":
            at_line((file, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(work: Callable[[], Any]) -> list[Line]:
    """Return the lines that run, in order."""
    seen: list[Line] = []
    with tracing(seen.append):
        work()
    return seen


def interrupted_at(number: int, work: Callable[[], Any]) -> bool:
    """Interrupt some work at its n-th line; returns whether it came to that."""
    count = 0

    def at_line(line: Line) -> None:
        nonlocal count
        count += 1
        if count == number + 1:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), tracing(at_line):
        work()
        return False
    return True


def check_lines(make: Callable[[], tuple[nn.Module, Callable[[], Any]]], every: int = 1) -> None:
    """Interrupt work on models, made anew each time, at its lines; fail with those after which the model differs."""
    _, work = make()
    seen = lines_of(work)
    assert len(seen) > 20
    first = {line: number for number, line in reversed(list(enumerate(seen)))}
    last = {line: number for number, line in enumerate(seen)}
    numbers, came, bad = sorted({*first.values(), *last.values()})[::every], 0, set()
    for number in numbers:
        model, work = make()
        before = state_of(model)
        if interrupted_at(number, work):  # not where Python itself ends a generator that nobody needs any more
            came += 1
            if state_of(model) != before:
                bad.add(seen[number])
                torch.set_grad_enabled(True)
    assert came > 0.9 * len(numbers)
    assert not bad, sorted(bad)


ATTACHED: dict[str, Callable[[nn.Module], Adapter]] = {
    "film": lambda model: attach_film(model, dim=3, outputs=Outputs(temperature=True)),
    "input_bias": lambda model: attach_input_bias(model, dim=3),
    "outputs": attach_outputs,
}


@pytest.mark.parametrize("kind", ATTACHED)
def test_attaching(kind: str) -> None:
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        model = network()
        return model, lambda: ATTACHED[kind](model)

    check_lines(make)


def moved(kind: str) -> Adapter:
    """An adapter whose start replaced a buffer and a parameter."""
    adapter = ATTACHED[kind](network())
    phi = torch.linspace(-1, 1, adapter.dim).to(adapter.phi)
    mean, weight = torch.ones(6, dtype=torch.float64), torch.full((3, 6), 0.5, dtype=torch.float64)
    adapter.apply(Start(phi, {"1.running_mean": mean}, {"5.weight": weight}))
    return adapter


@pytest.mark.parametrize("kind", ATTACHED)
@pytest.mark.parametrize("work", ["merge", "remove"])
def test_merging_and_removing(kind: str, work: str) -> None:
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        adapter = moved(kind)
        return adapter.model, getattr(adapter, work)

    check_lines(make)


def test_applying_for_good_and_for_a_while() -> None:
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        adapter = moved("film")
        variance = torch.full((6,), 2.0, dtype=torch.float64)
        start = Start(torch.ones_like(adapter.phi.detach()), {"1.running_var": variance})

        def work() -> None:
            with adapter.applied(start), adapter.using(start.phi):
                pass
            adapter.apply(start)

        return adapter.model, work

    check_lines(make)


@pytest.mark.parametrize("attached", [False, True])
def test_loading(attached: bool, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    saved = attach_film(network(), dim=3, seed=1)
    saved.apply(Start(torch.ones(3, dtype=torch.float64), {"1.running_mean": torch.ones(6, dtype=torch.float64)}))
    saved.save(path)

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        model = network()
        if attached:
            adapter = attach_film(model, dim=3, seed=2)
            adapter.set_phi(torch.full((3,), 0.25))
            return model, lambda: adapter.load(path)
        return model, lambda: load_adapter(model, path)

    check_lines(make)


def test_a_warning_that_is_an_error_undoes_loading(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    attach_film(network(), dim=3, seed=1).save(path)
    model = network()
    with torch.no_grad():
        model[5].bias.add_(1)
    before = state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_refused(lambda: load_adapter(model, path), UserWarning)
    assert state_of(model) == before


GUIDED = GuidedTrustRegion(batch=2)


def search_task() -> FinetuneTask:
    adapter = moved("film")
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(40) % 3

    def score(model: nn.Module) -> tuple[float, tuple[float, float]]:
        right = model(x).softmax(1).gather(1, y[:, None])[:, 0]
        return float(right.mean()), (float(right[::2].mean()), float(right[1::2].mean()))

    return FinetuneTask(
        adapter,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=TensorBatches(x, y, batch_size=10),
        metric=Metric(score, maximize=True, name="score"),
        population=1,
    )


def searching(strategy: Any, queries: int) -> Callable[[], tuple[nn.Module, Callable[[], Any]]]:
    task = search_task()  # tasks are copied: to make one takes longer

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        own = copy.copy(task.copied().judged_by(task.metric.with_new_ledger()))
        ledger = own.metric.ledger

        def work() -> None:
            try:
                optimize_metric(own, queries=queries, strategy=strategy)
            finally:
                assert own.metric.ledger is ledger

        return own.adapter.model, work

    return make


# What Python ends itself, such as a generator that nobody needs, passes no error on.
swallowed = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@swallowed
def test_a_direct_search() -> None:
    """Every sixth of its lines."""
    check_lines(searching(RandomSearch(), 4), every=6)


@swallowed
def test_a_guided_search() -> None:
    """A sample of its lines, as it takes longer."""
    check_lines(searching(GUIDED, 8), every=80)
