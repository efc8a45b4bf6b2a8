r"""Say what is installed, on which machine, and whether a small search works here.

    metricopt doctor
    python tools/doctor.py

It prints versions, the processor and GPUs, which extras are complete, and the result of a toy search, in a few seconds.
The exit status is 1 if something installed does not work; what is not installed is only named. Include the output in a
bug report.
"""

import argparse
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.style import print_points
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.extras import DETECTRON2_SOURCE
from metricopt_ext.utils.installation import DISTRIBUTION, Extra, detectron2, extras, installed
from metricopt_ext.utils.machine import Machine, deterministic
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted

QUERIES = 40


def main() -> None:
    """Parse the command line, look, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with errors_in_one_line():
        lines, works = report()
        print_points(lines)
    sys.exit(not works)


def report() -> tuple[list[str], bool]:
    """Return what was found, in sentences, and whether all that is installed works."""
    machine = Machine.current(torch.device("cpu"))
    lines = [
        f"{DISTRIBUTION} {installed(DISTRIBUTION) or '(not installed, but on the path)'}",
        f"Python {platform.python_version()} on {platform.platform()}, {machine}",
        f"torch {torch.__version__}, {gpus()}",
    ]
    try:
        found = list(extras())
    except PackageNotFoundError:
        found = []
        lines.append("extras can be checked only for an installed package: run pip install -e . in the clone")
    lines += [told(each) for each in found]
    broken = detectron2()
    lines.append(broken or said_of_detectron2())
    wrong, seconds = self_test()
    lines.append(f"self-test: {f'failed, {wrong}' if wrong else 'passed'}, in {seconds:.1f} s")
    works = not (wrong or broken) and all(each.complete or (each.name and each.absent) for each in found)
    return lines, works


def gpus() -> str:
    """Name the GPUs that torch can use."""
    if not torch.cuda.is_available():
        return "no usable GPU" + ("" if torch.version.cuda else ", as this torch is built for CPUs only")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}, {counted(len(names), 'GPU')}: {', '.join(names)}"


def told(extra: Extra) -> str:
    """Say what of an extra is there, and what to install."""
    name = f"extra {extra.name}" if extra.name else "required packages"
    if extra.complete:
        return f"{name}: complete"
    command = f"pip install '{DISTRIBUTION}{f'[{extra.name}]' if extra.name else ''}'"
    missing = [f"{', '.join(extra.missing)} not installed"] if extra.missing else []
    return f"{name}: {'; '.join([*missing, *extra.outside, *extra.broken])}. If you need it: {command}"


def said_of_detectron2() -> str:
    """Say which Detectron2 is there, or how to install it, as it is on no registry."""
    version = installed("detectron2")
    if version is not None:
        return f"Detectron2 {version}"
    return f"Detectron2: not installed. If you need it: pip install --no-build-isolation {DETECTRON2_SOURCE}"


def self_test() -> tuple[str | None, float]:
    """Search for a toy's hidden phi; return what is wrong, None if nothing is, and how many seconds it took.

    The toy's metric is the distance of a small network's outputs from those at a hidden phi, so that a search has
    something to find. An untouched model must compute the same bits before and after, and a merged one what the
    search kept.
    """
    began = time.perf_counter()
    with deterministic(False, 1):
        wrong = _searched()
    return wrong, time.perf_counter() - began


def _searched() -> str | None:
    draws = generator(0, "doctor")
    x = torch.randn(64, 8, generator=draws)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draws)
    state, untouched = {name: each.clone() for name, each in model.state_dict().items()}, outputs(model, x)
    adapter = attach_film(model, layers="1", dim=8)
    if not torch.equal(outputs(model, x), untouched):
        return "at phi = 0 the model's outputs changed"
    with adapter.using(0.7 * torch.randn(8, generator=draws)) as moved:
        hidden = outputs(moved, x)

    def distance(model: nn.Module) -> tuple[float, tuple[float, float]]:
        squares = (outputs(model, x) - hidden).square().mean(1)
        return float(squares.mean()), (float(squares[::2].mean()), float(squares[1::2].mean()))

    task = FinetuneTask(
        adapter,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        batches=TensorBatches(x[:32], hidden[:32], batch_size=16),
        metric=Metric(distance, maximize=False, name="distance"),
    )
    result = optimize_metric(task, queries=QUERIES, callback=Callback())
    kept = outputs(model, x)
    if not result.after < 0.5 * result.before:
        return f"a search of {QUERIES} queries went only from {result.before:.4f} to {result.after:.4f}"
    adapter.set_phi(torch.zeros(8))
    adapter.remove()
    if any(not torch.equal(each, state[name]) for name, each in model.state_dict().items()):
        return "the original weights did not come back"
    again = attach_film(model, layers="1", dim=8)
    again.set_phi(result.ends[result.chosen])
    again.merge()
    return None if torch.allclose(outputs(model, x), kept, atol=1e-5) else "the merged model computes something else"


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return a model's outputs."""
    found: Tensor = model(x)
    return found


if __name__ == "__main__":
    main()
