"""What wraps a model, or a part of one, does not hide its layers."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor

from helpers.networks import LayerNormNet as Net
from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.wrappers import bare_name
from metricopt_ext.errors import AdapterError


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: None, ("model", "None", "torch.nn.Module")),
        (lambda: nn.Sequential(nn.LazyLinear(2)), ("0.weight",)),
        (torch.inference_mode()(lambda: nn.Linear(1, 1)), ("torch.inference_mode",)),
        (lambda: torch.jit.trace(nn.LayerNorm(2), torch.zeros(1, 2)), ("TorchScript",)),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_has_no_layers_to_modulate_is_refused(make: Callable[[], Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: attach_film(make(), dim=2), AdapterError, *names)


def test_a_model_of_which_each_process_has_a_part_is_refused_and_a_whole_one_has_a_warning(tmp_path: Path) -> None:
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        for model in (FullyShardedDataParallel(Net(), device_id=torch.device("cpu")), fully_shard(Net())):
            assert_refused(lambda model=model: attach_film(model, dim=2), AdapterError, "weights")
        split = Net()
        split.norm.weight = nn.Parameter(distribute_tensor(split.norm.weight, init_device_mesh("cpu", (1,))))
        assert_refused(lambda: attach_film(split, dim=2), AdapterError, "norm.weight", "divided")
        whole = nn.parallel.DistributedDataParallel(Net())
        assert_warned(lambda: attach_film(whole, dim=2), "DistributedDataParallel", "before")
    finally:
        distributed.destroy_process_group()


def test_layers_of_wrapped_parts_are_found_by_their_own_names() -> None:
    trunk = torchvision.models.resnet18(num_classes=4)
    for part in (nn.DataParallel(trunk), torch.compile(trunk, backend="eager")):
        model = nn.ModuleDict({"trunk": part, "embedder": nn.Linear(4, 4)})
        adapter = attach_film(model, "trunk.layer4.*.bn2", dim=2)
        assert [bare_name(name) for name in adapter.layers] == ["trunk.layer4.0.bn2", "trunk.layer4.1.bn2"]
        adapter.remove()
    exact = nn.ModuleDict({"module": nn.LayerNorm(3), "norm": nn.ModuleDict({"module": nn.LayerNorm(3)})})
    assert attach_film(exact, "norm.module", dim=2).layers == ["norm.module"]
    assert_refused(
        lambda: attach_film(nn.ModuleDict({"trunk": nn.DataParallel(trunk)}), "layer5.*"),
        AdapterError,
        "layers='layer5.*'",
    )


def peft_model(**how: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Net(), peft.LoraConfig(r=2, **how)).eval()


def test_layers_under_peft() -> None:
    model = peft_model(target_modules=["body", "head"], modules_to_save=["norm"])
    x = torch.randn(5, 4)
    plain = model(x)
    adapter = attach_film(model, "norm", dim=2, outputs=Outputs())
    assert adapter.layers == ["base_model.model.norm.modules_to_save.default", "base_model.model.head.base_layer"]
    adapter.set_phi(torch.tensor([0.0, 0.0, 1.0, -2.0, 0.5]))
    torch.testing.assert_close(model(x), plain + torch.tensor([1.0, -2.0, 0.5]))
    torch.testing.assert_close(adapter.remove()(x), plain)
    assert attach_film(model, dim=2).layers == ["base_model.model.norm.modules_to_save.default"]


def test_peft_saves_no_norms(tmp_path: Any) -> None:
    model, x = peft_model(target_modules=["body"]), torch.randn(5, 4)
    adapter = attach_film(model, dim=2)
    adapter.set_phi(torch.ones(2))
    assert_warned(adapter.merge, "base_model.model.norm.bias", "model.merge_and_unload()", "modules_to_save")
    tuned = model(x)
    model.save_pretrained(tmp_path)
    peft = pytest.importorskip("peft")
    assert not torch.allclose(peft.PeftModel.from_pretrained(Net(), tmp_path).eval()(x), tuned)
    torch.testing.assert_close(model.merge_and_unload()(x), tuned)


def test_peft_saves_modules_to_save(tmp_path: Any) -> None:
    model, x = peft_model(target_modules=["body"], modules_to_save=["norm", "head"]), torch.randn(5, 4)
    head = "base_model.model.head.modules_to_save.default"
    adapter = attach_film(model, "*norm.modules_to_save.default", dim=2, outputs=Outputs(head))
    adapter.set_phi(torch.ones(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.merge()
    model.save_pretrained(tmp_path)
    peft = pytest.importorskip("peft")
    torch.testing.assert_close(peft.PeftModel.from_pretrained(Net(), tmp_path).eval()(x), model(x))
