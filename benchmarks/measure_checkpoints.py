r"""Measure whether the average of a detector's own last checkpoints is better than the last one.

    python benchmarks/measure_checkpoints.py --config-file configs/detection/scenes_torchvision.yaml \
        --output-dir out/checkpoints seed=21000 seeds=5

Each seed trains a detector and keeps --checkpoints of it, evenly over the second half of its training, the last at the
end. Their average is judged beside the last one, on validation and on test; so is whichever validation prefers. Writes
checkpoints.json and checkpoints.md. The same command goes on with an interrupted run, seed by seed, and adds seeds to a
finished one.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from kept import kept_json
from metricopt_ext.adapters.start import Start
from metricopt_ext.data.pretrained import pretrained
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.cli import RUNS_CODE, experiment_of
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.compare import judge
from metricopt_ext.experiment.output_folder import open_run
from metricopt_ext.experiment.seeds import paired_interval, spread
from metricopt_ext.experiment.style import markdown_table, print_table
from metricopt_ext.methods.soups import soup_starts
from metricopt_ext.plain import in_markdown
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.parallel import run_seeds
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import save_checkpoint, write_atomically, write_json
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.versions import versions
from metricopt_ext.utils.words import counted

PARTS = ("validation", "test")
KINDS = {"last": dict, "soup": dict, "better": str}  # of a seed's file


def main() -> None:
    """Parse the command line, run all seeds, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", required=True, help="YAML file of tools/finetune_detector.py")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("--checkpoints", type=int, default=5, help="how many to average, 2 or more")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. seeds=5 data.root=FOLDER")
    arguments = parser.parse_intermixed_args()
    with errors_in_one_line(ValueError):
        config = load_config(experiment_of("detection").config_type, arguments.config_file, arguments.overrides)
        measure_checkpoints(config, arguments.checkpoints, arguments.output_dir)


def measure_checkpoints(config: Any, count: int, folder: Path) -> dict[str, Any]:
    """Run every seed and write the report; returns its content.

    Raises:
        ConfigError: Nothing is trained, or a training is too short for as many checkpoints.
    """
    config.check()
    if not 2 <= count <= config.model.steps // 2:
        raise ConfigError(
            f"--checkpoints {count} of the second half of {counted(config.model.steps, 'step')} of training"
            " (model.steps): they must be at least 2, and no more than there are steps in it"
        )
    subject = experiment_of("detection").describe(config)
    sign = 1 if subject.maximize else -1
    with sole_writer(folder):
        machine = Machine.current(choose_device(config.device), config.threads)
        settings = {**config.as_dict(), "checkpoints": count, "computed_on": str(machine)}
        open_run(folder, settings, resume=True, files=config.data_files())
        rows = run_seeds(
            partial(run_seed, config, count, sign, folder),
            range(config.seed, config.seed + config.seeds),
            queries=2,
            workers=config.workers,
            threads=config.threads,
        )
    last, soup, better = (
        {part: [row[row["better"] if name == "better" else name][part] for row in rows] for part in PARTS}
        for name in ("last", "soup", "better")
    )
    header, table = ["model", "validation", "test", "test, above the last", "95% interval"], []
    for name, values in {"the last": last, f"average of {count}": soup, "validation's choice": better}.items():
        gain = paired_interval([sign * (b - a) for a, b in zip(last["test"], values["test"], strict=True)])
        known = len(rows) > 1 and values is not last
        table.append(
            [
                name,
                *(spread(values[part]) for part in PARTS),
                f"{gain.mean:+.4f}" if values is not last else "",
                f"[{gain.low:+.4f}, {gain.high:+.4f}]" if known else "",
            ]
        )
    content = {
        "task": subject.task,
        "metric": {"name": subject.metric, "maximize": subject.maximize},
        "checkpoints": count,
        "per_seed": rows,
        "gain": float(np.mean(soup["test"]) - np.mean(last["test"])) * sign,
        "machine": vars(machine),
        "versions": versions(),
        "config": config.as_dict(),
    }
    title = f"{subject.title}: {subject.metric} of the last checkpoints, {counted(len(rows), 'seed')}"
    write_json(folder / "checkpoints.json", content)
    write_atomically(
        folder / "checkpoints.md",
        "\n".join([f"# {in_markdown(title)}", "", *markdown_table(header, table), ""]).encode(),
    )
    print_table(header, table, title=title)
    return content


