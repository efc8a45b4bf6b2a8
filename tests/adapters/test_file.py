"""What phi moves of a checkpoint: which norms are found, and that what is written is what FiLM or a mixture says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.file import LOGITS, FileMoves, Part, mixture, movable, norms
from metricopt_ext.adapters.moves import Film
from metricopt_ext.errors import AdapterError, ConfigError, DataError
from metricopt_ext.utils.checkpoint_file import CheckpointFile, read_checkpoint


def saved(state: dict[str, Tensor], tmp_path: Path, name: str = "a.pth") -> CheckpointFile:
    if name.endswith(".pth"):
        torch.save(state, tmp_path / name)
    else:
        save_file(state, tmp_path / name)
    return read_checkpoint(tmp_path / name)


def written(file: CheckpointFile, moves: FileMoves, phi: Tensor) -> CheckpointFile:
    """Return the file as it is written at phi, ``d``."""
    path = file.path.with_name(f"written{file.path.suffix}")
    file.write(path, moves.tensors(phi))
    return read_checkpoint(path, file.entry)


# --- Norms -------------------------------------------------------------------------------------------------------


def norm(name: str, channels: int = 3, bias: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(len(name))
    keys = ["weight", "bias"] if bias else ["weight"]
    return {f"{name}.{key}": torch.randn(channels, generator=rng, dtype=torch.float64).to(dtype) for key in keys}


MIXED = {
    "conv.weight": torch.ones(3, 2, 1),
    "conv.bias": torch.ones(3),
    "bn1.weight": torch.tensor([0.5, -2.0, 1.5]),  # a shift is by its size
    "bn1.bias": torch.tensor([0.1, -0.3, 0.2]),
    "bn1.running_mean": torch.zeros(3),
    "bn1.running_var": torch.ones(3),
    **norm("blocks.0.LayerNorm", 4),
    **norm("blocks.0.input_layernorm", 4, bias=False),
    **norm("blocks.0.gate", 4, bias=False),
    **norm("model.norm", 4, bias=False, dtype=torch.bfloat16),
    "slope.weight": torch.ones(1),
    "head.weight": torch.ones(5, 4),
    "head.bias": torch.arange(5.0),
    "norm.position_ids": torch.arange(4),
    "norm_count.weight": torch.arange(4),
    "odd.weight": torch.ones(3),
    "odd.bias": torch.ones(4),
}


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_norms_are_told_by_their_tensors(name: str, tmp_path: Path) -> None:
    found = {each.name: each[1:] for each in movable(saved(MIXED, tmp_path, name))}
    assert found == {
        "bn1": ("BatchNorm", ("bn1.weight", "bn1.bias"), 6),
        "blocks.0.LayerNorm": ("LayerNorm or GroupNorm", ("blocks.0.LayerNorm.weight", "blocks.0.LayerNorm.bias"), 8),
        "blocks.0.input_layernorm": ("RMSNorm, scale alone", ("blocks.0.input_layernorm.weight",), 4),
        "model.norm": ("RMSNorm, scale alone", ("model.norm.weight",), 4),
    }


def test_patterns_and_offsets_choose(tmp_path: Path) -> None:
    file = saved(MIXED, tmp_path)
    some = [each.name for each in norms(file, ["blocks.*", "bn?"]).parts]
    assert some == ["bn1", "blocks.0.LayerNorm", "blocks.0.input_layernorm"]
    assert norms(file, ["bn1"], "head.bias").parts[1] == Part("head", "offsets", ("head.bias",), 5)
    assert [each.kind for each in norms(file, ["bn1"], "bn1.bias").parts] == ["offsets"]  # in place of its norm
    for name in ("head.bias", "b"):
        alone = norms(saved({"head.bias": torch.ones(2), "b": torch.ones(3)}, tmp_path), offsets=name)
        assert [each.keys for each in alone.parts] == [(name,)]
        assert alone.adapter.dim == alone.parts[0].numbers


@pytest.mark.parametrize(
    ("state", "arguments", "names"),
    [
        (MIXED, {"layers": ["bn2"]}, ("--layers", "bn2", "bn1")),
        (MIXED, {"offsets": "head.bia"}, ("--offsets", "head.bias")),
        (MIXED, {"offsets": "conv.weight"}, ("--offsets", "conv.weight")),
        ({"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}, {}, ("fc.bias",)),
        ({"norm.weight": torch.ones(2).to(torch.float8_e4m3fn)}, {}, ("norm.weight",)),
    ],
)
def test_what_moves_nothing_is_refused(
    state: dict[str, Tensor], arguments: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    assert_refused(lambda: norms(saved(state, tmp_path), **arguments), AdapterError, *names)


def test_what_moves_is_the_formula(tmp_path: Path) -> None:
    file = saved(MIXED, tmp_path)
    moves = norms(file, None, "head.bias", dim=2, seed=3)
    assert moves.adapter.dim == 2 + 5
    phi = torch.tensor([0.3, -0.2, 0.1, 0, 0, 0, -0.1])
    values = moves.tensors(phi)
    assert {key for each in moves.parts for key in each.keys} == set(values)
    (film,) = attach_film(nn.ModuleDict({"bn1": nn.BatchNorm1d(3)}), dim=2, seed=3).moves.values()
    assert isinstance(film, Film)
    assert film.B is not None
    weight, bias, scale = MIXED["bn1.weight"], MIXED["bn1.bias"], 1 + film.A @ phi[:2]  # as any FiLM's
    torch.testing.assert_close(values["bn1.weight"], weight * scale)
    torch.testing.assert_close(values["bn1.bias"], bias * scale + weight.abs() * (film.B @ phi[:2]))
    torch.testing.assert_close(values["head.bias"], torch.arange(5.0) + LOGITS * phi[2:])
    half, last = MIXED["model.norm.weight"], moves.moves[3]
    assert isinstance(last, Film)
    expected = (half.float() * (1 + last.A @ phi[:2])).bfloat16()
    torch.testing.assert_close(values["model.norm.weight"], expected, rtol=0, atol=0)


def test_a_model_with_what_is_written_is_the_adapted_one(tmp_path: Path, randomise: Callable[..., Any]) -> None:
    """Against the same FiLM on the model itself, whose shifts are made relative to the weights."""
    model = randomise(torchvision.models.resnet18(num_classes=4)).double().eval()
    file, layers = saved(model.state_dict(), tmp_path), ["layer3.*"]
    moves = norms(file, layers, dim=3)
    real = attach_film(model, [each.name for each in moves.parts], dim=3)
    for name, film in real.moves.items():
        assert isinstance(film, Film)
        assert film.B is not None
        film.B.mul_(file.tensor(f"{name}.weight").abs()[:, None])
    phi = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    real.set_phi(phi)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = torchvision.models.resnet18(num_classes=4).double().eval()
    now = written(file, moves, phi)
    plain.load_state_dict({key: now.tensor(key) for key in now.shapes})
    torch.testing.assert_close(plain(x), model(x))


def test_nothing_moves_at_phi_zero(tmp_path: Path) -> None:
    file = saved({"a.weight": torch.ones(2), "a.bias": torch.tensor([-0.0, 1.0])}, tmp_path)
    assert norms(file, dim=2).tensors(torch.zeros(2)) == {}


def test_a_dead_channel_stays_dead(tmp_path: Path) -> None:
    file = saved({"a.weight": torch.tensor([0.0, 2.0]), "a.bias": torch.zeros(2)}, tmp_path)
    values = norms(file, dim=2).tensors(torch.ones(2))
    assert [float(each[0]) for each in values.values()] == [0, 0]
    assert all(float(each[1]) != 0 for each in values.values())


def test_tied_norms_move_once_and_together(tmp_path: Path) -> None:
    state = norm("encoder.norm")
    state |= {"decoder.norm.weight": state["encoder.norm.weight"], "decoder.norm.bias": state["encoder.norm.bias"]}
    file = saved(state, tmp_path)
    moves = norms(file, dim=2)
    assert [each.name for each in moves.parts] == ["encoder.norm"]
    now = written(file, moves, torch.ones(2))
    assert not torch.equal(now.tensor("encoder.norm.weight"), state["encoder.norm.weight"])
    assert now.aliases("decoder.norm.weight") == ["encoder.norm.weight", "decoder.norm.weight"]


def test_gradients_in_phi_are_those_of_a_loss_on_what_moves(tmp_path: Path) -> None:
    """Against differences of a loss that is linear in the tensors, which these are in phi; a half is not rounded."""
    single = norm("bn1") | norm("model.norm", 4, bias=False) | {"head.bias": torch.arange(3.0)}
    file = saved(single, tmp_path)
    moves = norms(file, None, "head.bias", dim=2)
    rng = torch.Generator().manual_seed(4)
    given = {key: torch.randn(5, *own.shape, generator=rng) for key, own in moves.base.items()}
    found = moves.gradients(given)

    def loss(phi: Tensor) -> Tensor:
        return torch.stack([(given[key] * each).sum(1) for key, each in moves.tensors(phi).items()]).sum(0)

    steps = torch.eye(moves.adapter.dim)
    torch.testing.assert_close(found, torch.stack([loss(step) - loss(-step) for step in steps], 1) / 2)
    torch.testing.assert_close(moves.gradients({key: each[0] for key, each in given.items()}), found[:1])
    halves = norms(saved({key: each.half() for key, each in single.items()}, tmp_path, "b.pth"), None, "head.bias", 2)
    torch.testing.assert_close(halves.gradients(given), found, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"a.bias": None},
        {"b.bias": torch.ones(3)},
        {"a.bias": torch.ones(3, 1)},
        {"a.bias": torch.ones(2, 3)},  # while that of the weight is one
        {"a.bias": torch.ones(())},
        {"a.bias": torch.full((3,), torch.inf)},
    ],
)
def test_gradients_that_do_not_fit_are_refused(wrong: dict[str, Tensor | None], tmp_path: Path) -> None:
    moves = norms(saved(norm("a"), tmp_path))
    given = {"a.weight": torch.ones(3), "a.bias": torch.ones(3)} | wrong
    fitting = {key: each for key, each in given.items() if each is not None}
    assert_refused(lambda: moves.gradients(fitting), ConfigError, *wrong)


def test_a_phi_is_of_what_it_moves(tmp_path: Path) -> None:
    """So that a function that was fitted for one is refused with another."""
    file = saved(MIXED, tmp_path)
    known = norms(file, seed=1).adapter.signature
    assert norms(file, seed=1).adapter.signature == known
    for other in (norms(file), norms(file, ["bn1"], seed=1), norms(saved(norm("bn1"), tmp_path, "b.pth"), seed=1)):
        assert other.adapter.signature != known


# --- A mixture of files, against the mean and the files themselves -----------------------------------------------


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 5))
    model(torch.randn(6, 3, 3, 4))
    return model.to(dtype).state_dict()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [saved(state(seed), tmp_path, f"{seed}.safetensors").path for seed in range(3)]


def test_phi_weighs_the_files(files: list[Path]) -> None:
    mixed = mixture(read_checkpoint(files[0]), files[1:])
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


def test_files_that_add_nothing_are_refused(files: list[Path]) -> None:
    for others in (files[:1], [files[1], files[1]]):
        assert_refused(lambda others=others: mixture(read_checkpoint(files[0]), others), AdapterError, others[-1])  # type: ignore[misc]


def test_the_entry_is_read_of_all_files_that_have_entries(files: list[Path], tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        torch.save({"model": state(9), "model_ema": state(seed)}, tmp_path / f"{name}.pth")
    torch.save(state(3), flat := tmp_path / "flat.pth")
    others = [tmp_path / "two.pth", flat, files[0]]
    mixed = mixture(read_checkpoint(tmp_path / "one.pth", "model_ema"), others, entry="model_ema")
    for phi, seed in zip(torch.eye(3), (2, 3, 0), strict=True):
        assert torch.equal(mixed.tensors(phi)["0.weight"], state(seed)["0.weight"])
    two = [tmp_path / "two.pth"]
    assert_refused(lambda: mixture(read_checkpoint(files[1]), two, entry="ema"), DataError, "entry='ema'", "two.pth")


def test_types_and_ties_of_the_file_stay(tmp_path: Path) -> None:
    half, other = state(0, torch.bfloat16), state(1, torch.bfloat16)
    for path, each in (("a.pth", half), ("b.pth", other)):
        torch.save({"model": {**each, "tied": each["3.weight"]}, "step": 3}, tmp_path / path)
    file = read_checkpoint(tmp_path / "a.pth")
    now = written(file, mixture(file, [tmp_path / "b.pth"]), torch.ones(1))
    assert torch.load(now.path)["step"] == 3
    assert now.aliases("tied") == ["3.weight", "tied"]
    assert torch.equal(now.tensor("tied"), other["3.weight"])
    assert now.dtypes["tied"] == torch.bfloat16


@pytest.mark.parametrize(
    ("names", "offsets"),
    [
        (["3.weight", "3.bias"], "3.bias"),
        (["norm", "head.parametrizations.weight.original1", "head.bias"], "head.bias"),  # weight-normed
        (["dense", "cls.bias"], "cls.bias"),  # of no linear layer
        (["weight", "bias"], "bias"),  # a layer's own state dict
        (["logits.weight", "logits.bias"], "logits.bias"),
    ],
)
def test_offsets_of_any_bias_come_after_the_weights(names: list[str], offsets: str, tmp_path: Path) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        save_file({name: torch.randn(5) for name in names}, tmp_path / f"{seed}.safetensors")
    mixed = mixture(read_checkpoint(tmp_path / "0.safetensors"), [tmp_path / "1.safetensors"], offsets)
    assert mixed.adapter.dim == 1 + 5
    found, other = mixed.tensors(torch.tensor([1.0, 0, 0, 1, 0, -0.2])), read_checkpoint(tmp_path / "1.safetensors")
    assert found.keys() == set(names)
    for name in names:
        offset = torch.tensor([0.0, 0, LOGITS, 0, -0.2 * LOGITS]) if name == offsets else torch.zeros(5)
        torch.testing.assert_close(found[name], other.tensor(name) + offset)


def test_offsets_reach_a_tied_bias_under_either_key(tmp_path: Path) -> None:
    """As of heads that one module is, behind each layer of a decoder."""
    for seed in range(2):
        tied = {f"heads.{head}.{name}": value for name, value in state(seed).items() for head in range(2)}
        torch.save(tied, tmp_path / f"{seed}.pth")
    file = read_checkpoint(tmp_path / "0.pth")
    for key in ("heads.0.3.bias", "heads.1.3.bias"):
        mixed = mixture(file, [tmp_path / "1.pth"], key)
        phi = torch.zeros(mixed.adapter.dim)
        phi[1] = 1.0
        moved = written(file, mixed, phi).tensor(key) - file.tensor(key)
        torch.testing.assert_close(moved, torch.tensor([LOGITS, 0.0, 0.0, 0.0, 0.0]))
