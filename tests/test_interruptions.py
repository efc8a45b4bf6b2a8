"""Adapters and searches are interrupted at their lines: modes, hooks and weights are as they were.

A tracer raises KeyboardInterrupt where a line of the package is about to run, once: at its first or at its last time.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import metricopt_ext as mo
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.search.direct import RandomSearch
from metricopt_ext.search.trust_region import GuidedTrustRegion

pytestmark = pytest.mark.slow

PACKAGE = str(Path(mo.__file__).parent)

Line = tuple[str, int]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)
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
        originals = sorted((name, each.tolist()) for name, each in context.originals.items())
        held = (context.override, context.held.phi, list(context.own), context.means, context.thawed)
        state.append((*held, originals))
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


def moved() -> mo.Adapter:
    """An adapter whose start replaced a buffer and a parameter."""
    adapter = mo.attach_film(network(), dim=3, outputs=mo.Outputs(temperature=True))
    phi = torch.linspace(-1, 1, adapter.dim).to(adapter.phi)
    mean, weight = torch.ones(6, dtype=torch.float64), torch.full((3, 6), 0.5, dtype=torch.float64)
    adapter.apply(mo.Start(phi, {"1.running_mean": mean, "5.weight": weight}))
    return adapter


GUIDED = GuidedTrustRegion(batch=2)


def search_task() -> mo.FinetuneTask:
    adapter = moved()
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(40) % 3

    def score(model: nn.Module) -> tuple[float, tuple[float, float]]:
        right = model(x).softmax(1).gather(1, y[:, None])[:, 0]
        return float(right.mean()), (float(right[::2].mean()), float(right[1::2].mean()))

    return mo.FinetuneTask(
        adapter,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=mo.TensorBatches(x, y, batch_size=10),
        metric=mo.Metric(score, maximize=True, name="score"),
        population=1,
    )


def searching(strategy: Any, queries: int) -> Callable[[], tuple[nn.Module, Callable[[], Any]]]:
    task = search_task()  # tasks are copied: to make one takes longer

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        own = copy.copy(task.copied().judged_by(task.metric.with_settings()))
        ledger = own.metric.ledger

        def work() -> None:
            try:
                optimize_metric(own, queries=queries, strategy=strategy)
            finally:
                assert own.metric.ledger is ledger

        return own.adapter.model, work

    return make


X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(12, 4)
OTHER = {name: value + 0.1 if value.is_floating_point() else value for name, value in network().state_dict().items()}
START = mo.Start(
    torch.ones(7, dtype=torch.float64),
    {"1.running_var": torch.full((6,), 2.0, dtype=torch.float64)},
    {"3.weight": torch.ones(6, 6, dtype=torch.float64)},
)


@pytest.mark.parametrize(
    "attach",
    [
        lambda model: mo.attach_film(model, dim=3, example=X, outputs=mo.Outputs(temperature=True)),
        lambda model: attach_input_bias(model, dim=3, outputs=mo.Outputs()),
        lambda model: mo.attach_outputs(model, example=X),
        lambda model: mo.attach_mixture(model, [OTHER], film=2, outputs=mo.Outputs()),
    ],
    ids=["film", "input_bias", "outputs", "mixture"],
)
def test_attaching(attach: Callable[[nn.Module], Any]) -> None:
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        model = network()
        return model, lambda: attach(model)

    check_lines(make)


@pytest.mark.parametrize("method", ["apply", "load", "save", "remove", "merge", "merged_state_dict"])
def test_what_an_adapter_does(method: str, tmp_path: Path) -> None:
    adapter, arguments = moved(), {"apply": START, "load": tmp_path / "a", "save": tmp_path / "b"}
    adapter.save(tmp_path / "a")

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        own = mo.Adapter(copy.deepcopy(adapter.model))
        return own.model, lambda: getattr(own, method)(*[arguments[method]] if method in arguments else [])

    check_lines(make)


def test_statistics_estimated_anew() -> None:
    task = search_task()

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        own = task.copied()
        return own.adapter.model, lambda: mo.batchnorm_start(own, [X])

    check_lines(make)


def test_asking_and_telling() -> None:
    """Every third of its lines: up to the result, which changes the model."""
    task = search_task()

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        own = task.copied()

        def work() -> None:
            with mo.Search(own, queries=6, strategy=RandomSearch()) as search:
                while trials := search.ask(2):
                    for trial in trials:
                        with trial.applied() as model:
                            search.tell(trial.id, float(model(X).mean()))

        return own.adapter.model, work

    check_lines(make, every=3)


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
