"""Golden numbers: what the tools compute today, to the last bit where the same packages compute it.

    python tests/golden/golden.py check [--quick] [NAME...]
    python tests/golden/golden.py freeze [NAME...]

Each ground is a command of a tool at small size, run with the instructions that every x86-64 processor has and on one
thread. golden.json keeps the metric that it reaches, a digest of the points that it asks the metric for, and the
seconds of a processor.
With the versions that it was frozen with, check compares both exactly; else the metric alone, within the ground's
tolerance. Freezing also runs each ground with AVX2, to see how far rounding alone carries the metric.
METRICOPT_GOLDEN_DATA=FOLDER holds what no package brings: the folders a9a and omniglot.
"""

import argparse
import hashlib
import importlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FILE = Path(__file__).with_name("golden.json")
ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "faiss-cpu")


def environment(settings: str) -> dict[str, str]:
    one = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    return one | dict(each.split("=") for each in settings.split())


# What computes as any x86-64 processor does, and as those of the last ten years do.
PINNED = environment(
    "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=PRESCOTT"
    " FAISS_OPT_LEVEL=generic NPY_DISABLE_CPU_FEATURES=X86_V3,X86_V4,AVX512_ICL,AVX512_SPR"
)
AVX2 = environment(
    "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 OPENBLAS_CORETYPE=HASWELL FAISS_OPT_LEVEL=avx2"
)


@dataclass(frozen=True)
class Ground:
    tool: str
    config: str
    overrides: str
    data: str = ""  # the folder that METRICOPT_GOLDEN_DATA must hold
    package: str = ""  # what must be installed
    quick: bool = False  # whether CI runs it


def comparing(config: str, overrides: str = "", **settings: Any) -> Ground:
    """MetricOpt's search at 20 and 60 queries, as `tools/compare.py` runs it."""
    return Ground("compare", f"compare/{config}", f"methods=[metricopt] budgets=[20,60] {overrides}", **settings)


def finetuning(methods: str, overrides: str) -> Ground:
    """Other methods at toy size, as `tools/finetune_classifier.py` runs them."""
    toy = "pictures=false model.epochs=2 adapter.dim=4 population=8 finetune.steps=6 best_evals=2"
    return Ground("finetune_classifier", "classification/digits", f"methods=[{methods}] {toy} {overrides}")


SCENES = (
    "data.images=[60,12,16] scene.size=64 scene.digits=[1,2] scene.scale=[32,52] shift.contrast=0.6 model.steps=150"
    " model.batch_size=2 batch_size=1 finetune.steps=6 adapter.dim=4 seeds=1"
)
SMALL = "model.min_size=64 model.max_size=64 model.proposals=10"
SIBLINGS = (
    "siblings.trains=model siblings.threshold_evals=0 siblings.sl.iterations=20 siblings.sl.universal_steps=40"
    " siblings.sl.evals=4 siblings.reloss.training=48 siblings.reloss.heldout=12 siblings.reloss.checkpoints=3"
    " siblings.reloss.checkpoint_steps=20 siblings.reloss.loss_steps=20 siblings.reloss.loss_batches=16"
    " siblings.reloss.steps=20 siblings.reloss.evals=4 siblings.ala.iterations=40 siblings.ala.action_steps=10"
    " siblings.ala.reward_evals=2 siblings.ala.children=2"
)
VARIANTS = (
    "method.name=recipe method.evals=3 method.rounds=1 method.folds=2 method.trials=0 method.learners=[ridge]"
    " paper.evals=3 learned.evals=3 learned.tasks=2 learned.updates=2"
)
GROUNDS = {
    "digits": comparing("digits_plain", "model.epochs=3", quick=True),
    "longtail_f1": comparing("digits_longtail_f1", "model.epochs=30", quick=True),
    "longtail_worst": comparing("digits_longtail_worst", "model.epochs=30"),
    "digits_shifted": comparing("digits_shifted", "model.epochs=10"),
    "a9a_f1": comparing("a9a_f1", "model.epochs=3", data="a9a"),
    "retrieval": comparing("digits_retrieval", "model.epochs=8", quick=True),
    "omniglot": comparing("omniglot_plain", "model.epochs=2", data="omniglot"),
    "omniglot_shifted": comparing("omniglot_shifted", "model.epochs=2", data="omniglot"),
    "scenes": comparing(
        "scenes_shifted", f"model.min_size=64 model.max_size=64 model.proposals=10 {SCENES}", quick=True
    ),
    "detectron2": comparing(
        "scenes_shifted", f"config=configs/detection/scenes_detectron2.yaml {SCENES}", package="detectron2"
    ),
    "variants_20": finetuning("metricopt_paper,metricopt_learned", f"queries=20 {VARIANTS}"),
    "variants_60": finetuning("metricopt_paper,metricopt_learned", f"queries=60 {VARIANTS}"),
    "siblings": finetuning("sl_u,sl_s,sl_r,reloss,ala", f"queries=20 {SIBLINGS}"),
}
GROUNDS |= {
    f"{name}, quick": replace(ground, overrides=f"{ground.overrides} budgets=[20] seeds=1")
    for name, ground in GROUNDS.items()
    if ground.quick
}


def listen(told: Any) -> None:
    """Have ``told(tensors)`` hear of each point that a metric is asked for: phi, or the weights of a whole model.

    The one place that knows how the product tells of it. Judging an end, on validation or test data, asks no point.
    """
    from metricopt_ext.adapters.adapter import Adapter
    from metricopt_ext.errors import AdapterError
    from metricopt_ext.tasks.metric import Metric

    tell = Metric.tell

    def telling(self: Any, evaluation: Any, purpose: str, item: Any = None, *rest: Any, **more: Any) -> None:
        if purpose != "judge" and item is not None:
            try:
                told([Adapter(item).phi] if hasattr(item, "state_dict") else [item])
            except AdapterError:  # a model without phi
                told(item.state_dict().values())
        tell(self, evaluation, purpose, item, *rest, **more)

    Metric.tell = telling  # type: ignore[method-assign]


