"""The model that a config names: torchvision's or timm's, that of a Hugging Face folder, or what a function builds."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.extras import require
from metricopt_ext.utils.files import content_of, parse_json
from metricopt_ext.utils.named import named
from metricopt_ext.utils.state_dict import is_script
from metricopt_ext.utils.words import brief, shortened

TIMM = "timm/"  # begins the names of timm's models, of which torchvision has some too
AUXILIARY = ("googlenet", "inception_v3")  # torchvision's classifiers that have others beside the last layer ...
AUXILIARY_PARTS = ("aux1", "aux2", "AuxLogits")  # ... and what they are called in its weights
SCRIPTED = (
    "is of TorchScript, whose layers are compiled, so that none can be modulated; name what builds the model, as"
    " MODULE:FUNCTION, and give its state dict as model.weights"
)


@dataclass(kw_only=True)
class NamedModelConfig:
    """The settings of a model that is named as ``MODULE:FUNCTION``, ``timm/NAME`` or a folder, which alone has them."""

    NAMES: ClassVar[str] = "MODULE:FUNCTION, timm/NAME or a folder"  # of the models that have them

    folder: str = ""  # MODULE:FUNCTION: where the module is, if it is not installed
    # further arguments of what builds the model, e.g. {depth: 3}; model.kwargs.depth=3 on the command line
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def are_of(cls, name: str) -> bool:
        """Whether a model of this name has these settings."""
        return ":" in name or "/" in name


class Preprocessing(NamedTuple):
    """What pixels in [0, 1] are normalised by, channel by channel."""

    mean: list[float]
    std: list[float]


def settings_of(config: Any) -> dict[str, Any]:
    """Return what `named_model` takes of a config's section ``model``."""
    return {"folder": getattr(config, "folder", ""), "kwargs": getattr(config, "kwargs", {})}


