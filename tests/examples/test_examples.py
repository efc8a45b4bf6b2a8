"""Each script of `examples`, run as it is on little training, and the counts of its marked lines."""

import ast
import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import joblib
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
COMPARED = "three_ways.py"  # a comparison, and no script of a user that was changed
EXAMPLES = sorted({path.name for path in (ROOT / "examples").glob("*.py")} - {COMPARED})
LINES = 60  # of scripts that show the parts
# One has what is a file of its own otherwise, the other has two ways to ask and tell, which it compares.
MORE_LINES = {"detectron2_lazy.py": 80, "ray_workers.py": 90}

# Hosts' own scripts, and how few of their lines may change beside those of the metric itself.
HOSTS = (
    *("imagenet_trainer", "lightning_classifier", "huggingface_text", "accelerate_loop", "torchvision_detection"),
    *("pml_trainer", "sklearn_table"),
)
HOSTS_LINES, HOSTS_CHANGED = 80, 3

# What makes a run short, and the checkpoint that it leaves.
RUNS = {
    "plain_loop": (["plain_loop.py", "--epochs", "2", "--queries", "20"], "plain_loop.pth"),
    "regression": (["regression.py", "--epochs", "5", "--queries", "20"], "regression.pth"),
    "generation": (["generation.py", "--epochs", "1", "--queries", "20"], "generation"),
    "optuna_search": (["optuna_search.py"], "optuna_search.pth"),
    "ray_workers": (["ray_workers.py"], "ray_workers.pth"),
    "lightning_follow": (["lightning_follow.py", "--epochs", "2", "--queries", "20"], "lightning_follow.pth"),
    "pml_follow": (["pml_follow.py", "--epochs", "1", "--queries", "20"], "pml_follow.pth"),
    **{
        f"timm_model-{name}": (["timm_model.py", "--model", name, "--epochs", "1", "--queries", "20"], "timm_model.pth")
        for name in ("test_resnet", "test_efficientnet_gn", "test_convnext")  # BatchNorm, GroupNorm, LayerNorm
    },
}

# Less data than a script has, where it spends seconds on them.
SMALLER = {
    "generation.py": {
        "range(4000), range(4000, 4400), range(5000, 7000)": "range(400), range(400, 500), range(5000, 5100)"
    },
    "timm_model.py": {"slice(800, 1300), slice(1300, None)": "slice(800, 900), slice(1700, None)"},
    "optuna_search.py": {"queries=100": "queries=20"},
    "imagenet_trainer.py": {"images[:1300]": "images[:400]", "i >= 900": "i >= 300", "i < 900": "i < 300"},
    "torchvision_detection.py": {"range(1000, 1040)": "range(1000, 1020)", "range(2000, 2060)": "range(2000, 2020)"},
}


def text_of(script: str) -> str:
    """Return an example with less data."""
    text = (ROOT / "examples" / script).read_text()
    for long, short in SMALLER.get(script, {}).items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    return text


DETECTRON2 = {
    name: pytest.param([f"{name}.py", "--steps", "4", "--queries", "16"], left, marks=pytest.mark.detectron2, id=name)
    for name, left in (("detectron2_loop", "detectron2_loop.pth"), ("detectron2_trainer", "out/tuned/model_merged.pth"))
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "left"), [*(pytest.param(*run, id=name) for name, run in RUNS.items()), *DETECTRON2.values()]
)
def test_script_ends_with_an_ordinary_checkpoint(
    command: list[str],
    left: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = command[0]
    if script.startswith("ray"):
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
    if script.startswith("detectron2"):
        request.getfixturevalue("catalog")  # both scripts register the same names
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command)
    path = ROOT / "examples" / script
    if script in SMALLER:
        path = tmp_path / script
        path.write_text(text_of(script))
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"-> \d\.\d{4}(, unguarded)?; kept ", printed), printed  # the result in its own words
    assert not script.startswith("ray") or re.search(r"a worker died(.*\n)+the same as in one process: True", printed)
    if left.endswith(".pth"):
        state = torch.load(tmp_path / left)
        names = {name for part in state.values() for name in (part if isinstance(part, dict) else state)}
        assert names
        assert not [name for name in names if "metricopt" in name]
    else:
        assert (tmp_path / left).exists()


