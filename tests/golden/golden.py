"""Golden numbers: what the tools compute today, to the last bit where the same packages compute it.

    python tests/golden/golden.py check [--quick] [NAME...]
    python tests/golden/golden.py freeze [NAME...]

Each ground is a command of a tool at small size, run with the instructions that every x86-64 processor has and on one
thread. golden.json keeps the metric that it reaches, a digest of the points that it asks the metric for, and the
seconds of a processor. With the versions that it was frozen with, on a processor of the same maker, check compares both
exactly; else the metric alone, within the ground's tolerance. Freezing also runs each ground with AVX2, to see how far
rounding alone carries the metric. METRICOPT_GOLDEN_DATA=FOLDER holds what no package brings: the folders a9a and
omniglot.
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
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FILE, ROOT = Path(__file__).with_name("golden.json"), Path(__file__).parents[2]
DATA, PACKAGES = ("a9a", "omniglot"), ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "faiss-cpu")

# How any x86-64 processor computes, and how those of the last ten years do.
PINNED = (
    "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=PRESCOTT"
    " FAISS_OPT_LEVEL=generic NPY_DISABLE_CPU_FEATURES=X86_V3,X86_V4,AVX512_ICL,AVX512_SPR"
)
AVX2 = "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 OPENBLAS_CORETYPE=HASWELL FAISS_OPT_LEVEL=avx2"

USUAL = "seeds=2 workers=1 device=cpu"
SCENES = (
    "data.images=[60,12,16] scene.size=64 scene.digits=[1,2] scene.scale=[32,52] shift.contrast=0.6 model.steps=150"
    " model.batch_size=2 batch_size=1 finetune.steps=6 adapter.dim=4"
)
DETECTRON2 = "configs/detection/scenes_detectron2.yaml"
TOY = "model.epochs=2 adapter.dim=4 population=8 finetune.steps=6 best_evals=2"
ROWS = "loss_finetune_best,class_offsets,logit_adjustment_tuned"
VARIANTS = (
    f"methods=[metricopt_paper,metricopt_learned,{ROWS}] {TOY} method.name=recipe method.evals=3 method.rounds=1"
    " method.folds=2 method.trials=0 paper.evals=3 learned.evals=3 learned.tasks=2"
    " learned.updates=2"
)
SIBLINGS = (
    f"methods=[sl_u,sl_s,sl_r,reloss,ala,{ROWS}] {TOY} queries=20 siblings.trains=model siblings.threshold_evals=0"
    " siblings.sl.iterations=20 siblings.sl.universal.steps=40 siblings.sl.evals=4 siblings.reloss.steps=20"
    " siblings.reloss.source.training=48 siblings.reloss.source.heldout=12 siblings.reloss.source.checkpoints.count=3"
    " siblings.reloss.source.checkpoints.steps=20 siblings.reloss.training.steps=20 siblings.reloss.training.batches=16"
    " siblings.reloss.evals=4 siblings.ala.iterations=40 siblings.ala.action_steps=10 siblings.ala.reward_evals=2"
    " siblings.ala.children=2"
)
OURS = "benchmarks/configs/compare"
COMPARED = {  # config and overrides of tools/compare.py, for MetricOpt's search at 20 and 60 queries
    "digits": f"{OURS}/digits_plain.yaml model.epochs=3",
    "longtail_f1": f"{OURS}/digits_longtail_f1.yaml model.epochs=30",
    "longtail_worst": f"{OURS}/digits_longtail_worst.yaml model.epochs=30",
    "digits_shifted": "configs/compare/digits_shifted.yaml model.epochs=10",
    "a9a_f1": f"{OURS}/a9a_f1.yaml model.epochs=3",
    "retrieval": f"{OURS}/digits_retrieval.yaml model.epochs=8",
    "omniglot": f"{OURS}/omniglot_plain.yaml model.epochs=2",
    "omniglot_shifted": f"{OURS}/omniglot_shifted.yaml model.epochs=2",
    "scenes": f"{OURS}/scenes_shifted.yaml model.min_size=64 model.max_size=64 model.proposals=10 {SCENES}",
    "detectron2": f"{OURS}/scenes_shifted.yaml config={DETECTRON2} model.opts=[INPUT.MIN_SIZE_TEST,'64'] {SCENES}",
}
QUICK = ("digits", "longtail_f1", "retrieval", "scenes")
GROUNDS = {
    **{name: f"compare {own} methods=[metricopt] budgets=[20,60]" for name, own in COMPARED.items()},
    "variants_20": f"finetune_classifier configs/classification/digits.yaml queries=20 {VARIANTS}",
    "variants_60": f"finetune_classifier configs/classification/digits.yaml queries=60 {VARIANTS}",
    "siblings": f"finetune_classifier configs/classification/digits.yaml {SIBLINGS}",
}
GROUNDS |= {f"{name}, quick": f"{GROUNDS[name]} budgets=[20] seeds=1" for name in QUICK}


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


def run(tool: str, folder: str, *arguments: str) -> None:
    """Run a tool in this process, whose environment is pinned already, and leave the digest of the points."""
    points = hashlib.sha256()
    listen(lambda tensors: [points.update(each.detach().cpu().numpy().tobytes()) for each in tensors])
    sys.argv = [tool, *arguments, "--output-dir", folder]
    importlib.import_module(f"metricopt_ext.tools.{tool}").main()
    (Path(folder) / "points").write_text(points.hexdigest()[:16])


def read(folder: Path) -> dict[str, list[float]]:
    """Return validation and test by seed: of the best start and each budget, or of each method that asks the metric."""
    if (comparison := folder / "comparison.json").exists():
        content = json.loads(comparison.read_text())
        found = {"start": content["best_start"], **content["methods"]["metricopt"]["cells"]}
    else:
        methods = json.loads((folder / "report.json").read_text())["methods"]
        found = {name: each for name, each in methods.items() if name == "pretrained" or each["queries_total"]}
    names = [(name, part) for name in found for part in ("validation", "test")]
    return {f"{name} {part}": [round(each, 6) for each in found[name][part]] for name, part in names}


def folder_of(name: str) -> Path | None:
    """Return the folder of the data that a ground needs and no package brings; None if there is none."""
    needed = next((each for each in DATA if name.startswith(each)), None)
    return needed and Path(os.environ.get("METRICOPT_GOLDEN_DATA", "missing")).absolute() / needed


def missing(name: str) -> str:
    """Say why a ground can't run here; empty if it can."""
    if (folder := folder_of(name)) and not folder.is_dir():
        return f"METRICOPT_GOLDEN_DATA names no folder that holds {folder.name}"
    return "Detectron2 is not installed" if name == "detectron2" and not find_spec(name) else ""


