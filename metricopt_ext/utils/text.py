"""Text of files, in whichever of Unicode's encodings they have."""

import codecs

# UTF-32's mark begins with UTF-16's.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def text_of(content: bytes) -> str:
    """Return a file's text without a mark before it: of UTF-8, or of UTF-16 or UTF-32 with their marks.

    Raises:
        ValueError: It is none of them; the message says where, and what to do.

    Examples:
        >>> text_of("a line".encode("utf-16"))
        'a line'
    """
    encoding = next((each for mark, each in MARKS.items() if content.startswith(mark)), "utf-8-sig")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise not_unicode(error) from error


def not_unicode(error: UnicodeDecodeError) -> ValueError:
    """Return the error of bytes that are text in none of Unicode's encodings."""
    line = error.object.count(b"\n", 0, error.start) + 1
    return ValueError(f"line {line} is not UTF-8, by the byte 0x{error.object[error.start]:02x}; save it as UTF-8")
