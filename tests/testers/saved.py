"""The contract of a file that the package writes: it gives back what was saved; all else is refused by name."""

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.refusals import assert_refused


class RunsCode:
    """Touches a file where it is unpickled, as a stranger's class may."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


class SavedTester:
    """What holds of each kind of file; a case says what is saved, and how it is read.

    Attributes:
        name: The file's name.
        error: What a file that can't be read raises.
        checked: Whether a file that lost its end, or has another byte, is told from one that was written so.
        dated: Whether a file says in which format it is, as ``metricopt_ext/KIND/NUMBER``.
    """

    name: ClassVar[str] = "file.safetensors"
    error: ClassVar[type[Exception] | tuple[type[Exception], ...]] = mo.errors.FileFormatError
    checked: ClassVar[bool] = True
    dated: ClassVar[bool] = True

    def make(self) -> Any:
        """Make what is saved, each time the same."""
        raise NotImplementedError

    def save(self, thing: Any, path: Path) -> None:
        """Write it to a file."""
        thing.save(path)

    def read(self, path: Path) -> Any:
        """Read a file."""
        raise NotImplementedError

    def content(self, thing: Any) -> Any:
        """All that has to come back, as tensors and plain values in containers."""
        raise NotImplementedError

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """A file that was written."""
        self.save(self.make(), tmp_path / self.name)
        return tmp_path / self.name

    def refused(self, path: Path, content: bytes) -> None:
        """Check that a file of this content is refused by its name, on one line."""
        path.write_bytes(content)
        with pytest.raises(self.error) as caught:
            self.read(path)
        assert path.name in str(caught.value) or str(path.parent) in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1

    def test_it_comes_back_bit_for_bit(self, path: Path, tmp_path: Path) -> None:
        found, expected = self.content(self.read(path)), self.content(self.make())
        assert_same(found, expected)
        again = tmp_path / "again" / self.name
        again.parent.mkdir()
        self.save(self.make(), again)
        assert again.read_bytes() == path.read_bytes()

    @given(share=st.floats(0, 1, exclude_max=True))
    def test_one_that_lost_its_end_is_refused(self, share: float, path: Path) -> None:
        content = path.read_bytes()
        try:
            if self.checked:
                self.refused(path, content[: int(share * len(content))])
            self.refused(path, b"")
        finally:
            path.write_bytes(content)

    @given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def test_one_with_another_bit_is_refused(self, share: float, bit: int, path: Path) -> None:
        if not self.checked:
            pytest.skip("text that may be edited")
        content = path.read_bytes()
        changed = bytearray(content)
        changed[int(share * len(content))] ^= 1 << bit
        try:
            self.refused(path, bytes(changed))
        finally:
            path.write_bytes(content)

    def test_another_kind_of_file_is_refused(self, path: Path) -> None:
        tensors = {"a": torch.ones(2)}
        self.refused(path, safetensors.torch.save(tensors))
        self.refused(path, safetensors.torch.save(tensors, metadata={"format": "pt", "described": "{}"}))
        for content in (b'{"a": 1}', b"a: 1\n", b"[]", b"\xff" * 100):
            self.refused(path, content)
        path.unlink()
        assert_refused(lambda: self.read(path), (*as_tuple(self.error), FileNotFoundError))

    def test_a_later_format_is_refused(self, path: Path) -> None:
        if not self.dated:
            pytest.skip("a file of no format of the package's own")
        later, count = re.subn(rb"(metricopt_ext/\w+)/\d", rb"\1/9", path.read_bytes())
        assert count == 1
        self.refused(path, later)

    def test_no_code_in_it_is_run(self, path: Path, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        for legacy in (False, True):
            content = {"model": nn.Linear(2, 2).state_dict(), "more": RunsCode(mark)}
            torch.save(content, path, _use_new_zipfile_serialization=not legacy)
            self.refused(path, path.read_bytes())
        assert not mark.exists()


def as_tuple(error: type[Exception] | tuple[type[Exception], ...]) -> tuple[type[Exception], ...]:
    return error if isinstance(error, tuple) else (error,)


def assert_same(found: Any, expected: Any) -> None:
    """Compare tensors bit for bit, within dicts, tuples and lists."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)
    else:
        assert found == expected
