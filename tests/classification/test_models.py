import pytest
import torch

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.classification.models import CifarResNet, SmallCNN, TabularMLP, build_model
from metricopt_ext.data.variation import flip_and_shift
from metricopt_ext.errors import ConfigError


def test_cifar_resnet_has_the_published_size_and_depth() -> None:
    sizes = {depth: sum(p.numel() for p in CifarResNet(depth).parameters()) for depth in (20, 32, 56)}
    assert {depth: round(size / 1e6, 2) for depth, size in sizes.items()} == {20: 0.27, 32: 0.46, 56: 0.85}
    layers = [m for m in CifarResNet(32).modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == 32


def test_widened_cifar_resnet_has_the_size_that_its_layers_add_up_to() -> None:
    model = build_model("cifar_resnet14x2", torch.Size((3, 32, 32)), 10)
    assert isinstance(model, CifarResNet)
    # A convolution a -> b has 9 ab weights, its norm 2b; two blocks in each of three stages.
    pairs = [(3, 32), *[(32, 32)] * 4, (32, 64), *[(64, 64)] * 3, (64, 128), *[(128, 128)] * 3]
    assert sum(p.numel() for p in model.parameters()) == sum(9 * a * b + 2 * b for a, b in pairs) + 128 * 10 + 10
    narrow, as_named = CifarResNet(14).state_dict(), build_model("cifar_resnet14x1", torch.Size((3, 32, 32)), 10)
    assert {k: v.shape for k, v in narrow.items()} == {k: v.shape for k, v in as_named.state_dict().items()}


def test_cifar_block_shortcut_is_parameter_free_identity_padded_with_zeros() -> None:
    block = CifarResNet(8).stage2[0].eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 16, 8, 8)
    h = block(x)
    assert torch.equal(h[:, :16], x[:, :, ::2, ::2])
    assert h[:, 16:].abs().max() == 0


@pytest.mark.parametrize("depth", [7, 31, 2])
def test_impossible_depth_is_named(depth: int) -> None:
    assert_refused(lambda: CifarResNet(depth), ConfigError, depth)


def test_impossible_width_is_named() -> None:
    assert_refused(
        lambda: build_model("cifar_resnet14x0", torch.Size((3, 32, 32)), 10), ConfigError, "widening", "0", "1"
    )


@pytest.mark.parametrize(
    ("name", "shape", "classes", "logits"),
    [
        ("tabular_mlp", (7,), 2, (5,)),
        ("tabular_mlp", (7,), 3, (5, 3)),
        ("small_cnn", (1, 8, 8), 10, (5, 10)),
        ("cifar_resnet20", (3, 32, 32), 10, (5, 10)),
        ("resnet18", (3, 32, 32), 4, (5, 4)),
    ],
)
def test_builds_by_name(name: str, shape: tuple[int, ...], classes: int, logits: tuple[int, ...]) -> None:
    model = build_model(name, torch.Size(shape), classes).eval()
    assert model(torch.rand(5, *shape)).shape == logits


def test_refuses_what_does_not_fit() -> None:
    assert_refused(lambda: build_model("tabular_mlp", torch.Size((1, 8, 8)), 2), ConfigError)
    assert_refused(lambda: build_model("small_cnn", torch.Size((7,)), 2), ConfigError)
    for name, shape in [("cifar_resnet20", (1, 8, 8)), ("cifar_resnet32", (3, 7, 8))]:
        with pytest.raises(ConfigError) as caught:
            build_model(name, torch.Size(shape), 10)
        assert_named(caught, "3", "8 x 8")
    assert_refused(lambda: build_model("resnet19", torch.Size((3, 8, 8)), 2), ConfigError, "resnet19")


def test_hidden_widths_are_the_papers() -> None:
    linears = [m for m in TabularMLP(123).modules() if isinstance(m, torch.nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linears] == [(123, 100), (100, 30), (30, 10), (10, 1)]
    assert [name for name, _ in SmallCNN(1, 10).named_children() if name.startswith("norm")] == [
        "norm1",
        "norm2",
        "norm3",
    ]


def test_flip_and_shift_moves_whole_images_and_keeps_their_pixels() -> None:
    x = torch.rand(64, 3, 6, 6) + 1
    y = flip_and_shift(x, torch.Generator().manual_seed(0), pixels=2)
    padded = torch.nn.functional.pad(x, (2,) * 4)
    seen = set()
    for before, after in zip(padded, y, strict=True):
        views = {
            (flip, i, j): (before.flip(-1) if flip else before)[:, i : i + 6, j : j + 6]
            for flip in (False, True)
            for i in range(5)
            for j in range(5)
        }
        found = [key for key, view in views.items() if torch.equal(view, after)]
        assert found
        seen.add(found[0])
    assert len(seen) > 20  # images are moved independently
