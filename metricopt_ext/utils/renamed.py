"""Names that public attributes had before: using one is an error that names the new one."""

from typing import Any, NoReturn


class Renamed:
    """Stands in a class in place of an attribute that has another name now.

    Args:
        new: The attribute's present name.

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
