"""Runs that are killed, find no room, a folder they may not write to, or a second writer.

Each is resumed until it ends, and must end with the result, the files and the ledger of a run that nothing disturbed,
byte for byte. METRICOPT_KILLS=200 kills that often; METRICOPT_SEED draws other moments.
"""

import errno
import io
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from threadpoolctl import threadpool_limits
from torch import nn

import metricopt_ext as mo
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import MetricOptError
from metricopt_ext.methods.paper.recipe import Algorithm1, Recipe
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks import log
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils import files
from metricopt_ext.value.learning import NeuralLearner

ROOT = Path(__file__).parents[1]
STEPS = 4  # of a write: the file is made, half of it is written, it is synced, it gets its name
KILLS = int(os.environ.get("METRICOPT_KILLS", 8))
SEED = int(os.environ.get("METRICOPT_SEED", 0))

STRATEGIES: dict[str, tuple[Any, int]] = {
    "search": (None, 24),
    "recipe": (Recipe(steps=6, evals=3, rounds=2, folds=2, trials=1, learner=NeuralLearner(iterations=20)), 62),
    "paper": (Algorithm1(steps=6, evals=3), 30),
}


def make_task() -> FinetuneTask:
    """Return a small classifier's task."""
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    y = torch.randint(3, (90,), generator=torch.Generator().manual_seed(1))

    def score(model: nn.Module) -> tuple[float, tuple[float, float]]:
        right = (model(x).argmax(1) == y).double() + 0.3 * model(x).softmax(1)[:, 0].double().sigmoid()
        return float(right.mean()), (float(right[::2].mean()), float(right[1::2].mean()))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return FinetuneTask(
        attach_film(model, "1", dim=6, seed=0),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=TensorBatches(x, y, batch_size=30),
        metric=Metric(score, maximize=True, bounds=(0, 2), name="score"),
        population=3,
    )


def work(task: FinetuneTask, name: str, folder: Path, resume: bool, callback: Callback | None = None) -> str:
    """Run a strategy in a folder and return its result as text, without a digit lost."""
    strategy, queries = STRATEGIES[name]
    with threadpool_limits(1):  # torchrun's processes have one thread of linear algebra, others as many as cores
        result = mo.optimize_metric(
            task,
            queries=queries,
            strategy=strategy,
            seed=1,
            output_dir=folder,
            resume=resume,
            callback=callback,
        )
    numbers = (result.before, result.after, result.best, result.chance, result.verdict.optimism, result.needed)
    return json.dumps(
        {
            "phi": task.adapter.phi.tolist(),
            "ends": {end: phi.tolist() for end, phi in result.ends.items()},
            "numbers": numbers,
            "queries": result.queries,
            "ledger": task.metric.ledger.spent_on,
            "text": str(result),
        }
    )


