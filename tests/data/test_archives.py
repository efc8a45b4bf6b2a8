"""Zip files: members come through within the bounds, and what is corrupt, too large or oddly named is refused."""

import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metricopt_ext.data.archives import NAME_CHARACTERS, ZipReader, open_zip
from metricopt_ext.errors import DataError


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_files_are_read_by_their_names(tmp_path: Path) -> None:
    with open_zip(zipped(tmp_path / "x.zip", {"a/b": b"1", "c": b"23"})) as archive:
        assert archive.names() == ["a/b", "c"]
        assert [archive.read(name) for name in archive.names()] == [b"1", b"23"]
        with pytest.raises(DataError, match=r"x.zip/d.*file has no such file"):
            archive.read("d")


def test_a_reader_reads_again_and_again_from_any_thread(tmp_path: Path) -> None:
    files = {f"{i}": bytes([i]) * 1000 for i in range(20)}
    path = zipped(tmp_path / "x.zip", files)
    read = ZipReader(path)
    assert read.names() == list(files)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert dict(zip(files, pool.map(read, files), strict=True)) == files
    with pytest.raises(DataError, match=r"x.zip/d.*file has no such file"):
        read("d")
    with pytest.raises(DataError, match=r"is neither a folder.*complete zip file"):
        ZipReader(zipped(tmp_path / "x.zip", {}).parent)


def test_all_files_together_have_a_bound(tmp_path: Path) -> None:
    with open_zip(zipped(tmp_path / "x.zip", {"a": b"123", "b": b"45"}), max_bytes=4) as archive:
        assert archive.read("a") == b"123"
        with pytest.raises(DataError, match=r"x.zip/b.*4 bytes; .* raise max_bytes"):
            archive.read("b")


@pytest.mark.parametrize("declared", [1, 2**31])
def test_a_size_that_is_not_the_real_one_is_refused(declared: int, tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.zip", {"a": bytes(5000)})
    content = path.read_bytes()
    assert content.count((5000).to_bytes(4, "little")) == 2  # in the member's header and in the directory
    path.write_bytes(content.replace((5000).to_bytes(4, "little"), declared.to_bytes(4, "little")))
    with open_zip(path) as archive, pytest.raises(DataError, match=r"x.zip/a can't be read"):
        archive.read("a")


@pytest.mark.parametrize("name", ["//a", "/a", "a//b", "a/" * (NAME_CHARACTERS // 2) + "b"])
def test_odd_names_are_refused(name: str, tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.zip", {name: b""})
    with (
        pytest.raises(DataError, match=r"x.zip has a file.*1000 characters"),
        open_zip(path),
    ):
        pass


@pytest.mark.parametrize("content", [b"", b"PK", b"no zip file"])
def test_what_is_no_zip_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(content)
    with (
        pytest.raises(DataError, match=r"x.zip is neither.*complete zip file"),
        open_zip(tmp_path / "x.zip"),
    ):
        pass


def test_other_archives_are_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"x\.tar\.gz is neither .*; unpack it$"), open_zip(tmp_path / "x.tar.gz"):
        pass


def test_names_with_backslashes_alone_have_slashes(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "windows.zip", "w") as file:
        file.writestr("a\\b.txt", b"content")
    with open_zip(tmp_path / "windows.zip") as archive:
        assert archive.names() == ["a/b.txt"]
        assert archive.read("a/b.txt") == b"content"
    with zipfile.ZipFile(tmp_path / "mixed.zip", "w") as file:
        file.writestr("a\\b.txt", b"")
        file.writestr("c/d.txt", b"")
    with open_zip(tmp_path / "mixed.zip") as archive:
        assert archive.names() == ["a\\b.txt", "c/d.txt"]


def test_errors_of_the_caller_pass(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), open_zip(zipped(tmp_path / "x.zip", {"a": b""})):
        raise KeyError("mine")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_that_is_there_twice_is_read_once(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/b", b"1")
        archive.writestr("a/b", b"2")
    with open_zip(tmp_path / "x.zip") as opened:
        assert opened.names() == ["a/b"]
        assert opened.read("a/b") == b"2"
