"""Text of files in Unicode's encodings."""

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.utils.text import text_of


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_text_in_any_of_unicodes_encodings(encoding: str) -> None:
    assert text_of("cät\r\n猫".encode(encoding)) == "cät\r\n猫"


def test_marks_of_either_order() -> None:
    assert text_of("\ufeffcät".encode("utf-16-be")) == text_of("\ufeffcät".encode("utf-32-be")) == "cät"


def test_other_text_is_told_by_its_line_and_byte() -> None:
    assert_refused(lambda: text_of("cat\ncät".encode("latin-1")), ValueError, "2", "UTF-8", "0xe4")
