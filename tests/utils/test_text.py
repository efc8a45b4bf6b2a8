"""Text of files in UTF-8."""

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.utils.text import text_of


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_text_with_or_without_a_mark(encoding: str) -> None:
    assert text_of("cät\r\n猫".encode(encoding)) == "cät\r\n猫"


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_other_text_is_refused(encoding: str) -> None:
    assert_refused(lambda: text_of("cät".encode(encoding)), ValueError, "1", "UTF-8")


def test_other_text_is_told_by_its_line_and_byte() -> None:
    assert_refused(lambda: text_of("cat\ncät".encode("latin-1")), ValueError, "2", "UTF-8", "0xe4")
