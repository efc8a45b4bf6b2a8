"""Finetune a detector for AP50, and say what that was worth.

    python tools/finetune_detector.py --config-file configs/detection/scenes_torchvision.yaml --output-dir out/scenes
    python tools/finetune_detector.py --toolkit detectron2 --config-file configs/detection/bccd_detectron2.yaml \
        --output-dir out/bccd data.root=FOLDER

Writes report.json, report.md and plots, and for each seed detector, adapter, value function and trajectories.
"""

from pathlib import Path

from metricopt_ext.detection.build import TOOLKITS, build_toolkit, check_definition
from metricopt_ext.detection.config import DetectionConfig
from metricopt_ext.detection.experiment import DetectionExperiment
from metricopt_ext.evidence.cli import main_of, run_and_report
from metricopt_ext.evidence.report import Report


def main() -> None:
    """Parse the command line, run all seeds, report."""
    main_of(__doc__, DetectionConfig, run, "model.steps=500 data.root=FOLDER", choices={"toolkit": TOOLKITS})


def run(config: DetectionConfig, folder: Path, resume: bool) -> Report:
    """Run every seed and write the report; returns it."""
    config.check()
    check_definition(config)
    build_toolkit(config)
    model = config.model.name if config.toolkit == "torchvision" else Path(config.model.config_file).stem
    data = config.data.name if config.shift.is_none else f"shifted {config.data.name}"
    return run_and_report(
        config,
        folder,
        resume,
        DetectionExperiment,
        task=f"detection/{config.data.name}",
        title=f"{config.toolkit}'s {model} on {data}",
        metric="AP50",
        maximize=True,
    )


if __name__ == "__main__":
    main()
