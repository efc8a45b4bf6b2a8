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
