"""The published CIFAR ResNets' file, against the network that it was trained as."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convert_cifar
from convert_cifar import from_published
from metricopt_ext.classification.models import CifarResNet
from metricopt_ext.utils.state_dict import load_checkpoint

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """As published: the shortcut A of He et al., half of the new channels before the old ones."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.quarter = outputs // 4 if inputs != outputs else 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.quarter:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.quarter, self.quarter), "constant", 0)
        return F.relu(h + x)


class Published(nn.Module):
    def __init__(self, blocks: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width]
        for stage in (1, 2, 3):
            a, b = widths[stage - 1 : stage + 1]
            rest = [Block(b, b, 1) for _ in range(blocks - 1)]
            self.add_module(f"layer{stage}", nn.Sequential(Block(a, b, 1 if stage == 1 else 2), *rest))
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in (1, 2, 3):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.linear(x.mean((2, 3)))


def published(blocks: int, classes: int = 10, width: int = 16) -> nn.Module:
    """In double precision, and with statistics as after a training."""
    torch.manual_seed(blocks)
    model = Published(blocks, classes, width).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for each in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                each.uniform_(0.5, 1.5)
    return model.eval()


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {f"module.{name}": value for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("depth", "blocks", "widening"), [(8, 1, 1), (20, 3, 1), (56, 9, 1), (14, 2, 2)])
def test_the_network_computes_the_same(depth: int, blocks: int, widening: int) -> None:
    theirs = published(blocks, width=16 * widening)
    ours = CifarResNet(depth, 10, widening).double().eval()
    state = from_published(ours, saved(theirs))
    assert state is not None
    ours.load_state_dict(state)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(x)
        torch.testing.assert_close(ours(x), expected, rtol=1e-9, atol=1e-9)
        assert expected.std() > 1e-3
        names = dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True))
        ours.load_state_dict(names)  # by names alone, in their order of channels
        assert not torch.allclose(ours(x), expected, rtol=1e-3)


def test_a_file_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"state_dict": saved(published(3))}, tmp_path / "a.th")
    monkeypatch.setattr("sys.argv", ["convert_cifar.py", str(tmp_path / "a.th"), str(tmp_path / "a.safetensors")])
    convert_cifar.main()
    load_checkpoint(CifarResNet(20), tmp_path / "a.safetensors")
    torch.save(CifarResNet(20).state_dict(), tmp_path / "a.th")
    with pytest.raises(SystemExit):
        convert_cifar.main()