def named_model(
    name: str,
    input_shape: Sequence[int],
    outputs: int,
    *,
    others: str,
    embeds: bool = False,
    folder: str = "",
    kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a model by name, with fresh weights; importing the module of a function runs it.

    Args:
        name: ``MODULE:FUNCTION``, called as ``FUNCTION(outputs, input_shape, **kwargs)``; a folder with Hugging Face's
            ``config.json``; one of torchvision's classifiers, e.g. ``resnet18``; or one of timm's, with or without
            ``timm/`` before it.
        input_shape: Shape of one input: ``features`` or ``c x h x w``.
        outputs: Number of outputs.
        others: Names of the other available models, for the message.
        embeds: Whether its outputs are an embedding: a folder's model is then taken without a classifier.
        folder: Where the module is, if it is not installed (`import_named`).
        kwargs: Further arguments of what builds it.

    Returns:
        The model, in training mode. It maps ``n x ...`` to ``n x outputs``, or to ``n`` if there are two classes.

    Raises:
        ConfigError: There is no such model, or it does not take such inputs or give such outputs.
    """
    model = _builder(name, others, embeds, folder)(outputs, tuple(input_shape), dict(kwargs or {}))
    _try(model, name, tuple(input_shape), outputs, embeds)
    return model.train()


def own_model(name: str, *arguments: Any, folder: str = "", kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Return what a function builds; importing its module runs it.

    Args:
        name: ``MODULE:FUNCTION``.
        arguments: What it is called with ...
        folder: Where the module is, if it is not installed (`import_named`).
        kwargs: ... and its further arguments, by name.

    Raises:
        ConfigError: There is no such function, it fails, or it returns no `torch.nn.Module`.
    """
    function = named("model.name", name, folder, kwargs, made=False)
    try:
        model = function(*arguments)
    except Exception as error:
        shown = ", ".join([*map(str, arguments), *(["**model.kwargs"] if kwargs else [])])
        raise ConfigError(
            f"model.name={name} fails as FUNCTION({shown}): {type(error).__name__}: {brief(error)}"
        ) from error
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(f"what model.name={name} returns {SCRIPTED}")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name={name} returned {brief(model)}; it must return a torch.nn.Module")
    return model


def tensor_of(model: nn.Module, inputs: Any, output: Any) -> Any:
    """Return the tensor of what a model put out: of Hugging Face's outputs the logits, or else the pooled output.

    It is a forward hook, so that the state dict keeps the model's own names.
    """
    for part in ("logits", "pooler_output"):
        if not isinstance(output, Tensor) and isinstance(found := getattr(output, part, None), Tensor):
            return found.flatten(1)
    return output


def is_folder(name: str) -> bool:
    """Whether a name is that of a Hugging Face folder."""
    return ":" not in name and Path(name, "config.json").is_file()


def has_weights(name: str) -> bool:
    """Whether a name is that of a Hugging Face folder that has weights, and not a config alone."""
    files = [each for pattern in ("*.safetensors", "pytorch_model*.bin") for each in Path(name).glob(pattern)]
    return is_folder(name) and bool(files)


def folder_weights(name: str, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a Hugging Face folder has for a model that was built from it; no code in them is run.

    Raises:
        DataError: They can't be read, or are not all of the model's.
    """
    try:
        loaded, told = type(model).from_pretrained(  # type: ignore[attr-defined]
            name, local_files_only=True, output_loading_info=True, dtype=torch.float32
        )
    except Exception as error:
        raise DataError(f"model.name={name} holds no weights for {type(model).__name__}: {brief(error)}") from error
    missing = [str(each) for key in ("missing_keys", "mismatched_keys") for each in told[key]]
    if missing:
        raise DataError(f"model.name={name} lacks weights of {type(model).__name__}: {shortened(sorted(missing))}")
    state: dict[str, Tensor] = loaded.state_dict()
    return state


def class_names_of(name: str) -> list[str]:
    """Return the classes that a Hugging Face folder's model was trained for, in its order; none if it names none."""
    labels = _read(name, "config.json").get("id2label") if is_folder(name) else None
    if not isinstance(labels, dict) or all(str(each) == f"LABEL_{key}" for key, each in labels.items()):
        return []
    with content_of(Path(name, "config.json"), "classes by number in id2label"):
        return [str(labels[key]) for key in sorted(labels, key=int)]


def preprocessing_of(name: str) -> Preprocessing | None:
    """Return what a Hugging Face folder's images are normalised by; None for other models, or for none.

    The rescaling of its image processor is part of it: it takes pixels in [0, 1] to what the processor would give.

    Raises:
        DataError: The processor also reverses the channels, or the folder leaves open what it does.
        FileFormatError: The folder's description of it can't be read.
    """
    found = _image_processor(name) if is_folder(name) else None
    if found is None:
        return None
    path, said = found
    if said.get("do_flip_channel_order"):
        raise DataError(
            f"{path} has do_flip_channel_order, but pixels are given in the order RGB; name a function that builds a"
            " model which reverses them, as model.name=MODULE:FUNCTION"
        )
    normalises, rescales = said.get("do_normalize"), said.get("do_rescale") is not False
    if normalises is None:
        # Processors differ in what they do then; those that can reverse the channels don't normalise.
        if "do_flip_channel_order" in said or said.get("image_mean") is None:
            raise DataError(f"{path} does not say whether pixels are normalised; add do_normalize, true or false")
        normalises = True
    again = bool(said.get("include_top"))  # EfficientNet's divides by the deviation once more
    if lacking := [key for key in ("image_mean", "image_std") if (normalises or again) and said.get(key) is None]:
        raise DataError(f"{path} has no {' and no '.join(lacking)} to normalise pixels by; add them")
    factor = said.get("rescale_factor")
    with content_of(path, "rescale_factor, image_mean and image_std"):
        scale = 255 * (1 / 255 if factor is None else float(factor)) if rescales else 255.0
        own = Preprocessing(*([float(each) for each in said.get(key) or ()] for key in ("image_mean", "image_std")))
    if not (scale > 0 and all(each > 0 for each in own.std)):
        raise DataError(f"{path} has rescale_factor={factor} and image_std={own.std}; they must be above 0")
    channels = len(own.std) or int(_read(name, "config.json").get("num_channels") or 3)
    mean, std = own if normalises else Preprocessing([0.0] * channels, [1.0] * channels)
    # (scale x - offset - mean) / std, and perhaps by the deviation again
    offset = 1 if rescales and said.get("rescale_offset") else 0
    mean = [(each + offset) / scale for each in mean]
    std = [each / scale * (more if again else 1) for each, more in zip(std, own.std or std, strict=True)]
    return Preprocessing(mean, std) if any(mean) or any(each != 1 for each in std) else None


def _image_processor(name: str) -> tuple[Path, dict[str, Any]] | None:
    """What a folder says of its image processor, and where; transformers looks in the same order."""
    both, alone = "processor_config.json", "preprocessor_config.json"
    if Path(name, both).is_file() and "image_processor" in (said := _read(name, both)):
        with content_of(Path(name, both), "JSON object as image_processor"):
            return Path(name, both), dict(said["image_processor"])
    if Path(name, alone).is_file():
        return Path(name, alone), _read(name, alone)
    config = _read(name, "config.json")
    if "pretrained_cfg" not in config:
        return None
    with content_of(Path(name, "config.json"), "JSON object as pretrained_cfg"):  # timm's
        timms = dict(config["pretrained_cfg"])
    return Path(name, "config.json"), {
        **{f"image_{key}": timms[key] for key in ("mean", "std") if key in timms},
        "do_normalize": True,
    }


def _read(name: str, file: str) -> dict[str, Any]:
    path = Path(name, file)
    with content_of(path, "JSON object"):
        content = parse_json(path.read_bytes())
        return dict(content)


Builder = Callable[[int, tuple[int, ...], dict[str, Any]], nn.Module]


def _builder(name: str, others: str, embeds: bool, folder: str) -> Builder:
    import torchvision

    if ":" in name:
        return lambda outputs, shape, kwargs: own_model(name, outputs, shape, folder=folder, kwargs=kwargs)
    if is_folder(name):
        return partial(_huggingface, name, embeds)
    if Path(name).is_file():
        plain = "is a file; model.name names what builds the model, and model.weights its checkpoint"
        raise ConfigError(f"model.name={name} {SCRIPTED if is_script(Path(name)) else plain}")
    if Path(name).is_dir():
        raise ConfigError(f"model.name={name} is a folder without config.json, so not one of Hugging Face")
    if name in torchvision.models.list_models(module=torchvision.models):
        return partial(_torchvision, name)
    try:
        require("timm")
    except ModuleNotFoundError as error:
        if name.startswith(TIMM):
            raise ConfigError(f"model.name={name} needs timm: pip install timm") from error
        raise ConfigError(f"model.name={name!r} is {_none_of(others)}; timm's need timm: pip install timm") from error
    import timm

    if not timm.is_model(name.removeprefix(TIMM)):
        raise ConfigError(
            f"model.name={name!r} is {_none_of(others)}, nor one of timm, nor a folder with config.json; name your own"
            " function as MODULE:FUNCTION"
        )
    return partial(_timm, name.removeprefix(TIMM))


def _none_of(others: str) -> str:
    return f"neither {others} nor a torchvision classifier"


def _timm(name: str, outputs: int, shape: tuple[int, ...], kwargs: dict[str, Any]) -> nn.Module:
    import timm

    try:
        model: nn.Module = timm.create_model(
            name, pretrained=False, num_classes=outputs, **{"in_chans": shape[0], **kwargs}
        )
    except Exception as error:
        raise ConfigError(f"model.name={TIMM}{name} with model.kwargs={kwargs}: {brief(error)}") from error
    return model


def _torchvision(name: str, outputs: int, shape: tuple[int, ...], kwargs: dict[str, Any]) -> nn.Module:
    import torchvision

    # Their auxiliary classifiers make the output of training a tuple, and need images that the networks do not.
    bare = {"aux_logits": False} if name in AUXILIARY else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=outputs, **{**bare, **kwargs})
    if bare:
        model.register_load_state_dict_pre_hook(_without_auxiliary)
    return model


def _without_auxiliary(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take auxiliary classifiers out of a state dict that is about to be loaded."""
    found = [key for key in state if key.startswith(tuple(f"{prefix}{part}." for part in AUXILIARY_PARTS))]
    for key in found:
        del state[key]
    if found:
        warnings.warn(
            f"the auxiliary classifiers of the weights for {type(model).__name__}, which only training uses, left out",
            stacklevel=2,
        )


def _huggingface(name: str, embeds: bool, outputs: int, shape: tuple[int, ...], kwargs: dict[str, Any]) -> nn.Module:
    try:
        require("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(f"model.name={name} needs transformers: pip install transformers") from error
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    labels = _read(name, "config.json").get("id2label")
    own = {} if embeds else {"num_labels": outputs}
    if isinstance(labels, dict) and not embeds and len(labels) != outputs:
        raise ConfigError(
            f"model.name={name} is for {len(labels)} classes, the data has {outputs}; train its last layer for yours"
        )
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False, **own, **kwargs)
        kind: Any = AutoModel if embeds else AutoModelForImageClassification
        model: nn.Module = kind.from_config(config, trust_remote_code=False).float()
    except Exception as error:
        raise ConfigError(f"model.name={name}: {brief(error)}") from error
    return model


def _try(model: nn.Module, name: str, shape: tuple[int, ...], outputs: int, embeds: bool) -> None:
    """Reject a model that does not take such inputs, or that puts out something else; of named outputs take the tensor.

    Raises:
        ConfigError: It does.
    """
    what = "images" if len(shape) == 3 else "inputs"
    try:
        with torch.no_grad():
            found = model.eval()(torch.zeros(2, *shape))
            if not isinstance(found, Tensor) and isinstance(tensor := tensor_of(model, None, found), Tensor):
                model.register_forward_hook(tensor_of)
                found = tensor
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model.name={name} does not take {what} of shape {shape}: {why}") from error
    fitting = [(2, outputs)] if embeds or outputs != 2 else [(2, outputs), (2,)]
    if not isinstance(found, Tensor) or tuple(found.shape) not in fitting:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        key = "model.embedding" if embeds else "the number of classes"
        raise ConfigError(
            f"model.name={name} maps 2 {what} of shape {shape} to {got}, but {key} is {outputs}, so it must be"
            f" {' or '.join(map(str, fitting))}"
        )
