"""Whose a folder is: fingerprints of weights, code and files, and one writer at a time."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.identity import (
    FIRST_LOSS,
    claim,
    fingerprint,
    fingerprint_of_code,
    fingerprint_of_files,
    sole_writer,
)

STATE: dict[str, Any] = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(4),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0),
}


def test_the_same_state_has_the_same_fingerprint() -> None:
    assert len(fingerprint(STATE)) == 16
    strided = STATE["weight"].T.contiguous().T
    kept_otherwise = {**STATE, "weight": torch.nn.Parameter(strided), "_extra_state": "no tensor"}
    assert fingerprint(dict(reversed(kept_otherwise.items()))) == fingerprint(STATE)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.tensor([[0.0, 1, 2], [3, 4, 5.000001]])},
        {"weight": torch.arange(6.0).reshape(3, 2)},
        {"half": torch.ones(3, dtype=torch.float16)},
        {"count": torch.tensor(5)},
        {"mask": torch.tensor([False, True])},
        {"more": torch.zeros(0)},
    ],
)
def test_another_state_has_another_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint({**STATE, **change}) != fingerprint(STATE)


def test_processors_may_round_differently(tmp_path: Path) -> None:
    claim(tmp_path / "identity.json", {"steps": 3, "loss": 0.25, "of": {"each": [0.5, 1.0]}})
    claim(tmp_path / "identity.json", {"steps": 3, "loss": 0.250001, "of": {"each": [0.500001, 1.0]}})
    for other, names in [
        ({"loss": 0.2502}, ("loss", "0.25", "0.2502")),
        ({"steps": 4}, ("steps", "3", "4")),
        ({"of": {"each": [0.5, 1.1]}}, ("of.each", "0.5", "1.0", "1.1")),
        ({"of": {"each": [0.5]}}, ("of.each",)),
        ({"of": {"all": [0.5, 1.0]}}, ("of.all", "nothing", "0.5", "1.0")),
        ({"of": {"each": [0.5, 1.0], "all": None}}, ("of.all", "nothing", "None")),
        ({"of": 3}, ("each", "0.5", "1.0", "3")),
        ({"more": 1}, ("more", "None", "1")),
    ]:
        with pytest.raises(FileFormatError) as caught:
            claim(tmp_path / "identity.json", {"steps": 3, "loss": 0.25, "of": {"each": [0.5, 1.0]}, **other})
        assert_named(caught, *names)


def test_the_first_loss_is_compared_within_a_networks_noise(tmp_path: Path) -> None:
    claim(tmp_path / "identity.json", {FIRST_LOSS: 0.25})
    claim(tmp_path / "identity.json", {FIRST_LOSS: 0.251})
    with pytest.raises(FileFormatError) as caught:
        claim(tmp_path / "identity.json", {FIRST_LOSS: 0.26})
    assert_named(caught, "loss", "0.25", "0.26")


def test_files_are_told_by_name_and_size(tmp_path: Path) -> None:
    """What systems hide and the folder of the run itself don't count, and links are followed."""
    tree, linked = tmp_path / "tree", tmp_path / "linked"
    (tree / "images").mkdir(parents=True)
    (tree / "images" / "a.png").write_bytes(b"12")
    (tree / "b.txt").write_bytes(b"3")
    linked.mkdir()
    (linked / "c.png").write_bytes(b"4")
    (tree / "others").symlink_to(linked)

    def told(*more: Path) -> str:
        return fingerprint_of_files([tree, *more], besides=tree / "out")

    first = told()
    for name in ("Thumbs.db", "images/.DS_Store", "out/report.json", "out/seed-0/log.jsonl"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(b"more")
    (tree / "b.txt").write_bytes(b"5")
    assert told() == first
    assert fingerprint_of_files([shutil.copytree(tree, tmp_path / "copy")], besides=tmp_path / "copy/out") == first
    found = [first, fingerprint_of_files([tree]), told(tree / "b.txt")]
    (linked / "out").mkdir()
    (linked / "out" / "report.json").write_bytes(b"more")  # the folder of a run is left out through a link, too
    assert fingerprint_of_files([tree], besides=linked / "out") == found[1]
    shutil.rmtree(linked / "out")
    for change in (
        lambda: (tree / "b.txt").write_bytes(b"56"),
        lambda: (tree / "c.txt").write_bytes(b""),
        lambda: (tree / "b.txt").rename(tree / "d.txt"),
        lambda: (linked / "c.png").write_bytes(b"78"),
        lambda: shutil.rmtree(tree),
    ):
        change()
        found.append(told())
    assert len(set(found)) == len(found)


def test_a_file_that_moves_to_another_of_the_paths_is_told(tmp_path: Path) -> None:
    """As a class between the folders to train on and to validate on."""
    train, validation = tmp_path / "train", tmp_path / "validation"
    (train / "cat").mkdir(parents=True)
    validation.mkdir()
    (train / "cat" / "a.png").write_bytes(b"12")
    before = fingerprint_of_files([train, validation])
    (train / "cat").rename(validation / "cat")
    assert fingerprint_of_files([train, validation]) != before


def made(value: float) -> Any:
    def function(model: Any) -> float:
        return value if model in {"a", "b", "c"} else max(each for each in (value, 2.0))

    return function


class Judge:
    def __call__(self, model: Any) -> float:
        return 1.0

    def judged(self, model: Any) -> float:
        return 2.0


def test_functions_are_told_by_their_code() -> None:
    first = fingerprint_of_code(made(1.0))
    assert first == fingerprint_of_code(made(2.0))  # what it closes over is not looked at
    assert first == fingerprint_of_code(partial(made(1.0), [3]))  # data
    others = [lambda model: 1.0, lambda model: 1 - 1.0, lambda: 1.0, Judge(), Judge().judged, len, max]
    assert len({first, *map(fingerprint_of_code, others)}) == 1 + len(others)
    assert fingerprint_of_code(Judge()) == fingerprint_of_code(Judge())


@pytest.mark.slow
def test_code_is_the_same_in_another_process() -> None:
    code = """
from metricopt_ext.runtime.identity import fingerprint_of_code
from tests.runtime.test_identity import made
print(fingerprint_of_code(made(1.0)))
"""
    for hash_seed in "12":
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": "tests"},  # for `helpers`
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == fingerprint_of_code(made(1.0))


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run"):
        with pytest.raises(FileFormatError) as caught, sole_writer(tmp_path / "run"):
            pytest.fail("there are two writers")
        assert_named(caught, "run")
        with sole_writer(tmp_path / "other"):
            pass
    with sole_writer(tmp_path / "run"):
        pass


def test_a_writer_is_told_when_the_folder_is_no_longer_its_own(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run") as check:
        check()
        (tmp_path / "run").rename(tmp_path / "moved")
        assert_refused(check, OSError)
        with sole_writer(tmp_path / "run"):
            assert_refused(check, FileFormatError)
    with sole_writer(tmp_path / "other") as check:
        pass
    assert_refused(check, FileFormatError)


def test_a_dead_process_holds_no_lock(tmp_path: Path) -> None:
    code = """
import sys, time
from metricopt_ext.runtime.identity import sole_writer
with sole_writer(sys.argv[1]):
    print("mine", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        with pytest.raises(FileFormatError), sole_writer(tmp_path):
            pytest.fail("there are two writers")
        process.kill()
    with sole_writer(tmp_path):
        pass


def test_a_lock_that_is_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("content")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"\.lock"), sole_writer(tmp_path / "run"):
        pytest.fail("the lock is elsewhere")
    assert (tmp_path / "precious").read_text() == "content"


def test_numbers_and_text_among_arguments_count() -> None:
    def threshold(at: Any) -> Any:
        def metric(model: Any, at: Any = at, *, beta: Any = at) -> None: ...

        return metric

    def score(model: Any, beta: Any) -> None: ...

    found = [fingerprint_of_code(each) for each in (threshold(0.3), threshold(0.8), threshold("0.3"), threshold(None))]
    found += [fingerprint_of_code(each) for each in (score, partial(score, beta=1.0), partial(score, beta=2.0))]
    assert len(set(found)) == len(found)
    data = [fingerprint_of_code(threshold(torch.full((3,), float(fill)))) for fill in range(2)]
    assert data[0] == data[1]  # which is not looked at
    assert fingerprint_of_code(partial(score, data)) == fingerprint_of_code(score)
