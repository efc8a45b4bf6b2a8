"""Trajectories: a store of them that keeps what it has and refuses what is another run's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_named, assert_refused, having
from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import FileFormatError
from metricopt_ext.tasks.trajectory import TRAJECTORIES, Trajectory, TrajectoryStore, load_trajectories

Make = Callable[..., Any]


def make_trajectory(round: int = 0, index: int = 0) -> Trajectory:
    rng = torch.Generator().manual_seed(index)
    phi, loss = torch.randn(4, 2, generator=rng), torch.randn(3, generator=rng)
    cost = torch.rand(2, generator=rng, dtype=torch.float64)
    signature = None if round else Signature("film", ("a", "b"), (3, 4), index, 2, "normal/1", None)
    return Trajectory(round, index, phi, loss, torch.tensor([0, 3]), cost, signature=signature)


@pytest.mark.parametrize("on_disk", [False, True])
def test_store(same: Callable[[Trajectory | None, Trajectory | None], bool], on_disk: bool, tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "run" if on_disk else None, {"seed": 1})
    keys = [(1, 12), (0, 100_000), (10, 3), (1, 5)]
    for key in keys:
        store.add(make_trajectory(*key))
    stores = [store, TrajectoryStore(tmp_path / "run", {"seed": 1})] if on_disk else [store]
    for each in stores:
        assert len(each) == 4
        assert each.queries == 8
        assert [(t.round, t.index) for t in each] == sorted(keys)
        assert all(same(each.get(*key), make_trajectory(*key)) for key in keys)  # type: ignore[arg-type]
        assert each.get(0, 12) is None
        with pytest.raises(ValueError, match=having("12", "1")):
            each.add(make_trajectory(1, 12))


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"seed": 2, "layers": ["a"]}, ("seed", "1", "2")),
        ({"seed": 1, "layers": ["a", "b"]}, ("layers", "'b'")),
        ({"seed": 1}, ("layers", "None")),
        ({"seed": 1, "layers": ["a"], "steps": 3}, ("steps", "None", "3")),
        (None, ("seed",)),
    ],
)
def test_another_identity_is_refused(
    files: Callable[[Path], dict[str, bytes]], other: dict[str, Any] | None, names: tuple[str, ...], tmp_path: Path
) -> None:
    store = TrajectoryStore(tmp_path, {"seed": 1, "layers": ["a"]})
    store.add(make_trajectory())
    before = files(tmp_path)
    assert_refused(lambda: TrajectoryStore(tmp_path, other), FileFormatError, tmp_path, *names)
    assert files(tmp_path) == before


@pytest.mark.parametrize("inside", ["", TRAJECTORIES])
def test_stored_trajectories_can_be_read_without_their_identity(
    same: Callable[[Trajectory | None, Trajectory | None], bool],
    files: Callable[[Path], dict[str, bytes]],
    inside: str,
    tmp_path: Path,
) -> None:
    store = TrajectoryStore(tmp_path / inside, {"seed": 1})
    for key in [(1, 12), (0, 100_000), (10, 3), (1, 5)]:
        store.add(make_trajectory(*key))
    before = files(tmp_path / inside)
    read = load_trajectories(tmp_path)
    assert len(read) == 4
    assert all(same(a, b) for a, b in zip(read, store, strict=True))
    assert files(tmp_path / inside) == before


def test_a_folder_without_trajectories_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileFormatError) as caught:
            load_trajectories(folder)
        assert_named(caught, folder, "output_dir")


def test_identity_is_compared_as_json_has_it(tmp_path: Path) -> None:
    identity = {"layers": ("a", "b"), "lr": 0.1, "settings": {"pairs": ((0.0, 1.0),)}, "steps": None}
    TrajectoryStore(tmp_path, identity).add(make_trajectory())
    assert len(TrajectoryStore(tmp_path, identity)) == 1
    assert json.loads((tmp_path / "identity.json").read_text())["layers"] == ["a", "b"]


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
def test_truncated_file_is_refused_by_name(kept: float, tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    for index in range(3):
        store.add(make_trajectory(index=index))
    path = tmp_path / "round-0-task-00001.safetensors"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    assert_refused(lambda: TrajectoryStore(tmp_path), FileFormatError, path)
    path.unlink()
    assert len(TrajectoryStore(tmp_path)) == 2


def test_corrupt_identity_is_refused_by_name(tmp_path: Path) -> None:
    TrajectoryStore(tmp_path, {"seed": 1})
    (tmp_path / "identity.json").write_text('{"seed": ')
    assert_refused(lambda: TrajectoryStore(tmp_path, {"seed": 1}), FileFormatError, "identity.json", "JSON")


def test_a_half_written_file_is_never_seen(
    files: Callable[[Path], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore(tmp_path)
    store.add(make_trajectory(index=0))

    def crash(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", crash)
        with pytest.raises(KeyboardInterrupt):
            store.add(make_trajectory(index=1))
    assert store.get(0, 1) is None
    assert list(files(tmp_path)) == ["identity.json", "round-0-task-00000.safetensors"]
    store.add(make_trajectory(index=1))
    (tmp_path / ".round-0-task-00002.safetensors.x7").write_bytes(b"left by a kill")
    assert len(TrajectoryStore(tmp_path)) == 2