@pytest.mark.slow
@pytest.mark.detectron2
def test_a_trainer_by_lazyconfig_is_searched_and_meta_trained(
    tmp_path: Path, catalog: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On few images, judged by the mean score, as so few steps find nothing."""
    evaluation = importlib.import_module("detectron2.evaluation")
    sets: list[tuple[str, int]] = []

    def mean_score(self: Any, img_ids: Any = None) -> dict[str, Any]:
        found = [each["score"] for image in self._predictions for each in image["instances"]]
        sets.append((self._metadata.name, len(self._predictions)))
        return {"bbox": {"AP50": 100 * sum(found) / max(len(found), 1)}}

    monkeypatch.setattr(evaluation.COCOEvaluator, "evaluate", mean_score)
    smaller = {
        "detectron2_lazy.py": {"images=(400, 80, 100)": "images=(6, 5, 3)", "= 2, 20, 4": "= 2, 6, 2"},
        "detectron2_small.yaml": {"ROI_HEADS: {": "ROI_HEADS: {SCORE_THRESH_TEST: 0.0, "},
    }
    for name, changes in smaller.items():
        text = (ROOT / "examples" / name).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["detectron2_lazy.py", "--steps", "4", "--queries", "20"])
    with torch.random.fork_rng():
        runpy.run_path(str(tmp_path / "detectron2_lazy.py"), run_name="__main__")
    assert set(sets) == {("test", 3), ("val", 5)}
    assert sets[0] == ("test", 3)
    printed = capsys.readouterr().out
    assert re.search(r"val/bbox/AP50: \d+\.\d{4} -> \d+\.\d{4}(, unguarded)?; kept ", printed), printed
    assert "f of meta-training: " in printed
    merged = torch.load(tmp_path / "out" / "model_merged.pth")["model"]
    assert not [name for name in merged if "metricopt" in name]
    assert (tmp_path / "f.safetensors").exists()


def marked(script: str, mark: str) -> int:
    """How many lines of a script end in a mark."""
    return sum(line.endswith(f"  # {mark}") for line in (ROOT / "examples" / script).read_text().splitlines())


def row_of(script: str) -> list[str]:
    """The cells of a script's row in the table."""
    (row,) = [line for line in (ROOT / "examples" / "README.md").read_text().splitlines() if f"| `{script}` |" in line]
    return [cell.strip() for cell in row.strip("| ").split(" |")]


@pytest.mark.parametrize("script", [name for name in EXAMPLES if Path(name).stem not in HOSTS])
def test_the_table_states_what_changed(script: str) -> None:
    lines = len((ROOT / "examples" / script).read_text().splitlines())
    assert lines <= MORE_LINES.get(script, LINES)
    counts = [int(cell) for cell in row_of(script)[2:] if cell.isdigit()]
    searched, followed = marked(script, "+"), marked(script, "++")
    assert searched > 0
    assert counts == [lines, searched, *([searched + followed] if followed else [])]


@pytest.mark.parametrize("host", HOSTS)
def test_a_hosts_script_changes_in_three_lines(host: str) -> None:
    text = (ROOT / "examples" / f"{host}.py").read_text()
    lines = len(text.splitlines())
    assert lines <= HOSTS_LINES
    assert 0 < marked(f"{host}.py", "+") <= HOSTS_CHANGED
    assert [int(cell) for cell in row_of(f"{host}.py")[2:5]] == [
        lines,
        marked(f"{host}.py", "+"),
        marked(f"{host}.py", "metric"),
    ]
    ours = [line for line in text.splitlines() if "metricopt" in line or "tune_" in line or "SearchPhi(" in line]
    assert ours
    assert not [line for line in ours if not line.endswith("  # +")]  # none is left unmarked


class Ran:
    """A host's script that was run with fewer queries, on less data: its names, and what it printed.

    Args:
        host: The script.
        folder: Where it ran, and where its copy is.
        arguments: Those of its command line.
    """

    def __init__(self, host: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> None:
        text = text_of(f"{host}.py")
        assert "queries=60" in text
        script = folder / f"{host}.py"
        script.write_text(text.replace("queries=60", "queries=20"))
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [script.name, *arguments])
        with torch.random.fork_rng():
            try:
                self.names = runpy.run_path(str(script), run_name="__main__")
            except SystemExit as left:
                print(left)
        self.printed = capsys.readouterr().out

    def value(self, before: str) -> float:
        """Return the last number that was printed after some words."""
        *_, found = re.findall(rf"{before}(\d\.\d+)", self.printed)
        return float(found)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda host, *arguments: Ran(host, tmp_path, monkeypatch, capsys, *arguments)


def plain(state: dict[str, Any]) -> bool:
    """Whether a state dict has the names of a model without an adapter."""
    return bool(state) and not [name for name in state if "metricopt" in name]


@pytest.mark.slow
def test_the_imagenet_trainer_resumes_the_tuned_model(ran: Any) -> None:
    tuned = ran("imagenet_trainer", "--epochs", "2")
    again = ran("imagenet_trainer", "--evaluate", "--resume", "model_best.pth.tar")
    assert again.value("mean recall: ") == tuned.value("-> ")
    assert plain(torch.load("model_best.pth.tar")["state_dict"])


@pytest.mark.slow
def test_lightnings_checkpoint_is_the_tuned_model(ran: Any) -> None:
    tuned = ran("lightning_classifier", "--epochs", "3")
    module = tuned.names["ImageClassifier"].load_from_checkpoint("lightning_classifier.ckpt")
    data = tuned.names["Digits"]()
    data.setup("validate")
    assert float(module.f1(*data.sets["val"].tensors)) == pytest.approx(tuned.names["search"].run.after, abs=1e-6)


@pytest.mark.slow
def test_what_the_trainer_saves_is_the_tuned_model(ran: Any) -> None:
    tuned = ran("huggingface_text", "--epochs", "3")
    assert tuned.value("test, after: ") == tuned.value("of what was saved: ")


@pytest.mark.slow
def test_processes_judge_their_shards_of_the_data(ran: Any, forked: Any, tmp_path: Path) -> None:
    one = ran("accelerate_loop", "--epochs", "3")
    assert plain(torch.load("accelerate_loop.pth"))
    Path("accelerate_loop.pth").unlink()
    two = forked((tmp_path / "accelerate_loop.py").read_text(), 2, "--epochs", "3")
    for printed in (one.printed, two):
        assert len(re.findall(r"macro recall on test, after: \d\.\d{4}", printed)) == 1
        assert len(re.findall(r"-> \d\.\d{4}; kept ", printed)) == 1
    assert plain(torch.load("accelerate_loop.pth"))


@pytest.mark.slow
def test_the_detectors_checkpoint_is_the_tuned_model(ran: Any) -> None:
    tuned = ran("torchvision_detection", "--epochs", "5")
    again = ran("torchvision_detection", "--test-only", "torchvision_detection.pth")
    assert again.value("AP50 on test: ") == tuned.value("AP50 on test, after: ")
    assert plain(torch.load("torchvision_detection.pth")["model"])


@pytest.mark.slow
def test_the_trunk_is_tuned(ran: Any) -> None:
    tuned = ran("pml_trainer", "--epochs", "1")
    states = torch.load("pml_trainer.pth")
    assert plain(states["trunk"])
    assert tuned.names["trunk"].state_dict().keys() == states["trunk"].keys()
    assert re.search(r"-> \d\.\d{4}; kept ", tuned.printed)


@pytest.mark.slow
def test_the_pipeline_is_tuned(ran: Any) -> None:
    tuned = ran("sklearn_table", "--epochs", "2")
    loaded, rows = joblib.load("sklearn_table.joblib"), tuned.names["X"]
    assert (loaded.predict(rows) == tuned.names["pipeline"].predict(rows)).all()
    assert 0 < tuned.value("cross-validation: ") < 1


def test_every_script_is_run() -> None:
    parts = {command[0] for command, _ in RUNS.values()} | {f"{name}.py" for name in DETECTRON2} | set(MORE_LINES)
    assert parts | {f"{host}.py" for host in HOSTS} == set(EXAMPLES)


@pytest.mark.slow
def test_three_ways_do_one_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [COMPARED, "--queries", "20", "--seeds", "0"])
    with torch.random.fork_rng():
        script = runpy.run_path(str(ROOT / "examples" / COMPARED), run_name="__main__")
    printed = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = {cells[0].removeprefix("| "): cells[1] for cells in printed[1:]}
    assert rows == {"the trained model": "0", **dict.fromkeys(script["WAYS"], "20")}
    table = (ROOT / "benchmarks/results/search.md").read_text()
    assert not [name for name in rows if f"| {name} |" not in table]


def test_each_of_the_three_ways_takes_forty_lines_at_most() -> None:
    tree = ast.parse((ROOT / "examples" / COMPARED).read_text())
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert lines.keys() == {"by_cma", "by_tpe", "by_search"}
    assert max(lines.values()) <= 40
