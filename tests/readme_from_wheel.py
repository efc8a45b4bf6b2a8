"""Run the README's code and two commands by what is installed; ``make test-wheel`` does.

Usage: python readme_from_wheel.py README.md, in an empty folder. What they take as given is made here: a network and
data, a checkpoint and what evaluates it, and a folder of tables.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18

import metricopt_ext

COMMANDS = (
    "finetune-classifier --config-file configs/classification/a9a.yaml --output-dir out/a9a data.root=tables"
    " metric.name=f1 queries=20 seeds=1 device=cpu",
    "tune-checkpoint --checkpoint model.pth --score 'python evaluate.py --weights {checkpoint}' --output tuned.pth"
    " --parse 'accuracy: ([0-9.]+)' --queries 20 --output-dir out/tuned",
)
EVALUATE = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--weights")
weights = torch.load(parser.parse_args().weights, weights_only=True)
print("accuracy:", round(float(1 / (1 + (weights["1.weight"] - 1.5).square().mean())), 6))
"""


def given() -> dict[str, Any]:
    """Return what the README's Python takes as given."""
    torch.manual_seed(0)
    model, x, y = resnet18(num_classes=2).eval(), torch.randn(96, 3, 32, 32), torch.arange(96) % 2

    def validation_f1(model: nn.Module) -> tuple[float, tuple[float, float]]:
        right = (model(x[64:]).argmax(1) == y[64:]).double()
        return float(right.mean()), (float(right[::2].mean()), float(right[1::2].mean()))

    return {"F": F, "model": model, "x_train": x[:64], "y_train": y[:64], "validation_f1": validation_f1}


def write_files() -> None:
    """Write what the commands take as given."""
    torch.manual_seed(0)
    Path("evaluate.py").write_text(EVALUATE)
    torch.save(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).state_dict(), "model.pth")
    Path("tables").mkdir()
    for name, rows in (("a9a", 300), ("a9a.t", 100)):
        x = torch.randn(rows, 5)
        y = (x.sum(1) + torch.randn(rows) > 0).tolist()
        lines = [
            " ".join(["+1" if label else "-1", *(f"{i + 1}:{value:.3f}" for i, value in enumerate(row))])
            for row, label in zip(x.tolist(), y, strict=True)
        ]
        (Path("tables") / name).write_text("\n".join(lines) + "\n")


def main(readme: Path) -> None:
    """Run the Python block, then the commands."""
    installed = Path(metricopt_ext.__file__).resolve().parent
    assert installed != readme.resolve().parent / "metricopt_ext", "it is the checkout's, not an installed one"
    (script,) = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.S | re.M)
    assert "queries=150" in script
    exec(compile(script.replace("queries=150", "queries=20"), str(readme), "exec"), given())
    write_files()
    programs = Path(sys.executable).parent
    for command in COMMANDS:
        print(f"$ metricopt {command}", flush=True)
        path = os.pathsep.join([str(programs), os.environ["PATH"]])
        subprocess.run([programs / "metricopt", *shlex.split(command)], check=True, env={**os.environ, "PATH": path})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
