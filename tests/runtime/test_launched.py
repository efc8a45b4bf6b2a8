import pytest

from metricopt_ext.runtime.launched import is_first, is_of_another, launched, restarts


def test_what_torchrun_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")  # of another launcher
    assert (launched(), is_first(), restarts()) == (False, True, 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert (launched(), is_first(), restarts()) == (True, False, 2)
    error = ValueError()
    assert not is_of_another(error)
    error.told_by_rank = 0  # type: ignore[attr-defined]
    assert is_of_another(error)
