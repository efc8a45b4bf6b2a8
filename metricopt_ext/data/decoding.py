"""An image decoded: of formats that are read, upright, in 8 bits."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

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

# What is lost of pictures of 12 bits, as of medical scanners, that were saved as if they had 16.
TWELVE = (
    "with 16 bits all values are below 4096, so 16 shades are left; scale them to 65535, or save them with 8 bits per"
    " channel"
)


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
    """Return a picture upright, in 8 bits: black stays 0 and white 255, of whatever type its values are.

    16-bit values lose their lower byte, floats in [0, 1] are multiplied by 255; a palette's colours are looked up, and
    transparency is ignored.

    Args:
        image: What `opened` gives.
        mode: As in `load_image_folder`.

    Raises:
        DataError: Its values have no known white: integers of more than 16 bits, floats outside [0, 1], or 16-bit
            values that end at 255 or before, as 8 bits saved with 16 do. Colours of 16 bits that are all 0 are refused,
            too: PIL does not tell them from such.
    """
    from PIL import Image

    kind, deep, image = image.format, has_16_bit_colours(image), upright(image)
    if deep and not _colours(image).any():  # which is also said of a picture that is all black
        raise DataError(
            "its 16-bit values all end at 255 or before: black, if white is 65535. Save it with 8 bits per channel"
        )
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image)
        low, high = values.min(), values.max()
        what = f"mode {image.mode} with values from {low:g} to {high:g}"
        # PIL reads 16-bit PNG and PGM as 32-bit integers in some versions.
        sixteen = image.mode.startswith("I;16") or kind in ("PNG", "PPM")
        if image.mode == "F" and not (low >= 0 and high <= 1):  # NaN is neither
            raise DataError(f"it is of PIL's {what}; only floats in [0, 1] are read. Save it with 8 bits per channel")
        if image.mode != "F" and not sixteen:
            raise DataError(f"it is of PIL's {what}, so it has no known white. Save it with 8 bits per channel")
        if image.mode != "F" and 0 < high <= 255:
            raise DataError(f"it is of PIL's {what}: black, if white is 65535. Save it with 8 bits per channel")
        grey = np.rint(255 * values) if image.mode == "F" else values >> 8
        image = Image.fromarray(grey.astype(np.uint8))
    return image.convert(mode)


def has_16_bit_colours(image: "Image.Image") -> bool:
    """Whether a picture has 16 bits per channel of which PIL keeps the upper 8: in colours, or in grey with alpha.

    Args:
        image: What `opened` gives, not decoded yet: its mode is then that of 8 bits.
    """
    if image.format not in ("PNG", "TIFF") or image.mode.startswith(("I", "F")):
        return False
    forms = [each[3] for each in getattr(image, "tile", ())]  # how PIL is about to unpack the file's values
    return any(";16" in str(form if isinstance(form, str) else form[0]) for form in forms)


def has_12_bits(image: "Image.Image", deep: bool) -> bool:
    """Whether the largest value of a picture with 16 bits is above 255 but below 4096.

    Args:
        image: A picture that was decoded.
        deep: Whether it has colours of 16 bits, by `has_16_bit_colours`.
    """
    if deep:
        return bool(0 < _colours(image).max() < 4096 >> 8)
    return image.mode.startswith("I") and bool(255 < np.asarray(image).max() < 4096)


def _colours(image: "Image.Image") -> "np.ndarray[Any, Any]":
    """The values of a picture without its transparency."""
    return np.asarray(image.convert(image.mode.removesuffix("A")) if image.mode in ("LA", "RGBA") else image)


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