def read(folder: Path) -> dict[str, list[float]]:
    """Return validation and test by seed: of the best start and each budget, or of each method that asks the metric."""
    if (comparison := folder / "comparison.json").exists():
        content = json.loads(comparison.read_text())
        found = {"start": content["best_start"], **content["methods"]["metricopt"]["cells"]}
    else:
        methods = json.loads((folder / "report.json").read_text())["methods"]
        found = {name: each for name, each in methods.items() if name == "pretrained" or each["queries_total"]}
    return {f"{name} {part}": found[name][part] for name in found for part in ("validation", "test")}


def run(tool: str, folder: str, *arguments: str) -> None:
    """Run a tool in this process, whose environment is pinned already, and leave the digest of the points."""
    points = hashlib.sha256()
    listen(lambda tensors: [points.update(each.detach().cpu().numpy().tobytes()) for each in tensors])
    sys.argv = [tool, *arguments, "--output-dir", folder]
    importlib.import_module(f"metricopt_ext.tools.{tool}").main()
    (Path(folder) / "points").write_text(points.hexdigest()[:16])


def compute(ground: Ground, instructions: dict[str, str]) -> dict[str, Any]:
    """Run a ground in a process of its own and return what it reaches."""
    data = [f"data.root={data_folder(ground)}"] if ground.data else []
    usual = ["seeds=2", "workers=1", "device=cpu", *data]
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "run", ground.tool, folder]
        config = ["--config-file", str(ROOT / f"configs/{ground.config}.yaml")]
        began = processor_seconds()
        done = subprocess.run(
            [*command, *config, *usual, *ground.overrides.split()],
            env=os.environ | instructions,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(ground.overrides.split())}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        values = {name: [round(each, 6) for each in by_seed] for name, by_seed in read(Path(folder)).items()}
        points = (Path(folder) / "points").read_text()
        return {"values": values, "points": points, "seconds": round(processor_seconds() - began)}


def processor_seconds() -> float:
    """Return what the processes of grounds took so far; unlike the clock's, it is the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def data_folder(ground: Ground) -> Path:
    return Path(os.environ.get("METRICOPT_GOLDEN_DATA", "")).absolute() / ground.data


def missing(ground: Ground) -> str:
    """Say why a ground can't run here; empty if it can."""
    if ground.data and not ("METRICOPT_GOLDEN_DATA" in os.environ and data_folder(ground).is_dir()):
        return f"METRICOPT_GOLDEN_DATA names no folder that holds {ground.data}"
    return f"{ground.package} is not installed" if ground.package and not find_spec(ground.package) else ""


def versions() -> dict[str, str]:
    found = {"machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def spread(found: dict[str, list[float]], others: dict[str, list[float]]) -> float:
    """Return the largest difference of two runs; infinite where they don't have the same entries."""
    if {name: len(found[name]) for name in found} != {name: len(others[name]) for name in others}:
        return float("inf")
    return max(abs(a - b) for name in found for a, b in zip(found[name], others[name], strict=True))


def freeze(name: str) -> tuple[bool, str]:
    ground = GROUNDS[name]
    found, otherwise = compute(ground, PINNED), compute(ground, AVX2)
    moved = spread(found["values"], otherwise["values"])
    frozen = {**found, "tolerance": round(0.01 + 2 * moved, 3), "versions": versions()}
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    kept = {each: {**kept, name: frozen}[each] for each in GROUNDS if each in {**kept, name: frozen}}
    text = re.sub(r"(?<=[\[\d,])\s+(?=[-\d\]])", " ", json.dumps(kept, indent=1))  # a list stands in one line
    FILE.write_text(text.replace("[ ", "[").replace(" ]", "]") + "\n")
    return True, f"frozen, {frozen['seconds']} s; with AVX2 {moved:.4f} away"


def check(name: str) -> tuple[bool, str]:
    frozen = json.loads(FILE.read_text())[name]
    found = compute(GROUNDS[name], PINNED)
    away, installed = spread(found["values"], frozen["values"]), versions()
    others = [f"{each} {installed[each]}" for each in installed if installed[each] != frozen["versions"][each]]
    if others:
        kind, same = f"values within {frozen['tolerance']} ({', '.join(others)})", away <= frozen["tolerance"]
    else:
        kind, same = "same points and values", away < 2e-6 and found["points"] == frozen["points"]
    last = next(reversed(found["values"]))
    said = f"{last} {found['values'][last]}, {found['seconds']} s"
    return same, f"{kind}: {said}" if same else f"NOT {kind}: {away:.6f} away\n  {found}\n  {frozen}"


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "freeze"))
    parser.add_argument("--quick", action="store_true", help="those of CI: 20 queries and one seed")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GROUNDS))
    arguments = parser.parse_args()
    fitting = [name for name in GROUNDS if arguments.command == "freeze" or name.endswith(", quick") == arguments.quick]
    failed = False
    for name in arguments.names or fitting:
        if reason := missing(GROUNDS[name]):
            print(f"{name:24}skipped: {reason}", flush=True)
            continue
        try:
            good, said = {"check": check, "freeze": freeze}[arguments.command](name)
        except RuntimeError as error:
            good, said = False, f"FAILED: {error}"
        failed |= not good
        print(f"{name:24}{said}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
