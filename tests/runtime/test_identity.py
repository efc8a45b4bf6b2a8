"""Whose a folder is: fingerprints of weights, code and files, and one writer at a time."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_named
from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.identity import claim, fingerprint, fingerprint_of_code, sole_writer

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
