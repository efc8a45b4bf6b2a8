"""An image decoded: of formats that are read, upright, in 8 bits."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.utils.words import brief

if TYPE_CHECKING:
    from PIL import Image

Mode = Literal["RGB", "L"]

# What PIL may take a file for, whatever its name is: all that are decoded within PIL. It would run Ghostscript on EPS.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# How `PIL.Image.Transpose` turns a picture upright, by its EXIF orientation.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


@contextmanager
def opened(content: bytes) -> Iterator["Image.Image"]:
    """Open an image of one of `FORMATS`, not yet decoded, to decode it (`decoded`).

    Args:
        content: The file's.

    Raises:
        DataError: It is no such image, or can't be decoded; the message does not name the file.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            yield image
    except MetricOptError:
        raise
    except UnidentifiedImageError as error:  # whose own message is an address
        raise DataError(f"it is none of {', '.join(FORMATS)}" if content else "it is empty") from error
    except Exception as error:  # PIL's plugins raise errors of many types
        raise DataError(brief(error)) from error


def decoded(image: "Image.Image", mode: Mode) -> "Image.Image":
    """Return a picture upright, in 8 bits; a palette's colours are looked up, and transparency is ignored.

    Args:
        image: What `opened` gives.
        mode: As in `load_image_folder`.

    Raises:
        DataError: It has more than 8 bits per channel: what is white there, no one can tell.
    """
    # How PIL is about to unpack the file's values: of 16 bits in colours it would keep the upper 8 without a word.
    forms = [each[3] for each in getattr(image, "tile", ())]
    deep = any(";16" in str(form if isinstance(form, str) else form[0]) for form in forms)
    if deep or image.mode.startswith(("I", "F")):
        raise DataError(
            f"it is of PIL's mode {image.mode} with more than 8 bits per channel; save it with 8 bits, black 0 and"
            " white 255"
        )
    return upright(image).convert(mode)


def upright(image: "Image.Image") -> "Image.Image":
    """Return a picture rotated as its EXIF orientation says."""
    from PIL import ExifTags
    from PIL.Image import Transpose

    if image.format == "TIFF":  # PIL rotates these itself, and some versions keep the orientation
        return image
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # broken EXIF data raise errors of many types; Detectron2 ignores them too
        return image
    # Not `ImageOps.exif_transpose`: it rewrites the EXIF data, which fails if a field is odd.
    return image.transpose(Transpose[_TURNS[orientation]]) if orientation in _TURNS else image
