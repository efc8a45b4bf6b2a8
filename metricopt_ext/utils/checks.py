"""Checks of hyper-parameters: one that is out of range is a ValueError that prints its name and value."""


def check_at_least(least: float, **values: float | None) -> None:
    """Refuse values below ``least``, NaN among them; None, which stands for no value, passes.

    Raises:
        ValueError: With the first such name and value.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_above(bound: float, **values: float | None) -> None:
    """Refuse values that are not above ``bound``, NaN among them; None, which stands for no value, passes.

    Raises:
        ValueError: With the first such name and value.
    """
    for name, value in values.items():
        if value is not None and not value > bound:
            raise ValueError(f"{name} is {value}; it must be above {bound}")