def run_seed(config: Any, count: int, sign: int, folder: Path, seed: int, callback: Callback) -> dict[str, Any]:
    """Return what comes out for a seed, from its file if it is there."""
    own = folder / f"seed-{seed}"
    row = kept_json(own / "row.json", KINDS, lambda: {"seed": seed, **judged(config, count, sign, own, seed, callback)})
    callback.done()
    return row


def judged(config: Any, count: int, sign: int, folder: Path, seed: int, callback: Callback) -> dict[str, Any]:
    """Train a detector, and judge its end and the average of its checkpoints."""
    files = train_in_parts(config, count, folder, seed, callback)
    experiment = experiment_of("detection")(config, folder, seed)  # of the model that was just trained
    task = experiment.task
    (soup,) = soup_starts(task, files, kinds=["uniform"], callback=callback).values()
    tasks = dict(zip(PARTS, (task, task.judged_by(experiment.test_metric)), strict=True))
    values: dict[str, Any] = {
        name: {part: judge(each, start) for part, each in tasks.items()}
        for name, start in {"last": Start(task.origin()), "soup": soup}.items()
    }
    better = sign * values["soup"]["validation"] > sign * values["last"]["validation"]
    return {**values, "better": "soup" if better else "last"}


def train_in_parts(config: Any, count: int, folder: Path, seed: int, callback: Callback) -> list[Path]:
    """Train a detector as the tool does, into ``folder``, and return the files of its checkpoints, the last at the end.

    A killed training begins again, as its checkpoints are not all there.
    """
    from metricopt_ext.detection.build import build_toolkit  # whose torchvision may be missing: `experiment_of` says so
    from metricopt_ext.detection.data import load_splits
    from metricopt_ext.detection.task import ExampleBatches
    from metricopt_ext.detection.train import train_detector

    (folder / "model.safetensors").unlink(missing_ok=True)
    toolkit, splits, steps = build_toolkit(config), load_splits(config, seed, folder), config.model.steps
    kept = {steps - i * (steps // 2) // count: folder / f"checkpoint_{count - i}.safetensors" for i in range(count)}

    def train(model: nn.Module, _: Path) -> None:
        options: dict[str, Any] = {"steps": steps, "lr": config.model.lr, "seed": seed}
        batches = ExampleBatches(splits.train, config.model.batch_size)
        train_detector(toolkit, model, batches, **options, callback=Keeper(model, kept, callback))

    pretrained(
        lambda: toolkit.build(len(splits.classes), seed),
        train,
        check=lambda _: None,
        weights="",
        folder=folder,
        seed=seed,
        device=choose_device(config.device),
    )
    return [kept[step] for step in sorted(kept)]


class Keeper(Callback):
    """Writes a model's weights after some steps of its training.

    Args:
        model: The model.
        files: Where, by the number of steps taken.
        callback: Notified of the training's progress.
    """

    def __init__(self, model: nn.Module, files: dict[int, Path], callback: Callback) -> None:
        self._model, self._files, self._callback = model, files, callback

    def stage(self, description: str) -> None:
        """Pass it on."""
        self._callback.stage(description)

    def goes_on(self, taken: int, left: int, seconds: float) -> bool:
        """Write the weights if it is time to."""
        if file := self._files.get(taken):
            save_checkpoint(file, self._model.state_dict())
        return True


if __name__ == "__main__":
    main()