def kept(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder; the lock is empty and always there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Faulty:
    """Stands for `os` and `tempfile` where files are written: counts the steps of that, and has one of them fail.

    Args:
        folder: The run's folder.
        fault: ``"SIGKILL"`` or ``"SIGSTOP"``, or the error that each step from then on ends with, e.g. ``"ENOSPC"``.
        at: The step at which that happens, from 1; None for never.
    """

    def __init__(self, folder: Path, fault: str, at: int | None) -> None:
        self.folder, self.fault, self.at, self.steps = str(folder), fault, at, 0
        self.written: list[int] = []  # the last step of each file that got its name
        self.makes_temporary, self.remove = files.tempfile.mkstemp, os.unlink
        files.os = files.tempfile = log.os = self  # type: ignore[assignment]
        log.open = self.open_log  # type: ignore[attr-defined]
        os.unlink = self.unlink  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @property
    def fails(self) -> bool:
        return self.at is not None and self.steps >= self.at

    def step(self, *path: str) -> None:
        self.steps += 1
        if self.fails and self.fault.startswith("SIG"):
            if self.steps == self.at:
                os.kill(os.getpid(), signal.Signals[self.fault])
        elif self.fails:
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number), *path)

    def mkstemp(self, **options: Any) -> tuple[int, str]:
        self.step(str(options["dir"]))
        return self.makes_temporary(**options)

    def fdopen(self, descriptor: int, mode: str) -> io.BufferedWriter:
        return self.halting(io.FileIO(descriptor, mode))

    def open_log(self, path: Path, mode: str) -> io.BufferedWriter:
        self.step(str(path))
        return self.halting(io.FileIO(path, mode.replace("b", "")))

    def halting(self, file: io.FileIO) -> io.BufferedWriter:
        step = self.step

        class Halting(io.BufferedWriter):
            def write(self, data: Any) -> int:
                half = super().write(data[: len(data) // 2])
                self.flush()
                step()
                return half + super().write(data[half:])

        return Halting(file)

    def fsync(self, descriptor: int) -> None:
        self.step()
        os.fsync(descriptor)

    def replace(self, source: str, target: Path) -> None:
        self.step(source)
        os.replace(source, target)
        self.written.append(self.steps)

    def unlink(self, path: Any, **options: Any) -> None:
        if self.fault == "EROFS" and self.fails and str(path).startswith(self.folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        self.remove(path, **options)


def act(order: dict[str, Any]) -> None:
    """Run as ordered, and write how it ended beside the folder."""
    folder, end = Path(order["folder"]), {}
    faulty = Faulty(folder, order.get("fault", ""), order.get("at"))
    began, task = time.perf_counter(), make_task()
    try:
        end["result"] = work(task, order["strategy"], folder, order["resume"], Callback())
    except (MetricOptError, OSError) as error:
        end["error"] = f"{type(error).__name__}: {error}"
        if order.get("again"):  # in the same process, once there is room
            faulty.at = None
            end["result"] = work(task, order["strategy"], folder, True, Callback())
    end |= {"steps": faulty.steps, "written": faulty.written, "seconds": time.perf_counter() - began}
    Path(f"{folder}.json").write_text(json.dumps(end))


def serve() -> None:
    """Fork a process for each order on the standard input, and tell its number; or wait for one to end or stop.

    What is told then is its exit status, or the signal that ended (negative) or stopped it.
    """
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], os.WUNTRACED)
            answer = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        elif (answer := os.fork()) == 0:
            os.dup2(2, 1)
            act(order)
            os._exit(0)
        print(answer, flush=True)


class Nursery:
    """A process that has imported everything, and forks the runs: a start takes milliseconds."""

    def __init__(self) -> None:
        code = "from tests.test_faults import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **order: Any) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def start(self, strategy: str, folder: Path, resume: bool = False, **fault: Any) -> int:
        """Start a run and return its process."""
        return self.ask(strategy=strategy, folder=str(folder), resume=resume, **fault)

    def ended(self, process: int, folder: Path) -> dict[str, Any]:
        """Wait for a run that ends by itself, and return how it did."""
        assert self.ask(wait=process) == 0
        end: dict[str, Any] = json.loads(Path(f"{folder}.json").read_text())
        return end

    def run(self, strategy: str, folder: Path, resume: bool = False, **fault: Any) -> dict[str, Any]:
        return self.ended(self.start(strategy, folder, resume, **fault), folder)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.process.communicate(timeout=60)


class Undisturbed(NamedTuple):
    result: str
    files: dict[str, bytes]
    steps: int
    written: list[int]
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    """What each strategy ends with if nothing happens."""
    ends = {}
    for name in STRATEGIES:
        folder = tmp_path_factory.mktemp("undisturbed") / name
        end = nursery.run(name, folder)
        ends[name] = Undisturbed(end["result"], kept(folder), end["steps"], end["written"], end["seconds"])
        assert {"adapter.safetensors", "value_function.safetensors", "log.jsonl"} <= ends[name].files.keys()
    return ends


def assert_whole(folder: Path, whole: Undisturbed) -> int:
    """Each file of an unfinished run is as in a finished one; of the log, to which lines are added, it has the first.

    What was being written at that moment has a name of its own.

    Returns:
        How many writes have left what is there, but for the log's.
    """
    writes = 0
    for name, content in kept(folder).items():
        if name.endswith(files.UNFINISHED):
            continue
        if name == "log.jsonl":
            assert whole.files[name].startswith(content)
        elif name != ".lock":
            assert content == whole.files[name], name
            writes += 1
    return writes


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_happened(
    nursery: Nursery, undisturbed: dict[str, Undisturbed], tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    print(f"METRICOPT_SEED={SEED} METRICOPT_KILLS={KILLS}", {name: end[2:] for name, end in undisturbed.items()})
    killed: Counter[str] = Counter()
    for attempt in count():
        if killed.total() >= KILLS:
            break
        name = tuple(STRATEGIES)[attempt % len(STRATEGIES)]
        whole, folder, story = undisturbed[name], tmp_path / f"{attempt}-{name}", []
        for restart in range(rng.randint(1, 4)):
            if rng.random() < 0.5:  # at a step of a write, of which there are fewer once it goes on
                story.append(f"at step {(at := rng.randint(1, whole.steps // (restart + 1)))}")
                process = nursery.start(name, folder, restart > 0, fault="SIGKILL", at=at)
            else:  # at any moment
                story.append(f"after {(seconds := rng.uniform(0, whole.seconds)):.3f} s")
                process = nursery.start(name, folder, restart > 0)
                time.sleep(seconds)
                os.kill(process, signal.SIGKILL)
            status = nursery.ask(wait=process)
            assert status in (0, -signal.SIGKILL), story
            killed[name] += status == -signal.SIGKILL
            assert_whole(folder, whole)
        end = nursery.run(name, folder, True)
        print(f"{name}: killed", *story, sep=", ")
        assert end["result"] == whole.result, story
        assert kept(folder) == whole.files, story
    print(f"{killed.total()} kills in {attempt} runs, all of which ended alike: {dict(killed)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "strategies", "again"),
    [
        pytest.param("ENOSPC", ["search", "paper"], False, id="no room, in another process"),
        pytest.param("EROFS", ["recipe"], False, id="read-only, in another process"),
        pytest.param("ENOSPC", ["recipe"], True, id="no room, in the same process"),
        pytest.param("EROFS", ["search", "paper"], True, id="read-only, in the same process"),
    ],
)
def test_a_run_that_cannot_write_ends_with_one_error_and_goes_on_later(
    nursery: Nursery,
    undisturbed: dict[str, Undisturbed],
    fault: str,
    strategies: list[str],
    again: bool,
    tmp_path: Path,
) -> None:
    rng = random.Random(f"{SEED} {fault}")
    for name in strategies:
        whole = undisturbed[name]
        # Again in the same process: once the search is over, when what is kept of it and what is charged must agree.
        folder, at = tmp_path / name, whole.steps - rng.randrange(2 * STEPS) if again else rng.randint(1, whole.steps)
        print(f"METRICOPT_SEED={SEED}: {name}, {fault} at step {at} of {whole.steps}")
        end = nursery.run(name, folder, fault=fault, at=at, again=again)
        number = getattr(errno, fault)
        assert end["error"].startswith(f"OSError: [Errno {number}] {os.strerror(number)}: '{folder}/")
        assert end["error"].endswith((".json'", ".jsonl'", ".md'", ".safetensors'"))  # itself, not its temporary name
        if not again:
            assert assert_whole(folder, whole) == sum(step < at for step in whole.written)  # nothing of it is lost
            unfinished = [path.name for path in folder.rglob(f".*{files.UNFINISHED}")]
            within = any(0 <= step - at < STEPS - 1 for step in whole.written)
            assert len(unfinished) == (fault == "EROFS" and within)  # what nobody can remove
            end = nursery.run(name, folder, True)
        assert end["result"] == whole.result
        assert kept(folder) == whole.files


@pytest.mark.slow
@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
@pytest.mark.parametrize("begun", [False, True])
def test_a_second_writer_is_refused_and_disturbs_nothing(
    nursery: Nursery, undisturbed: dict[str, Undisturbed], begun: bool, then: signal.Signals, tmp_path: Path
) -> None:
    whole, folder = undisturbed["search"], tmp_path / "run"
    first = nursery.start("search", folder, fault="SIGSTOP", at=whole.steps // 2 if begun else 1)
    assert nursery.ask(wait=first) == signal.SIGSTOP
    there = kept(folder)
    for strategy, resume in (("search", True), ("search", False), ("recipe", True)):
        end = nursery.run(strategy, folder, resume)
        assert end["error"] == (
            f"FileFormatError: {folder} is being written by another process; wait until it has ended, or use another"
            " output folder"
        )
        assert kept(folder) == there
    os.kill(first, then)
    if then == signal.SIGCONT:
        end = nursery.ended(first, folder)
    else:
        assert nursery.ask(wait=first) == -then
        end = nursery.run("search", folder, True)
    assert end["result"] == whole.result
    assert kept(folder) == whole.files


def work_on_ranks() -> None:
    """Run all strategies on the ranks of torchrun; each says which process it is, and what it ended with."""
    folder = Path(sys.argv[1])
    rank = os.environ["RANK"]
    with distributed.joined():
        files.write_json(folder / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}.json", {"process": os.getpid()})
        ends = {
            name: work(make_task(), name, folder / name, distributed.restarted(), Callback()) for name in STRATEGIES
        }
    files.write_json(folder / f"{rank}.json", ends)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(max(1, KILLS // 20)))
def test_killed_ranks_end_as_if_nothing_had_happened(
    undisturbed: dict[str, Undisturbed], torchrun: Any, turn: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kills, rng = 2, random.Random(f"{SEED} {turn}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    script = "from tests.test_faults import work_on_ranks; work_on_ranks()"
    launched = torchrun(script, 2, str(tmp_path), options=(f"--max-restarts={kills}",))
    seconds = sum(whole.seconds for whole in undisturbed.values()) / kills  # what is finished is not done again
    killed = 0
    for restart in range(kills):
        process = [tmp_path / f"{restart}-{rank}.json" for rank in range(2)]
        while launched.poll() is None and not all(path.exists() for path in process):
            time.sleep(0.05)
        rank, moment = rng.randrange(2), rng.uniform(0, seconds)
        time.sleep(moment)
        if launched.poll() is None and not any((tmp_path / f"{rank}.json").exists() for rank in range(2)):
            print(f"METRICOPT_SEED={SEED}: rank {rank} killed after {moment:.3f} s")
            os.kill(files.read_json(process[rank])["process"], signal.SIGKILL)
            killed += 1
    output, _ = launched.communicate(timeout=300)
    assert launched.returncode == 0, output
    assert killed > 0
    for rank in range(2):
        assert files.read_json(tmp_path / f"{rank}.json") == {n: whole.result for n, whole in undisturbed.items()}
    for name, whole in undisturbed.items():
        assert kept(tmp_path / name) == whole.files


def without_seconds(report: Any) -> Any:
    """Return a report without what differs between two runs, how long they took."""
    if isinstance(report, dict):
        return {key: without_seconds(value) for key, value in report.items() if key != "seconds"}
    return [without_seconds(each) for each in report] if isinstance(report, list) else report


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a tool's workers in /proc")
def test_a_killed_tool_goes_on_to_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"{SEED} tool")
    settings = ["queries=20", "seeds=2", "workers=2"]
    settings += ["model.epochs=2", "adapter.dim=6"]
    config = str(ROOT / "configs/classification/digits.yaml")
    tool = [sys.executable, "tools/finetune_classifier.py", "--config-file", config]

    def started(folder: str, *options: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*tool, "--output-dir", str(tmp_path / folder), *settings, *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def workers(process: "subprocess.Popen[str]") -> list[int]:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None:
            with suppress(FileNotFoundError, ProcessLookupError):  # another child has ended meanwhile
                ids = [int(each) for each in children.read_text().split()]
                found = [each for each in ids if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
                if len(found) == 2:
                    return found
            time.sleep(0.02)
        raise AssertionError(process.communicate()[0])

    def finish(folder: str, *options: str) -> None:
        """Run the tool in this process, seed by seed."""
        own = ["--output-dir", str(tmp_path / folder), *settings, *options, "workers=1"]
        monkeypatch.setattr(sys, "argv", [*tool[1:], *own])
        runpy.run_path(str(ROOT / tool[1]), run_name="__main__")

    began = time.monotonic()
    finish("whole")
    seconds = (time.monotonic() - began) / 2  # that the workers take at least, side by side

    killed = 0
    for victim in ("worker", "parent"):
        disturbed = started("disturbed", *(["--resume"] if victim == "parent" else []))
        both = workers(disturbed)
        time.sleep(moment := rng.uniform(0.05, 0.6) * seconds)  # well before the end: they import everything, too
        if disturbed.poll() is None:
            print(f"METRICOPT_SEED={SEED}: {victim} killed {moment:.2f} s after the workers began, of {seconds:.2f} s")
            with suppress(ProcessLookupError):  # a worker may have done its work by now
                os.kill(disturbed.pid if victim == "parent" else rng.choice(both), signal.SIGKILL)
                killed += 1
        disturbed.communicate(timeout=300)
    assert killed > 0
    finish("disturbed", "--resume")
    reports = [without_seconds(files.read_json(tmp_path / name / "report.json")) for name in ("whole", "disturbed")]
    assert reports[0] == reports[1]
    for path in kept(tmp_path / "whole").keys() - {"report.json", "report.md", "report.html"}:
        if path.endswith(".safetensors"):
            assert (tmp_path / "disturbed" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()
    assert not list((tmp_path / "disturbed").rglob(f".*{files.UNFINISHED}"))
