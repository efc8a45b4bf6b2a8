"""Convert the weights of pytorch_resnet_cifar10, as resnet20-12fca82f.th, to those of ``model.name=cifar_resnet20``.

    python benchmarks/convert_cifar.py resnet20-12fca82f.th resnet20.safetensors

Names differ, and the shortcut, which is padded on both sides there; the network computes the same.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from metricopt_ext.classification.models import CifarResNet
from metricopt_ext.utils.state_dict import read_state_dict
from metricopt_ext.utils.tensor_names import UNTRAINED, names_in_model


def main() -> None:
    """Parse the command line and write the converted weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="the published file")
    parser.add_argument("output", type=Path, help="receives the weights, .safetensors")
    arguments = parser.parse_args()
    state = read_state_dict(arguments.weights, "", what="weights of a CIFAR ResNet")
    blocks = 1 + max((int(found[1]) for key in state if (found := re.search(r"layer1\.(\d+)\.", key))), default=0)
    converted = from_published(CifarResNet(6 * blocks + 2), state)
    if converted is None:
        sys.exit(f"{arguments.weights} holds no weights of pytorch_resnet_cifar10")
    save_file(converted, arguments.output)
    print(f"{arguments.output}: weights of model.name=cifar_resnet{6 * blocks + 2}")


def from_published(model: CifarResNet, state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return our state dict for weights in the form of pytorch_resnet_cifar10, whose models many have published.

    Where the width doubles, their shortcut puts half of the new channels before the old ones and half behind, ours all
    behind. Their channels are therefore put into our order, in all layers that read or write them; the network computes
    the same, to rounding.

    Args:
        model: Of the file's depth; its weights are not read.
        state: The file's state dict, with or without what wrappers put before its names.

    Returns:
        Weights by our names, or None if the file's names are others.
    """
    own = {name: value.shape for name, value in model.state_dict().items()}
    theirs = {_theirs(name): name for name in own}
    read = names_in_model(state, theirs)
    ours = {theirs.get(name, ""): state[key] for key, name in read.names.items()}
    missing = [name for name in own if name not in ours and not name.endswith(UNTRAINED)]
    if read.left_out or missing or "" in ours:
        return None
    if any(value.shape != own[name] for name, value in ours.items()):
        return ours  # of another width or number of classes, which loading it refuses
    return _in_our_order(ours)


def _theirs(name: str) -> str:
    """Return their name of one of our tensors."""
    layer, _, kind = name.rpartition(".")
    layer = re.sub(r"stage(\d)\.(\d+)\.norm(\d)", r"layer\1.\2.bn\3", layer)
    layer = re.sub(r"stage(\d)\.(\d+)\.conv(\d)", r"layer\1.\2.conv\3", layer)
    layer = {"conv": "conv1", "norm": "bn1", "head": "linear"}.get(layer, layer)
    return f"{layer}.{kind}"


def _in_our_order(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put the channels between blocks, of which theirs are in another order, into ours."""
    orders = [torch.arange(len(state["norm.weight"]))]
    for _ in range(2):
        orders.append(_padded(orders[-1]))
    ordered = dict(state)
    for name, value in state.items():
        stage = re.fullmatch(r"stage(\d)\.(\d+)\.(conv1|conv2|norm2)\.(\w+)", name)
        if name == "head.weight":
            ordered[name] = value[:, orders[2]]
        elif stage and value.dim():
            at, block, layer = int(stage[1]) - 1, int(stage[2]), stage[3]
            before = orders[at - 1 if block == 0 and at else at]
            ordered[name] = value[:, before] if layer == "conv1" else value[orders[at]]
    return ordered


def _padded(order: Tensor) -> Tensor:
    """Return which of their channels each of ours is, after the shortcut of a stage that doubles them.

    Args:
        order: The same before it, ``c``.

    Returns:
        ``2 c``: the old channels, which they have behind ``c / 2`` new ones, and then the new ones.
    """
    new = torch.arange(2 * len(order))
    first, last = new[: len(order) // 2], new[len(order) // 2 + len(order) :]
    return torch.cat([order + len(order) // 2, first, last])


if __name__ == "__main__":
    main()
