"""No code of a file is run, and no name in a file leads outside its folder; what is described must be what is there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film, load_adapter
from metricopt_ext.adapters.checkpoints import files_of
from metricopt_ext.adapters.start import Start
from metricopt_ext.data.arrays import read_array
from metricopt_ext.detection.records import Annotated
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import write_voc
from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.search.learned import UpdateRule, load_update_rule
from metricopt_ext.siblings.sl.set_loss import SetLoss, load_set_loss
from metricopt_ext.utils import files
from metricopt_ext.utils.checkpoint_file import read_checkpoint
from metricopt_ext.utils.files import save_checkpoint
from metricopt_ext.utils.state_dict import load_checkpoint
from metricopt_ext.value.loading import load_value_function
from metricopt_ext.value.value_function import NeuralValueFunction, Quality


def model() -> nn.Module:
    torch.manual_seed(0)  # an adapter's file is for the same weights
    return nn.Sequential(nn.Linear(4, 512), nn.BatchNorm1d(512), nn.Linear(512, 3))


@pytest.fixture(autouse=True)
def right_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checksums fit whatever a file holds: who makes a hostile one makes them fit."""
    monkeypatch.setattr(files, "_checksum", lambda *_: "right")


def described(path: Path) -> tuple[dict[str, torch.Tensor], str, Any]:
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    return tensors, metadata["format"], json.loads(metadata["described"])


def rewrite(path: Path, tensors: dict[str, torch.Tensor], kind: str, content: Any) -> None:
    metadata = {"format": kind, "described": json.dumps(content), "checksum": "right"}
    path.write_bytes(safetensors.torch.save(tensors, metadata=metadata))


