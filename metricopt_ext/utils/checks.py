"""Checks of hyper-parameters: a value out of range raises a ValueError that gives its name and value."""


def check_at_least(least: float, **values: float | None) -> None:
    """Reject values below ``least`` and NaN; None, meaning no value, passes.

    Raises:
        ValueError: A value is rejected; the message gives the first such name and value.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_above(bound: float, **values: float | None) -> None:
    """Reject values that are not above ``bound`` and NaN; None, meaning no value, passes.

    Raises:
        ValueError: A value is rejected; the message gives the first such name and value.
    """
    for name, value in values.items():
        if value is not None and not value > bound:
            raise ValueError(f"{name} is {value}; it must be above {bound}")
