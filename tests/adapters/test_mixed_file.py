"""A mixture of files, against the mean and the files themselves."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.mixed_file import MixedFile
from metricopt_ext.adapters.mixture import Mixture
from metricopt_ext.adapters.skeleton import LOGITS
from metricopt_ext.errors import DataError
from metricopt_ext.utils.checkpoint_file import read_checkpoint


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 5))
    model(torch.randn(6, 3, 3, 4))
    return model.to(dtype).state_dict()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{seed}.safetensors" for seed in range(3)]
    for seed, path in enumerate(paths):
        save_file(state(seed), path)
    return paths


def test_phi_weighs_the_files(files: list[Path]) -> None:
    mixed = MixedFile(read_checkpoint(files[0]), files[1:])
    assert mixed.adapter.dim == 2
    assert mixed.tensors(torch.zeros(2)) == {}
    base, *others = (state(seed) for seed in range(3))
    floats = [name for name, value in base.items() if value.is_floating_point()]
    for phi, other in zip(torch.eye(2), others, strict=True):
        found = mixed.tensors(phi)
        assert sorted(found) == sorted(floats)
        assert all(torch.equal(value, other[name]) for name, value in found.items())
    found = mixed.tensors(torch.tensor([0.25, 0.5]))
    for name in floats:
        expected = (0.25 * base[name].double() + 0.25 * others[0][name] + 0.5 * others[1][name]).float()
        torch.testing.assert_close(found[name], expected)


def test_offsets_of_a_bias_come_after_the_weights(files: list[Path]) -> None:
    mixed = MixedFile(read_checkpoint(files[0]), files[1:2], "3.bias")
    assert mixed.adapter.dim == 1 + 5
    phi = torch.tensor([1.0, 0.1, 0.0, 0.0, 0.0, -0.2])
    found, other = mixed.tensors(phi), state(1)
    torch.testing.assert_close(found["3.bias"], other["3.bias"] + LOGITS * phi[1:])
    assert all(torch.equal(value, other[name]) for name, value in found.items() if name != "3.bias")


def test_threads_have_a_file_each(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the tool's jobs: while the weights are mixed, another thread would put its phi in place."""
    mixed, plain = MixedFile(read_checkpoint(files[0]), files[1:2], "3.bias"), Mixture.mixed

    def slowly(self: Mixture, model: nn.Module) -> dict[str, Tensor]:
        found = plain(self, model)
        time.sleep(0.02)
        return found

    monkeypatch.setattr(Mixture, "mixed", slowly)
    phis = [torch.full((6,), 0.1 * number) for number in range(1, 5)]
    alone = [mixed.tensors(phi) for phi in phis]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(mixed.tensors, phis))
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_the_entry_is_read_of_all_files_that_have_entries(files: list[Path], tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        torch.save({"model": state(9), "model_ema": state(seed)}, tmp_path / f"{name}.pth")
    torch.save(state(3), flat := tmp_path / "flat.pth")
    others = [tmp_path / "two.pth", flat, files[0]]
    mixed = MixedFile(read_checkpoint(tmp_path / "one.pth", "model_ema"), others, entry="model_ema")
    for phi, seed in zip(torch.eye(3), (2, 3, 0), strict=True):
        assert torch.equal(mixed.tensors(phi)["0.weight"], state(seed)["0.weight"])
    assert_refused(
        lambda: MixedFile(read_checkpoint(files[1]), [tmp_path / "two.pth"], entry="ema"),
        DataError,
        "entry='ema'",
        "two.pth",
    )


def test_types_and_ties_of_the_file_stay(tmp_path: Path) -> None:
    half, other = state(0, torch.bfloat16), state(1, torch.bfloat16)
    for path, each in (("a.pth", half), ("b.pth", other)):
        torch.save({"model": {**each, "tied": each["3.weight"]}, "step": 3}, tmp_path / path)
    file = read_checkpoint(tmp_path / "a.pth")
    mixed = MixedFile(file, [tmp_path / "b.pth"])
    file.write(tmp_path / "out.pth", mixed.tensors(torch.ones(1)))
    written = torch.load(tmp_path / "out.pth", weights_only=True)
    assert written["step"] == 3
    assert torch.equal(written["model"]["tied"], other["3.weight"])
    assert torch.equal(written["model"]["3.weight"], other["3.weight"])
    assert written["model"]["3.weight"].dtype == torch.bfloat16


def test_a_run_is_known_by_the_content_of_the_files(files: list[Path]) -> None:
    def identity(others: list[Path], offsets: str | None = None) -> dict[str, Any]:
        return MixedFile(read_checkpoint(files[0]), others, offsets).identity()

    known = identity(files[1:2])
    copied = files[0].with_name("copy.safetensors")
    copied.write_bytes(files[1].read_bytes())
    assert identity([copied]) == known
    assert identity(files[2:]) != known
    assert identity(files[1:2], "3.bias") == known | {"offsets": "3.bias"}


def test_offsets_reach_a_tied_bias_under_either_key(tmp_path: Path) -> None:
    """As of heads that one module is, behind each layer of a decoder."""
    for seed in range(2):
        tied = {f"heads.{head}.{name}": value for name, value in state(seed).items() for head in range(2)}
        torch.save(tied, tmp_path / f"{seed}.pth")
    file = read_checkpoint(tmp_path / "0.pth")
    for key in ("heads.0.3.bias", "heads.1.3.bias"):
        mixed = MixedFile(file, [tmp_path / "1.pth"], key)
        phi = torch.zeros(mixed.adapter.dim)
        phi[1] = 1.0
        file.write(tmp_path / "out.pth", mixed.tensors(phi))
        moved = read_checkpoint(tmp_path / "out.pth").tensor(key) - file.tensor(key)
        torch.testing.assert_close(moved, torch.tensor([LOGITS, 0.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("names", "offsets"),
    [
        (["norm", "head.parametrizations.weight.original1", "head.bias"], "head.bias"),  # weight-normed
        (["dense", "cls.bias"], "cls.bias"),  # of no linear layer
        (["weight", "bias"], "bias"),  # a layer's own state dict
        (["logits.weight", "logits.bias"], "logits.bias"),
    ],
)
def test_offsets_are_of_any_bias(names: list[str], offsets: str, tmp_path: Path) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        save_file({name: torch.randn(5) for name in names}, tmp_path / f"{seed}.safetensors")
    file = read_checkpoint(tmp_path / "0.safetensors")
    mixed = MixedFile(file, [tmp_path / "1.safetensors"], offsets)
    assert mixed.adapter.dim == 6
    found = mixed.tensors(torch.tensor([1.0, 0, 0, 1, 0, 0]))
    assert found.keys() == set(names)
    other = read_checkpoint(tmp_path / "1.safetensors").tensor(offsets)
    torch.testing.assert_close(found[offsets] - other, torch.tensor([0.0, 0, LOGITS, 0, 0]))
