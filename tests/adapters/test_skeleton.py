"""FiLM on a checkpoint's norms: what is found, and that what moves is what the real model's FiLM would be merged to."""

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
from metricopt_ext.adapters.skeleton import (
    LOGITS,
    Moved,
    Norms,
    attach_checkpoint,
    chosen,
    gradients_in_phi,
    movable,
    moved_tensors,
)
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.checkpoint_file import CheckpointFile, read_checkpoint


def saved(state: dict[str, Tensor], tmp_path: Path, name: str = "a.pth") -> CheckpointFile:
    if name.endswith(".pth"):
        torch.save(state, tmp_path / name)
    else:
        save_file(state, tmp_path / name)
    return read_checkpoint(tmp_path / name)


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
    found = {each.layer: each[1:] for each in movable(saved(MIXED, tmp_path, name))}
    assert found == {
        "bn1": ("BatchNorm", ("bn1.weight", "bn1.bias"), 3),
        "blocks.0.LayerNorm": (
            "LayerNorm or GroupNorm",
            ("blocks.0.LayerNorm.weight", "blocks.0.LayerNorm.bias"),
            4,
        ),
        "blocks.0.input_layernorm": ("RMSNorm, scale alone", ("blocks.0.input_layernorm.weight",), 4),
        "model.norm": ("RMSNorm, scale alone", ("model.norm.weight",), 4),
    }


def test_patterns_and_offsets_choose(tmp_path: Path) -> None:
    file = saved(MIXED, tmp_path)
    assert [each.layer for each in chosen(file, ["blocks.*", "bn?"])] == [
        "bn1",
        "blocks.0.LayerNorm",
        "blocks.0.input_layernorm",
    ]
    assert chosen(file, ["bn1"], "head.bias")[1] == Moved("head", "offsets", ("head.bias",), 5)
    alone = saved({"head.bias": torch.ones(2), "b": torch.ones(3)}, tmp_path)
    assert [each.layer for each in chosen(alone, offsets="head.bias")] == ["head"]
    assert [each.layer for each in chosen(alone, offsets="b")] == ["b"]


