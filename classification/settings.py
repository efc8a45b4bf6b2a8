"""Settings of a classifier's inference: views of its images, whose logits are averaged, and a temperature.

Thresholds and the classes' offsets are phi's own (`Outputs`), or a line of the search, and are no settings.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.context import Context
from metricopt_ext.data.named_model import tensor_of
from metricopt_ext.tasks.settings import Setting, Settings, Value
from metricopt_ext.utils.kept_outputs import KeptOutputs, circumstances, digest_of, digest_of_model
from metricopt_ext.utils.modes import trains
from metricopt_ext.utils.words import brief

CROPS = 5  # the four corners and the centre, with the flip ten crops in all (Krizhevsky et al., NeurIPS 2012)
CROPPED = 7 / 8  # of each side, as 224 of 256
COOLEST, HOTTEST = 0.25, 4.0


class ClassificationSettings(Settings):
    """The settings of a classifier, as `classification_settings` returns them."""

    def __init__(self, *arguments: Any, kept: KeptOutputs, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kept = kept

    @property
    def passes(self) -> int:
        """Passes over the data while settings were applied, one of each model and view; see `KeptOutputs`."""
        return self._kept.passes


def classification_settings(
    model: nn.Module, *, images: bool = True, temperature: bool = False
) -> ClassificationSettings:
    """Return the settings of a classifier's inference: a flip and crops of its images, and a temperature.

    While they are applied, the model returns the mean of its logits over the views, whoever calls it in evaluation mode
    and without gradients; so does a copy that is made meanwhile, or that they are applied to by name. A loss sees the
    model as it is. The softmax of that mean is the normalised geometric mean of the views' probabilities. The logits of
    each view are kept: a query that changes the temperature alone, or comes back to views that were seen, does not run
    the model, nor are images on disk read for it.

    Args:
        model: Maps inputs, ``n x ...``, to logits, ``n`` or ``n x c``; with or without an adapter.
        images: Whether inputs are images, ``n x channels x h x w``, of which there are views: ``"flip"``, from left to
            right, at twice the inference, and ``"crops"``, 1 or 5, at five times. Crops are 7/8 of each side, scaled
            back to the images' size. A flip is wrong for text and digits: the metric judges it.
        temperature: Whether logits may be divided by a temperature, for a metric that sees probabilities. Of one that
            sees decisions or an order alone it changes nothing.

    Raises:
        ValueError: There is nothing to set; phi has a temperature already; or the model's calls can't be changed.

    Examples:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)).eval()
        >>> settings = classification_settings(model)
        >>> settings.factor({"flip": True, "crops": 5})
        10.0
        >>> with torch.no_grad(), settings.applied({"flip": True}):
        ...     logits = model(torch.rand(4, 3, 8, 8))
    """
    outputs = [each.means.outputs for each in model.modules() if isinstance(each, Context)]
    if temperature and any(each is not None and each.temperature for each in outputs):
        raise ValueError("temperature=True, but phi has one already, Outputs(temperature=True); leave one of them out")
    if not images and not temperature:
        raise ValueError("images=False and temperature=False leave nothing to set; give one of them")
    if "forward" in vars(model) or any(each is not tensor_of for each in model._forward_hooks.values()):
        raise ValueError(
            f"{type(model).__name__} has hooks or a forward of its own, which views would not go through; give"
            " nn.Sequential(model), and attach adapters to that"
        )
    settings = []
    if images:
        settings += [
            Setting("flip", values=(False, True), default=False, inference=2.0),
            Setting("crops", values=(1, CROPS), default=1, inference=float(CROPS)),
        ]
    if temperature:
        settings.append(Setting("temperature", COOLEST, HOTTEST, scale="log", default=1.0))
    kept = KeptOutputs()
    viewed = Viewed(kept)

    @contextmanager
    def apply(values: dict[str, Value], model: nn.Module = model) -> Iterator[None]:
        before = type(model)
        state = viewed.of(**values)  # type: ignore[arg-type]
        model.__class__ = _calling(before, state)
        try:
            yield
        finally:
            state.clear()  # copies that were made meanwhile are as the model again
            model.__class__ = before

    presets = {"flip_and_crops": {"flip": True, "crops": CROPS}} if images else {}
    return ClassificationSettings(settings, apply, presets=presets, kept=kept)


class Viewed:
    """Mean logits over views, each of which runs once on the same inputs in the same model.

    Args:
        kept: Keeps the logits of each view.
    """

    def __init__(self, kept: KeptOutputs) -> None:
        self._kept = kept
        self._digests: dict[tuple[int, ...], tuple[torch.device, str]] = {}  # of images on disk, by their rows

    def of(self, flip: bool = False, crops: int = 1, temperature: float = 1.0) -> list["Mean"]:
        """Return, alone in a list, what gives the mean logits of a model."""
        names = [
            f"{'flipped ' * flipped}{place}"
            for flipped in ([False, True] if flip else [False])
            for place in (range(crops) if crops > 1 else ["whole"])
        ]
        return [Mean(self._kept, self._digests, names, temperature)]


class Mean:
    """Mean logits over some views.

    Args:
        kept: Keeps the logits of each view.
        digests: Device and digest of images on disk that were seen, by their ``streamed_rows``.
        names: The views'.
        temperature: Divides the mean.
    """

    def __init__(
        self,
        kept: KeptOutputs,
        digests: dict[tuple[int, ...], tuple[torch.device, str]],
        names: list[str],
        temperature: float,
    ) -> None:
        self._kept, self._digests, self._names, self._temperature = kept, digests, names, temperature

    def of(self, model: nn.Module, forward: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        """Return the mean logits of a model for inputs.

        Args:
            model: The model.
            forward: Its own forward pass.
            x: Inputs, ``n x ...``.
        """
        part = digest_of([x])
        if (rows := getattr(x, "streamed_rows", None)) is not None:
            self._digests[rows] = x.device, part
        computed = _computed_with(model, x.device)
        return self._mean([self._of_view(name, computed, part, forward, x) for name in self._names])

    def recalled(self, model: nn.Module, rows: tuple[int, ...]) -> Tensor | None:
        """Return the mean logits for images on disk without reading them; None if those of a view aren't kept.

        Args:
            model: The model.
            rows: The images' ``streamed_rows``.
        """
        if rows not in self._digests:
            return None
        device, part = self._digests[rows]
        computed = _computed_with(model, device)
        found = [self._kept.get(f"{computed} {name}", part) for name in self._names]
        return None if any(each is None for each in found) else self._mean(found)

    def _mean(self, found: list[Tensor]) -> Tensor:
        mean = found[0] if len(found) == 1 else torch.stack(found).mean(0)
        return mean if self._temperature == 1 else mean / self._temperature

    def _of_view(self, name: str, computed: str, part: str, forward: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        def run() -> Tensor:
            logits = forward(view_of(x, name))
            if not isinstance(logits, Tensor) or len(logits) != len(x) or logits.dim() > 2:
                raise ValueError(
                    f"the model returned {brief(logits)} for {len(x)} inputs; views are of classifiers that return"
                    " logits, n or n x c"
                )
            return logits

        found: Tensor = self._kept.of(f"{computed} {name}", run, part=part)
        return found


def _computed_with(model: nn.Module, device: torch.device) -> str:
    return f"{digest_of_model(model)} {circumstances(device)}"


def view_of(images: Tensor, name: str) -> Tensor:
    """Return a view of images.

    Args:
        images: ``n x channels x h x w``; for ``"whole"`` any inputs.
        name: ``"whole"``, or the number of a crop, 0 to 4: upper left, upper right, lower left, lower right, centre;
            after ``"flipped "`` of images that are flipped from left to right.

    Raises:
        ValueError: They are no images.
    """
    flipped, place = name.startswith("flipped "), name.removeprefix("flipped ")
    if name != "whole" and images.dim() != 4:
        raise ValueError(f"inputs of shape {tuple(images.shape)} have no views; images are n x channels x h x w")
    images = images.flip(-1) if flipped else images
    if place == "whole":
        return images
    from torchvision.transforms import functional

    height, width = images.shape[-2:]
    size = [max(1, round(CROPPED * height)), max(1, round(CROPPED * width))]
    crop: Tensor = functional.five_crop(images, size)[int(place)]
    resized: Tensor = functional.resize(crop, [height, width], antialias=True)
    return resized


def _calling(base: type[nn.Module], state: list[Mean]) -> type[nn.Module]:
    """Return a class of models that ask a function for their logits, as long as the list has it.

    A class and not another ``forward`` of the model: a copy of the model asks it of itself.
    """

    class Asking(base):  # type: ignore[misc,valid-type]
        def forward(self, *inputs: Any, **options: Any) -> Any:
            plain = super().forward
            alone = len(inputs) == 1 and not options and isinstance(inputs[0], Tensor)
            if not state or not alone or trains(self) or torch.is_grad_enabled():
                return plain(*inputs, **options)
            return state[0].of(self, lambda x: tensor_of(self, None, plain(x)), inputs[0])

        def recalled(self, rows: tuple[int, ...]) -> Tensor | None:
            """Return the logits for images on disk without reading them, if they are kept; see `predict`."""
            if not state or trains(self) or torch.is_grad_enabled():
                return None
            return state[0].recalled(self, rows)

    Asking.__name__, Asking.__qualname__, Asking.__module__ = base.__name__, base.__qualname__, base.__module__
    return Asking