def compute(name: str, instructions: str) -> dict[str, Any]:
    """Run a ground in a process of its own and return what it comes to."""
    tool, config, *overrides = GROUNDS[name].split()
    data = [f"data.root={folder}"] if (folder := folder_of(name)) else []
    settings = dict(each.split("=") for each in f"{instructions} OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=".split())
    environment = os.environ | settings | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    with TemporaryDirectory() as out:
        command = [sys.executable, __file__, "run", tool, out, "--config-file", str(ROOT / config)]
        before = seconds()
        done = subprocess.run(
            [*command, *USUAL.split(), *data, *overrides], env=environment, cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        points = (Path(out) / "points").read_text()
        return {"values": read(Path(out)), "points": points, "seconds": round(seconds() - before)}


def seconds() -> float:
    """Return what the processes of grounds took so far; unlike the clock's, it is the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def versions() -> dict[str, str]:
    return {"machine": f"{platform.machine()} {maker()}", **{name: version(name) for name in PACKAGES}}


def maker() -> str:
    """The processor's maker: another's rounds otherwise in the last place, whichever instructions it is held to."""
    told = Path("/proc/cpuinfo")
    found = re.search(r"vendor_id\s*:\s*(\S+)", told.read_text()) if told.exists() else None
    return found[1] if found else "unknown"


def away(found: dict[str, list[float]], others: dict[str, list[float]]) -> float:
    """Return the largest difference of two runs; infinite where they don't have the same entries."""
    if {name: len(found[name]) for name in found} != {name: len(others[name]) for name in others}:
        return float("inf")
    return max(abs(a - b) for name in found for a, b in zip(found[name], others[name], strict=True))


def freeze(name: str) -> tuple[bool, str]:
    found = compute(name, PINNED)
    moved = away(found["values"], compute(name, AVX2)["values"])
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    kept[name] = {**found, "tolerance": round(0.01 + 2 * moved, 3), "versions": versions()}
    text = json.dumps({each: kept[each] for each in GROUNDS if each in kept}, indent=1)
    FILE.write_text(re.sub(r"\[[^]]*\]", lambda by_seed: " ".join(by_seed[0].split()), text) + "\n")
    return True, f"frozen, {found['seconds']} s; with AVX2 {moved:.4f} away"


def check(name: str) -> tuple[bool, str]:
    frozen, found, installed = json.loads(FILE.read_text())[name], compute(name, PINNED), versions()
    distance, last = away(found["values"], frozen["values"]), next(reversed(found["values"]))
    others = [f"{each} {installed[each]}" for each in installed if installed[each] != frozen["versions"][each]]
    if others:
        kind, same = f"values within {frozen['tolerance']} ({', '.join(others)})", distance <= frozen["tolerance"]
    else:
        kind, same = "same points and values", found["points"] == frozen["points"] and distance < 2e-6
    if same:
        return True, f"{kind}: {last} {found['values'][last]}, {found['seconds']} s"
    return False, f"NOT {kind}: {distance:.6f} away\n  found  {found}\n  frozen {frozen}"


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "freeze"))
    parser.add_argument("--quick", action="store_true", help="those of CI: 20 queries and one seed")
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(GROUNDS))
    arguments = parser.parse_args()
    freezing, failed = arguments.command == "freeze", False
    for name in arguments.names or [each for each in GROUNDS if freezing or ("quick" in each) == arguments.quick]:
        if reason := missing(name):
            print(f"{name:20}skipped: {reason}", flush=True)
            continue
        try:
            same, said = freeze(name) if freezing else check(name)
        except RuntimeError as error:
            same, said = False, f"FAILED: {error}"
        failed |= not same
        print(f"{name:20}{said}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
