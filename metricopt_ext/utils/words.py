"""Words for numbers."""


def counted(count: int, noun: str) -> str:
    """Return a number with its regular noun.

    Example:
        >>> counted(1, "seed"), counted(5, "seed"), counted(0, "query")
        ('1 seed', '5 seeds', '0 queries')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"
