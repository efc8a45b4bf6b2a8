"""Deployments of a published network: which images they are, and how they are corrupted."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import published_cifar
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.labelled import Labelled
from metricopt_ext.errors import DataError
from metricopt_ext.tools.compare import read_configs
from metricopt_ext.utils.config import load_config
from published_cifar import CLASSES, CORRUPTED, VEHICLES, chosen, deployments, fog

CONFIGS = Path(published_cifar.__file__).with_name("configs") / "published"
COMPARISONS = sorted(path for path in CONFIGS.glob("*.yaml") if path.stem != "cifar_resnet")


def images() -> Labelled:
    """Twenty images of each class, each of a grey of its own but for a row of white."""
    x = torch.arange(200, dtype=torch.uint8)[:, None, None, None].repeat(1, 3, 8, 8)
    x[:, :, -1] = 255
    return Labelled(x, torch.arange(200) % 10, CLASSES)


def test_deployments_have_their_shares_of_the_images_and_corruptions_change_the_same_ones() -> None:
    whole = images()
    found = deployments(whole, 100, 3)
    assert found.keys() == {"clean", "prior_shift", "long_tail", *CORRUPTED}
    counts = {name: y.bincount(minlength=10).tolist() for name, (_, y) in found.items()}
    assert counts["clean"] == [10] * 10
    assert counts["prior_shift"] == [4 if name in VEHICLES else 14 for name in CLASSES]
    assert (counts["long_tail"][0], counts["long_tail"][-1]) == (20, 1)  # all of the first class, which has no more
    for name in ("clean", "prior_shift", "long_tail"):
        x, y = found[name]
        places = x[:, 0, 0, 0].long()
        assert len(places.unique()) == len(y)
        assert torch.equal(whole.y[places], y)
    for name in CORRUPTED:
        assert torch.equal(found[name][1], found["clean"][1])
        assert not torch.equal(found[name][0], found["clean"][0])
    again, other = deployments(whole, 100, 3), deployments(whole, 100, 4)
    assert all(torch.equal(found[name][0], again[name][0]) for name in found)
    assert not torch.equal(found["clean"][0], other["clean"][0])
    with pytest.raises(DataError, match="got truck, airplane"):
        deployments(Labelled(whole.x, whole.y, (CLASSES[-1], *CLASSES[:-1])), 100, 3)


def test_as_many_are_chosen_as_the_scarcest_class_allows() -> None:
    y = torch.tensor([0] * 5 + [1] * 50)
    assert y[chosen(y, [1, 2], 100, 0)].bincount().tolist() == [5, 10]
    assert y[chosen(y, [1, 2], 9, 0)].bincount().tolist() == [3, 6]


def test_fog_lightens_keeps_the_range_and_is_smooth() -> None:
    x = torch.rand(50, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    foggy = fog(x, 3)
    brightest = x.amax((1, 2, 3))
    assert (foggy.amax((1, 2, 3)) <= brightest + 1e-6).all()
    assert float(foggy.min()) >= 0
    field = fog(torch.full((50, 1, 32, 32), 0.5), 3)[:, 0]  # 0.5 (0.5 + 1.5 f) / 2, with f from 0 to 1
    torch.testing.assert_close(field.amin((1, 2)), torch.full((50,), 0.125))
    torch.testing.assert_close(field.amax((1, 2)), torch.full((50,), 0.5))
    steps = (field[:, 1:] - field[:, :-1]).square().mean()
    assert float(steps) < 0.25 * float(field.var((1, 2)).mean() * 2)  # of independent pixels it would be all
    assert torch.equal(fog(x[:7], 3), foggy[:7])


@pytest.mark.parametrize("file", COMPARISONS, ids=lambda path: path.stem)
def test_comparisons_can_be_run(file: Path, tmp_path: Path) -> None:
    config, subject = read_configs(file, ["data.root=x.npz", "model.weights=x.th"])
    subject.check()
    assert (config.seed, config.seeds) == (21000, 20)


def test_a_toy_file_is_divided_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["published_cifar.py", "--toy", "--output-dir", str(tmp_path)])
    published_cifar.main()
    overrides = [f"data.root={tmp_path / 'noise.npz'}"]
    splits = [
        load_splits(load_config(ClassificationConfig, CONFIGS / "cifar_resnet.yaml", overrides), s) for s in (0, 1)
    ]
    for each in splits:
        assert each.class_names == CLASSES
        assert [len(each.train), len(each.validation), len(each.test)] == [400, 50, 150]
    assert not torch.equal(splits[0].validation.x, splits[1].validation.x)
    with np.load(tmp_path / "noise.npz") as arrays:
        assert arrays["x_val"].shape == (200, 3, 32, 32)
