"""What is said where a host's own function will leave out what phi was merged into."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from helpers.networks import LayerNormNet as Net
from helpers.refusals import assert_warned
from metricopt_ext.adapters.attach import attach_film, attach_outputs
from metricopt_ext.adapters.signature import Outputs


def warnings_of_merging(model: nn.Module, layers: Any = None, size: float = 1.0) -> list[str]:
    adapter = attach_film(model, layers, dim=2)
    adapter.set_phi(torch.full((2,), size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapter.merge()
    return [str(each.message) for each in caught]


def test_ordinary_models_are_saved_as_a_whole() -> None:
    assert warnings_of_merging(Net()) == []
    frozen = Net().requires_grad_(False)
    assert warnings_of_merging(frozen) == []


class Partial(Net):
    """Saves what is trainable alone, as some do with frozen backbones."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: each for name, each in super().state_dict(*args, **kwargs).items() if name.startswith("head")}


class Hooked(Net):
    """Leaves a part out of Lightning's checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint["state_dict"] if name.startswith("norm")]:
            del checkpoint["state_dict"][name]


class Ignoring(Net):
    """Hugging Face's way to leave tensors out."""

    _keys_to_ignore_on_save = (r"norm\.bias",)


@pytest.mark.parametrize(
    ("make", "lost"),
    [(Partial, "['norm.weight', 'norm.bias']"), (Hooked, "['norm.weight', 'norm.bias']"), (Ignoring, "['norm.bias']")],
)
def test_what_a_model_s_own_functions_leave_out(make: Any, lost: str) -> None:
    (message,) = warnings_of_merging(make())
    assert message.startswith(f"the state dict that {make.__name__} saves leaves out {lost}, where phi is now")
    assert warnings_of_merging(make(), size=0.0) == []  # nothing is lost
    adapter = attach_film(make(), dim=2)
    adapter.set_phi(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.merged_state_dict()  # is saved by its user


def test_offsets_are_where_the_head_is_saved() -> None:
    adapter = attach_outputs(Partial())
    adapter.set_phi(torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.merge()


class WithAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.average = AveragedModel(self.net)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class ModelEmaV2(nn.Module):
    """As timm's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)


def test_an_average_that_phi_is_not_merged_into() -> None:
    (message,) = warnings_of_merging(WithAverage(), "net.norm")
    assert message.startswith("average (AveragedModel) keeps an average of the weights, which lacks phi")
    assert warnings_of_merging(WithAverage(), "*.norm") == []
    model = WithAverage()
    model.average = ModelEmaV2(model.net)  # type: ignore[assignment]
    assert warnings_of_merging(model, "net.norm")[0].startswith("average (ModelEmaV2) keeps an average")


def peft_model(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["body"], **options)).eval()


def test_peft_saves_no_norms(tmp_path: Any) -> None:
    model, x = peft_model(), torch.randn(5, 4)
    (message,) = warnings_of_merging(model)
    assert "what was tuned in ['base_model.model.norm.weight', 'base_model.model.norm.bias'] will be lost" in message
    assert "save model.merge_and_unload(), or name these layers in modules_to_save" in message
    tuned = model(x)
    model.save_pretrained(tmp_path)
    peft = pytest.importorskip("peft")
    assert not torch.allclose(peft.PeftModel.from_pretrained(Net(), tmp_path).eval()(x), tuned)
    torch.testing.assert_close(model.merge_and_unload()(x), tuned)


def test_peft_saves_modules_to_save(tmp_path: Any) -> None:
    model, x = peft_model(modules_to_save=["norm", "head"]), torch.randn(5, 4)
    head = "base_model.model.head.modules_to_save.default"
    adapter = attach_film(model, "*norm.modules_to_save.default", dim=2, outputs=Outputs(head))
    adapter.set_phi(torch.ones(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.merge()
    model.save_pretrained(tmp_path)
    peft = pytest.importorskip("peft")
    torch.testing.assert_close(peft.PeftModel.from_pretrained(Net(), tmp_path).eval()(x), model(x))


def test_the_part_within_a_peft_model() -> None:
    (message,) = warnings_of_merging(peft_model().base_model.model)
    assert "what was tuned in ['norm.weight', 'norm.bias'] will be lost" in message


def test_a_bias_that_from_pretrained_does_not_read_is_told() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_labels=3,
        intermediate_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForSequenceClassification(config).eval()
    ids = torch.arange(1, 7)[None]
    plain = model(ids).logits.detach()
    adapter = attach_outputs(model)
    assert adapter.layers == ["score"]
    adapter.set_phi(torch.tensor([1.0, -2.0, 0.5]))
    assert_warned(adapter.merge, "from_pretrained", "score.bias")
    torch.testing.assert_close(model(ids).logits, plain + torch.tensor([1.0, -2.0, 0.5]))


def test_loralib_saves_its_own_weights_alone() -> None:
    linear = type("Linear", (nn.Linear,), {"__module__": "loralib.layers"})
    (message,) = warnings_of_merging(nn.Sequential(linear(4, 3), nn.LayerNorm(3)))
    assert message.startswith("lora_state_dict saves LoRA's weights alone, so phi in ['1.weight', '1.bias'] will be l")
    assert message.endswith("save state_dict()")


def test_a_function_of_the_model_s_own_that_fails_tells_nothing() -> None:
    class Failing(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise KeyError("trainer")

    assert warnings_of_merging(Failing()) == []
