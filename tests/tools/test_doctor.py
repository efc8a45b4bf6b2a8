"""tools/doctor.py: what it says of this machine, and what it ends with."""

import re
import sys

import pytest
import torch
from torch import nn

from metricopt_ext.tools import doctor
from metricopt_ext.utils.installation import Extra


def test_it_says_what_a_defect_s_report_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["metricopt doctor"])
    monkeypatch.setattr(doctor, "extras", lambda: [Extra("", [], [], []), Extra("files", ["h5py"], [], [])])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    said = " ".join(capsys.readouterr().out.split())
    assert not ended.value.code  # what was never installed is no defect
    for part in (
        f"torch {torch.__version__}",
        f"Python {sys.version.split()[0]}",
        torch.backends.cpu.get_cpu_capability(),
    ):
        assert part in said
    assert "extra files: h5py not installed. If you need it: pip install 'metricopt-ext[files]'" in said
    assert re.search(r"self-test: passed, in \d+\.\d s", said)


@pytest.mark.parametrize(
    "found",
    [
        Extra("", ["torch"], [], []),
        Extra("files", [], ["h5py 1.0, not >=3"], []),
        Extra("files", ["pyarrow"], [], ["h5py does not import: OSError: no"]),
    ],
    ids=["core", "version", "import"],
)
def test_it_ends_with_1_where_something_does_not_work(found: Extra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "extras", lambda: [found])
    monkeypatch.setattr(doctor, "self_test", lambda: (None, 0.0))
    lines, works = doctor.report()
    assert not works
    assert any(each in line for line in lines for each in [*found.missing, *found.outside, *found.broken])


def test_the_self_test_sees_a_search_that_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "outputs", lambda model, x: torch.zeros(len(x), 2))
    wrong, _ = doctor.self_test()
    assert wrong is not None
    assert "a search of 40 queries went only from 0.0000" in wrong


def test_the_self_test_sees_weights_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = doctor.attach_film

    def spoiling(model: nn.Module, **options: object) -> object:
        adapter = attach(model, **options)
        adapter.remove = lambda: nn.init.zeros_(model[0].bias)
        return adapter

    monkeypatch.setattr(doctor, "attach_film", spoiling)
    assert doctor.self_test()[0] == "the original weights did not come back"
