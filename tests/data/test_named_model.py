"""Models by name: torchvision's, timm's, those of a Hugging Face folder, and what a function of one's own builds."""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.data.named_model import (
    class_names_of,
    folder_weights,
    has_weights,
    named_model,
    preprocessing_of,
)
from metricopt_ext.errors import ConfigError, DataError, FileFormatError

IMAGES = (3, 32, 32)


def made(name: str, shape: tuple[int, ...] = IMAGES, outputs: int = 7, **options: Any) -> nn.Module:
    return named_model(name, shape, outputs, others="tiny", **options)


def test_torchvisions_classifiers_by_name() -> None:
    model: Any = made("resnet18")
    assert model.training
    assert model.bn1.num_batches_tracked == 0  # trying it out left no trace
    assert model.eval()(torch.zeros(2, *IMAGES)).shape == (2, 7)
    assert not model._forward_hooks


@pytest.mark.filterwarnings("ignore:The default weight init:FutureWarning")
def test_auxiliary_classifiers_are_left_out() -> None:
    """In training torchvision's GoogLeNet and Inception would give a tuple, and Inception want larger images."""
    model: Any = made("inception_v3", (3, 75, 75), kwargs={"init_weights": False})
    assert model(torch.rand(2, 3, 75, 75)).shape == (2, 7)
    model = made("googlenet", kwargs={"init_weights": False})
    assert model(torch.rand(2, *IMAGES)).shape == (2, 7)
    theirs = torchvision.models.googlenet(num_classes=7, init_weights=False)
    state = theirs.state_dict()
    assert_warned(lambda: model.load_state_dict(state), "GoogLeNet")
    assert "aux1.fc1.weight" in state
    x = torch.rand(2, *IMAGES)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), theirs.eval()(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(model.state_dict())


def test_timms_models_by_name() -> None:
    timm = pytest.importorskip("timm")
    model = made("timm/vit_tiny_patch16_224", kwargs={"img_size": 32, "depth": 1}).eval()
    assert model(torch.zeros(2, *IMAGES)).shape == (2, 7)
    own = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=7)
    assert own.state_dict().keys() == model.state_dict().keys()
    assert type(made("timm/resnet18")) is not type(made("resnet18"))
    assert made("resnet10t", (1, 32, 32)).conv1[0].in_channels == 1  # type: ignore[index]
    assert_refused(lambda: made("timm/resnet10t", kwargs={"height": 3}), ConfigError, "model.kwargs", "height")