@pytest.mark.parametrize(
    ("state", "arguments", "names"),
    [
        (MIXED, {"layers": ["bn2"]}, ("--layers", "bn2", "bn1")),
        (MIXED, {"offsets": "head.bia"}, ("--offsets", "head.bias")),
        ({"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}, {}, ("fc.bias",)),
        ({"norm.weight": torch.ones(2).to(torch.float8_e4m3fn)}, {}, ("norm.weight",)),
    ],
)
def test_what_moves_nothing_is_refused(
    state: dict[str, Tensor], arguments: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    assert_refused(lambda: chosen(saved(state, tmp_path), **arguments), AdapterError, *names)


def test_what_moves_is_the_formula(tmp_path: Path) -> None:
    file = saved(MIXED, tmp_path)
    moved = chosen(file, offsets="head.bias")
    adapter = attach_checkpoint(file, moved, dim=2, seed=3)
    assert adapter.dim == 2 + 5
    phi = torch.tensor([0.3, -0.2, 0.1, 0, 0, 0, -0.1])
    values = moved_tensors(adapter, phi, file, moved)
    assert {key for each in moved for key in each.keys} == set(values)
    (_, bn), *_ = adapter.modulations()
    (_, film), *_ = attach_film(nn.ModuleDict({"bn1": nn.BatchNorm1d(3)}), dim=2, seed=3).modulations()
    A, B = film.A, film.B  # as any FiLM's
    torch.testing.assert_close(bn.A, A)
    weight, bias = MIXED["bn1.weight"], MIXED["bn1.bias"]
    scale = 1 + A @ phi[:2]
    torch.testing.assert_close(values["bn1.weight"], weight * scale)
    torch.testing.assert_close(values["bn1.bias"], bias * scale + weight.abs() * (B @ phi[:2]))
    torch.testing.assert_close(values["head.bias"], torch.arange(5.0) + LOGITS * phi[2:])
    half = values["model.norm.weight"]
    assert half.dtype == torch.bfloat16
    a = adapter.modulations()[3][1].A
    torch.testing.assert_close(
        half, (MIXED["model.norm.weight"].float() * (1 + a @ phi[:2])).bfloat16(), rtol=0, atol=0
    )
    assert torch.equal(adapter.phi, torch.zeros(7))


def test_a_merged_model_is_the_adapted_one(tmp_path: Path, randomise: Callable[..., Any]) -> None:
    """Against the same FiLM on the model itself, whose matrices are taken over."""
    model = randomise(torchvision.models.resnet18(num_classes=4)).double().eval()
    file = saved(model.state_dict(), tmp_path)
    moved = chosen(file, ["layer3.*"])
    skeleton = attach_checkpoint(file, moved, dim=3)
    real = attach_film(model, [each.layer for each in moved], dim=3)
    for (_, mine), (_, theirs) in zip(real.modulations(), skeleton.modulations(), strict=True):
        mine.A.copy_(theirs.A)
        mine.B.copy_(theirs.B)
    phi = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    real.set_phi(phi)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = model(x)
    file.write(tmp_path / "b.pth", moved_tensors(skeleton, phi, file, moved))
    plain = torchvision.models.resnet18(num_classes=4).double().eval()
    plain.load_state_dict(torch.load(tmp_path / "b.pth"))
    torch.testing.assert_close(plain(x), expected)


def test_nothing_moves_at_phi_zero(tmp_path: Path) -> None:
    file = saved({"a.weight": torch.ones(2), "a.bias": torch.tensor([-0.0, 1.0])}, tmp_path)
    assert Norms(file, chosen(file), dim=2).tensors(torch.zeros(2)) == {}


def test_a_dead_channel_stays_dead(tmp_path: Path) -> None:
    file = saved({"a.weight": torch.tensor([0.0, 2.0]), "a.bias": torch.zeros(2)}, tmp_path)
    values = Norms(file, chosen(file), dim=2).tensors(torch.ones(2))
    assert [float(each[0]) for each in values.values()] == [0, 0]
    assert all(float(each[1]) != 0 for each in values.values())


def test_tied_norms_move_once_and_together(tmp_path: Path) -> None:
    state = norm("encoder.norm")
    state |= {"decoder.norm.weight": state["encoder.norm.weight"], "decoder.norm.bias": state["encoder.norm.bias"]}
    file = saved(state, tmp_path)
    moved = chosen(file)
    assert [each.layer for each in moved] == ["encoder.norm"]
    file.write(tmp_path / "b.pth", Norms(file, moved, dim=2).tensors(torch.ones(2)))
    now = torch.load(tmp_path / "b.pth")
    assert not torch.equal(now["encoder.norm.weight"], state["encoder.norm.weight"])
    assert now["encoder.norm.weight"].data_ptr() == now["decoder.norm.weight"].data_ptr()


def test_gradients_in_phi_are_those_of_a_loss_on_what_moves(tmp_path: Path) -> None:
    """Against finite differences of a loss that is linear in the tensors."""
    file = saved(norm("bn1") | norm("model.norm", 4, bias=False) | {"head.bias": torch.arange(3.0)}, tmp_path)
    moved = chosen(file, None, "head.bias")
    adapter = attach_checkpoint(file, moved, dim=2, seed=0)
    rng = torch.Generator().manual_seed(4)
    given = {key: torch.randn(5, *file.tensor(key).shape, generator=rng) for each in moved for key in each.keys}
    found = gradients_in_phi(adapter, moved, given)
    assert found.shape == (5, adapter.dim)

    def loss(phi: Tensor) -> Tensor:
        at = moved_tensors(adapter, phi, file, moved) or {key: file.tensor(key) for key in given}
        return sum((given[key] * at[key]).flatten(1).sum(1) for key in given)  # type: ignore[return-value]

    origin = torch.zeros_like(adapter.phi.detach())
    for i in range(adapter.dim):
        step = origin.clone()
        step[i] = 0.5
        assert torch.allclose(found[:, i], (loss(step) - loss(origin)) / 0.5, atol=1e-4)
    single = {key: value[0] for key, value in given.items()}
    assert torch.allclose(gradients_in_phi(adapter, moved, single), found[:1])
