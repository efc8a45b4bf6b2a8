"""How inputs are divided into parts."""

import pytest
import torch

from metricopt_ext.data.parts import large_parts, part_size


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((123,), 2048),  # 1 MiB / 492 bytes is more
        ((3, 32, 32), 85),  # 1,048,576 / 12,288
        ((3, 224, 224), 1),  # 1,048,576 / 602,112
        ((3, 1024, 1024), 1),  # 12 MiB each
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_part_of_inputs_takes_a_mebibyte(shape: tuple[int, ...], expected: int, dtype: torch.dtype) -> None:
    assert part_size(torch.empty(2, *shape, dtype=dtype)) == expected


def test_no_inputs_have_a_part_size_too() -> None:
    assert part_size(torch.empty(0, 3, 32, 32)) == 85


def test_parts_are_larger_on_other_devices() -> None:
    assert part_size(torch.empty(2, 3, 224, 224, device="meta")) == 111  # 64 MiB / 602,112 bytes


@pytest.mark.parametrize(("n", "size"), [(10, 4), (8, 4), (3, 4), (1, 1), (9, 1)])
def test_large_parts_are_whole_and_of_about_one_size(n: int, size: int) -> None:
    parts = large_parts(torch.arange(n)[:, None], size)
    sizes = [len(part) for part in parts]
    assert torch.cat(parts).flatten().tolist() == list(range(n))
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-n // size)  # no more than needed


def test_large_parts_of_large_images_fit_into_memory() -> None:
    sizes = [len(part) for part in large_parts(torch.empty(300, 3, 224, 224, device="meta"))]
    assert sizes == [100, 100, 100]  # at most 111 in 64 MiB