def edited(path: Path, content: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Change entries of a file's description, and some of its tensors."""
    theirs, kind, old = described(path)
    new = {
        **old,
        **{key: {**old[key], **v} if isinstance(v, dict) and old.get(key) else v for key, v in content.items()},
    }
    rewrite(path, {**theirs, **(tensors or {})}, kind, new)
    return path


def saved(make: Callable[[], Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "file.safetensors"
        make().save(path)
        return path

    return write


def value_function() -> NeuralValueFunction:
    f = NeuralValueFunction(4, 2)
    f.quality = Quality(0.5, 0.1, 0.2, 10, 5, 0.1, 0.2)
    f.signature = attach_film(model(), dim=4).signature
    return f


# ----- code in a file


class Runs:
    """What runs a command where it is unpickled, as a model's own class might."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".th", ".ckpt", ".bin"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_checkpoint_runs_no_code(suffix: str, legacy: bool, tmp_path: Path) -> None:
    path, mark = tmp_path / f"a{suffix}", tmp_path / "mark"
    content = {"model": nn.Linear(2, 2).state_dict(), "extra": Runs(mark)}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    assert_refused(lambda: load_checkpoint(nn.Linear(2, 2), path), DataError, path.name)
    assert_refused(lambda: read_checkpoint(path), MetricOptError, path.name)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.pt"])
def test_arrays_run_no_code(name: str, tmp_path: Path) -> None:
    path, mark = tmp_path / name, tmp_path / "mark"
    objects = np.array([Runs(mark)], dtype=object)
    if name == "a.npy":
        np.save(path, objects, allow_pickle=True)
    elif name == "a.npz":
        np.savez(path, embeddings=objects)
    else:
        torch.save({"embeddings": Runs(mark)}, path)
    assert_refused(lambda: read_array(path, "embeddings"), DataError, name)
    assert not mark.exists()


# ----- names in a file


def test_names_of_files_lead_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "../other.safetensors"}}))
    save_checkpoint(tmp_path / "other.safetensors", nn.Linear(2, 2).state_dict())
    assert_refused(lambda: files_of(tmp_path / "model"), MetricOptError, "../other.safetensors")

    none = torch.zeros(0)
    truth = Annotated("../0", Path("0.png"), 4, 4, none.reshape(-1, 4), none.long(), none.bool(), none.bool())
    example = Example(torch.zeros(3, 4, 4, dtype=torch.uint8), truth)
    assert_refused(lambda: write_voc(tmp_path / "set", [example], ["a"], "all"), DataError, "../0")
    assert not list(tmp_path.glob("*.png"))


# ----- descriptions that are not of what is there


def attack_file(change: dict[str, Any], make: Callable[[], Any]) -> Callable[[Path], Path]:
    return lambda folder: edited(saved(make)(folder), change)


def adapter() -> Any:
    return attach_film(model(), dim=4)


def started() -> Any:
    """An adapter with a start that replaces a buffer and a parameter."""
    made = adapter()
    made.apply(Start(torch.ones(4), {"1.running_mean": torch.ones(512), "2.bias": torch.ones(3)}))
    return made


def with_tensors(**tensors: torch.Tensor) -> Callable[[Path], Path]:
    return lambda folder: edited(saved(started)(folder), {}, tensors)


big = {"signature": {"dim": 10**9}}

ATTACKS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], str]] = {
    "an adapter's dim": (attack_file(big, adapter), lambda p: load_adapter(model(), p), "dim is 1000000000"),
    "an adapter's matrices": (
        attack_file({"signature": {"channels": [10**6]}}, adapter),
        lambda p: load_adapter(model(), p),
        "channels .*1000000.*512",
    ),
    "a start's unknown tensor": (
        with_tensors(**{"replaced.1.x": torch.zeros(1)}),
        lambda p: load_adapter(model(), p),
        r"the model has no tensor '1\.x'",
    ),
    "a start's shape": (
        with_tensors(**{"replaced.2.bias": torch.zeros(0, 10**9)}),
        lambda p: load_adapter(model(), p),
        r"tensor '2\.bias' has shape \(0, 1000000000\), the model's \(3,\)",
    ),
    "a value function's dim": (
        attack_file({"settings": {"dim": 10**9}}, value_function),
        load_value_function,
        r"tensor 'centre' has shape \(4,\), but should have \(1000000000,\)",
    ),
    "an update rule's hidden units": (
        attack_file({"hidden": 10**7}, lambda: UpdateRule(hidden=4)),
        load_update_rule,
        "tensor 'weights' has shape",
    ),
    "a set loss's outputs": (attack_file({"outputs": 10**8}, lambda: SetLoss(2)), load_set_loss, "tensor .* has shape"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_description_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    write, read, message = ATTACKS[name]
    path = write(tmp_path)
    with pytest.raises(MetricOptError, match=message) as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"signature": {"seed": 10**30}},
        {"signature": {"layers": ["*"]}},
        {"signature": {"outputs": {"layer": "2", "scale": 1.0, "temperature": False}}},
    ],
)
def test_a_model_is_as_it_was_after_an_adapter_that_can_not_be_loaded(change: dict[str, Any], tmp_path: Path) -> None:
    path = attack_file(change, adapter)(tmp_path)
    net = model()
    net[2].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trained = [parameter.requires_grad for parameter in net.parameters()]
    with pytest.raises(MetricOptError):
        load_adapter(net, path)
    assert [name for name, _ in net.named_modules()] == ["", "0", "1", "2"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert [parameter.requires_grad for parameter in net.parameters()] == trained
    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("missing", ["phi", "matrices.1.A"])
def test_an_attached_adapter_is_as_it_was_after_a_file_that_lacks_a_tensor(missing: str, tmp_path: Path) -> None:
    path = saved(adapter)(tmp_path)
    tensors, kind, content = described(path)
    tensors = {name: value + 1 for name, value in tensors.items() if name != missing}
    rewrite(path, tensors, kind, content)
    attached = adapter()
    before = {name: value.clone() for name, value in attached.model.named_buffers()}
    with pytest.raises(MetricOptError, match=f"it has no tensor '{missing}'"):
        attached.load(path)
    assert not attached.phi.any()
    assert all(torch.equal(value, before[name]) for name, value in attached.model.named_buffers())
