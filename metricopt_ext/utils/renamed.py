"""Former names of public attributes: using one raises an error that gives the new name."""

from typing import Any, NoReturn


class Renamed:
    """Takes the place, in a class, of an attribute that has been renamed.

    Args:
        new: The attribute's current name.

    Example:
        >>> class Metric:
        ...     ask = Renamed("evaluate")
        >>> Metric().ask
        Traceback (most recent call last):
            ...
        AttributeError: Metric.ask is now Metric.evaluate
    """

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.message = f"{owner.__name__}.{name} is now {owner.__name__}.{self.new}"

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(self.message)


class KnowsRenamed:
    """Base of classes with `Renamed` attributes: a subclass that still overrides one of them is refused."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        former = {k: v for base in cls.__mro__[1:] for k, v in vars(base).items() if isinstance(v, Renamed)}
        for name in former.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}.{name} overrides a former name: {former[name].message}")
