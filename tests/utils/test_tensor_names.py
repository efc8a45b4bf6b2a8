"""What a model calls the tensors of a file."""

import pytest

from metricopt_ext.utils.tensor_names import names_in_model

OWN = ["a.weight", "a.bias", "b.0.running_var", "b.0.num_batches_tracked"]


@pytest.mark.parametrize(
    "form",
    [
        "{}",
        "module.{}",
        "trunk.{}",
        "_orig_mod.{}",
        "_orig_mod.module.trunk.{}",
    ],
)
def test_a_prefix_is_left_out(form: str) -> None:
    names = names_in_model([form.format(name) for name in OWN], OWN)
    assert names.names == {form.format(name): name for name in OWN}
    assert not names.left_out


@pytest.mark.parametrize("prefix", ["module.", "model.", "trunk."])
def test_a_models_own_prefix_is_put_before(prefix: str) -> None:
    own = [prefix + name for name in OWN]
    assert names_in_model(OWN, own).names == {name: prefix + name for name in OWN}
    wrapped = [f"module._orig_mod.{name}" for name in OWN]
    assert names_in_model(wrapped, own).names == {f"module._orig_mod.{name}": prefix + name for name in OWN}
    assert names_in_model(own, own).names == {name: name for name in own}


@pytest.mark.parametrize("part", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"])
def test_parts_within_names_are_left_out(part: str) -> None:
    names = ["a.weight", "a.bias", f"b.{part}.0.running_var"]
    assert names_in_model(names, OWN).names[f"b.{part}.0.running_var"] == "b.0.running_var"
    own = ["a.weight", "a.bias", f"b.{part}.0.running_var"]
    assert names_in_model(names, own).names == {name: name for name in names}


def test_what_is_beside_the_model_is_told() -> None:
    names = [*(f"model.{name}" for name in OWN), "loss.weight", "n_averaged", *(f"ema.module.{name}" for name in OWN)]
    read = names_in_model(names, OWN)
    assert set(read.names.values()) == set(OWN)
    assert read.left_out == ["loss.weight", *(f"ema.module.{name}" for name in OWN)]
