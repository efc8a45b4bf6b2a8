"""Text of files, in UTF-8."""


def text_of(content: bytes) -> str:
    """Return a file's text without a mark before it.

    Raises:
        ValueError: It is not UTF-8; the message says where, and what to do.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {line} is not UTF-8, by the byte 0x{content[error.start]:02x}; save it as UTF-8"
        ) from error
