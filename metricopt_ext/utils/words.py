"""Words for numbers and names in messages."""


def counted(count: int, noun: str) -> str:
    """Return a number with its regular noun.

    Example:
        >>> counted(1, "seed"), counted(5, "seed"), counted(0, "query")
        ('1 seed', '5 seeds', '0 queries')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"


def shortened(names: list[str]) -> str:
    """Format a list of names; a long one is cut to its beginning and its length.

    Example:
        >>> shortened(["a"]), shortened(list("abcdefg"))
        ("['a']", "['a', 'b', 'c', 'd', 'e', ... 7 in all]")
    """
    return str(names) if len(names) <= 6 else f"[{', '.join(map(repr, names[:5]))}, ... {len(names)} in all]"
