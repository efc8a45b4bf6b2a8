"""An adapter's file that is damaged, or of another format, is refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.adapter_file import FILE_FORMAT
from metricopt_ext.adapters.attach import attach_film, load_adapter
from metricopt_ext.errors import FileFormatError
from metricopt_ext.utils import files
from metricopt_ext.utils.files import read_tensors, write_tensors


@pytest.mark.parametrize("damage", ["empty", "half", "cut", "garbage", "absent", "other kind"])
def test_damaged_files_are_refused_by_name(
    cnn: Callable[[], nn.Sequential], tuned: Callable[..., Adapter], damage: str, tmp_path: Path
) -> None:
    path = tmp_path / "adapter.safetensors"
    tuned().save(path)
    data = path.read_bytes()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "half": data[: len(data) // 2],
                "cut": data[:-1],
                "garbage": b"\xff" * len(data),
                "other kind": data.replace(b"metricopt_ext/adapter", b"metricopt_ext/another"),
            }[damage]
        )
    model = cnn()
    assert_refused(lambda: load_adapter(model, path), FileFormatError, path)
    assert not hasattr(model, "metricopt")


def test_a_description_that_is_no_json_is_refused(
    cnn: Callable[[], nn.Sequential], tuned: Callable[..., Adapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_checksum", lambda *_: "right")
    path = tmp_path / "adapter.safetensors"
    tuned().save(path)
    path.write_bytes(path.read_bytes().replace(b'{\\"kind', b' \\"kind'))
    assert_refused(lambda: load_adapter(cnn(), path), FileFormatError)


def test_a_file_of_an_earlier_format_is_refused_by_name(cnn: Callable[[], nn.Sequential], tmp_path: Path) -> None:
    path, adapter = tmp_path / "adapter.safetensors", attach_film(cnn(), dim=3)
    adapter.save(path)
    tensors, described = read_tensors(path, FILE_FORMAT)
    write_tensors(path, tensors, "metricopt_ext/adapter/1", described)
    for load in (adapter.load, lambda path: load_adapter(cnn(), path)):
        with pytest.raises(FileFormatError) as caught:
            load(path)
        assert_named(caught, "metricopt_ext/adapter/1")


def test_a_kind_of_adapter_that_is_unknown_is_refused_by_name(
    cnn: Callable[[], nn.Sequential], tuned: Callable[..., Adapter], tmp_path: Path
) -> None:
    path = tmp_path / "adapter.safetensors"
    tuned().save(path)
    tensors, described = read_tensors(path, FILE_FORMAT)
    write_tensors(path, tensors, FILE_FORMAT, described | {"kind": "fim"})
    assert_refused(lambda: load_adapter(cnn(), path), FileFormatError, "safetensors", "fim", "film")