OWN = """
import torch
from torch import nn

def plain(num_classes, input_shape, width=5):
    size = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(size, width), nn.BatchNorm1d(width), nn.Linear(width, num_classes))

class Named(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.body = plain(num_classes, input_shape)

    def forward(self, x):
        return type("Output", (), {"logits": self.body(x)})()

def one(num_classes, input_shape):
    return nn.Sequential(plain(1, input_shape), nn.Flatten(0))

def two(num_classes, input_shape):
    return plain(2, input_shape)

def text(num_classes, input_shape):
    return "a model"

def scripted(num_classes, input_shape):
    return torch.jit.script(nn.Linear(input_shape[0], num_classes))

def failing(num_classes, input_shape):
    raise RuntimeError("no licence")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_models.py").write_text(OWN)
    before = sys.path[:]
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("my_models", None)


def test_a_function_of_ones_own(folder: Path) -> None:
    model: Any = made("my_models:plain", folder=str(folder), kwargs={"width": 3})
    assert model[1].weight.shape == (3, 3 * 32 * 32)
    assert model(torch.zeros(2, *IMAGES)).shape == (2, 7)
    assert made("my_models:plain", (4,), folder=str(folder))[1].in_features == 4  # type: ignore[index]
    assert made("my_models:one", (4,), 2, folder=str(folder))(torch.zeros(2, 4)).shape == (2,)


def test_of_named_outputs_the_logits_are_taken_and_the_names_stay(folder: Path) -> None:
    model = made("my_models:Named", (4,), folder=str(folder))
    assert isinstance(model(torch.zeros(2, 4)), Tensor)
    assert {name.partition(".")[0] for name in model.state_dict()} == {"body"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("my_models:two", {}, ("2", "3", "7")),
        ("my_models:two", {"embeds": True}, ("(2, 2)", "(2, 7)")),
        ("my_models:text", {}, ("torch.nn.Module",)),
        ("my_models:scripted", {}, ("model.name",)),
        ("my_models:failing", {}, ("FUNCTION", "3")),
        ("my_models:plain", {"kwargs": {"deep": 1}}, ("FUNCTION", "TypeError", "deep")),
        ("my_models:plain", {"folder": ""}, ("my_models",)),
    ],
)
def test_a_function_that_can_not_be_used_is_refused(
    name: str, options: dict[str, Any], names: tuple[str, ...], folder: Path
) -> None:
    assert_refused(lambda: made(name, **{"folder": str(folder), **options}), ConfigError, *names)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as `save_pretrained` leaves it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(**small, image_size=32, patch_size=16, num_labels=3)
    config.id2label = {0: "ant", 1: "bee", 2: "cow"}
    config.label2id = {"ant": 0, "bee": 1, "cow": 2}
    folder: Path = tmp_path_factory.mktemp("vit")
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    said = {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1]}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return folder


def test_a_folder_of_hugging_face(vit: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = made(str(vit), outputs=3)
    assert has_weights(str(vit))
    model.load_state_dict(folder_weights(str(vit), model))
    own = transformers.ViTForImageClassification.from_pretrained(vit).eval()
    x = torch.rand(2, *IMAGES)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), own(x).logits)
    assert model.state_dict().keys() == own.state_dict().keys()
    assert class_names_of(str(vit)) == ["ant", "bee", "cow"]
    preprocessing = preprocessing_of(str(vit))
    assert preprocessing is not None
    assert preprocessing.mean == [0.5, 0.4, 0.3]
    assert preprocessing.std == [0.2, 0.2, 0.1]


def test_a_folders_embedding_is_its_pooled_output(vit: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = made(str(vit), outputs=8, embeds=True).eval()
    x = torch.rand(2, *IMAGES)
    own = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(vit)).eval()
    own.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(x), own(x).pooler_output)
    assert_refused(lambda: made(str(vit), embeds=True), ConfigError, "(2, 8)", "model.embedding", "7")


def test_a_folder_that_does_not_fit_is_refused(vit: Path, tmp_path: Path) -> None:
    assert_refused(lambda: made(str(vit)), ConfigError, "3", "7")
    assert_refused(lambda: made(str(vit), (3, 48, 48), 3), ConfigError, "(3, 48, 48)")
    for file in vit.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert not has_weights(str(tmp_path / "nowhere"))
    from safetensors.torch import load_file, save_file

    weights = load_file(vit / "model.safetensors")
    weights.pop("classifier.bias")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert_refused(lambda: folder_weights(str(tmp_path), made(str(tmp_path), outputs=3)), DataError, "classifier.bias")
    (tmp_path / "model.safetensors").unlink()
    assert not has_weights(str(tmp_path))
    (tmp_path / "config.json").write_text("[1, 2")
    assert_refused(lambda: made(str(tmp_path), outputs=3), (FileFormatError, ConfigError), "config.json")


def processor_folder(folder: Path, said: dict[str, Any], nested: bool = False) -> Path:
    """A folder that says what its image processor does, and nothing of a model."""
    (folder / "config.json").write_text("{}")
    name, content = (
        ("processor_config.json", {"image_processor": said}) if nested else ("preprocessor_config.json", said)
    )
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ViT", {}),
        ("ViT", {"do_rescale": False, "image_mean": [127.5, 120.0, 110.0], "image_std": [127.5, 60.0, 50.0]}),
        ("ViT", {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 0.9, 0.8]}),
        ("ViT", {"do_normalize": False}),
        ("ViT", {"do_normalize": False, "rescale_factor": 1 / 127.5}),
        ("ViT", {"do_normalize": False, "do_rescale": False}),
        ("EfficientNet", {"image_std": [0.5, 0.4, 0.3]}),
        ("EfficientNet", {"include_top": False, "rescale_offset": True, "rescale_factor": 1 / 127.5}),
        ("EfficientNet", {"do_normalize": False, "image_std": [0.5, 0.4, 0.3]}),
    ],
)
def test_pixels_are_what_a_folders_processor_gives(
    tmp_path: Path, kind: str, settings: dict[str, Any], nested: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, f"{kind}ImageProcessor")(do_resize=False, **settings)
    said = json.loads(processor.to_json_string())
    found = preprocessing_of(str(processor_folder(tmp_path, said, nested)))
    pixels = torch.randint(0, 256, (3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    theirs = processor(pixels, return_tensors="pt")["pixel_values"][0]
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in found or ([0.0], [1.0]))
    torch.testing.assert_close((pixels / 255 - mean) / std, theirs.float(), rtol=1e-5, atol=1e-4)
    assert (found is None) == (settings == {"do_normalize": False})


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"do_flip_channel_order": True}, ("do_flip_channel_order", "RGB", "MODULE:FUNCTION")),
        ({"size": 224}, ("do_normalize",)),
        ({"do_normalize": True, "image_mean": [0.5]}, ("image_std",)),
        ({"image_mean": [0.5], "image_std": [0]}, ("image_std",)),
    ],
)
def test_processors_that_can_not_be_followed_are_refused(
    tmp_path: Path, said: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert_refused(
        lambda: preprocessing_of(str(processor_folder(tmp_path, said))), (DataError, FileFormatError), *names
    )
