"""Files of every kind that the package writes, held to the contract of all."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

import metricopt_ext as mo
from helpers.tensors import rand32
from metricopt_ext.search.learned import UpdateRule, load_update_rule
from metricopt_ext.siblings.ala.loss_policy import LossPolicy, load_loss_policy
from metricopt_ext.siblings.reloss.relational_loss import RelationalLoss, load_relational_loss
from metricopt_ext.siblings.sl.set_loss import SetLoss, load_set_loss
from metricopt_ext.tasks.evaluation import Evaluation, Outcome
from metricopt_ext.tasks.inference_file import save_inference
from metricopt_ext.tasks.trajectories import Trajectory, TrajectoryStore, load_trajectories
from metricopt_ext.utils.files import save_checkpoint
from metricopt_ext.utils.state_dict import load_checkpoint
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.value_function import NeuralValueFunction, Quality
from testers.saved import SavedTester


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def film() -> mo.Adapter:
    adapter = mo.attach_film(network(), dim=4)
    adapter.apply(mo.Start(rand32(4), {"1.running_mean": rand32(6), "2.bias": rand32(3)}))
    return adapter


class TestAdapter(SavedTester):
    error = mo.errors.FileFormatError, mo.errors.AdapterError  # one of the file, or of tensors that the model has not

    def make(self) -> Any:
        return film()

    def read(self, path: Path) -> Any:
        return mo.load_adapter(network(), path)

    def content(self, thing: Any) -> Any:
        return dict(thing.model.state_dict()), dict(thing.model.named_buffers()), repr(thing)


class TestMixture(TestAdapter):
    def make(self) -> Any:
        other = {key: each + each.abs() for key, each in network().state_dict().items()}
        adapter = mo.attach_mixture(network(), [other])
        adapter.set_phi(torch.ones(1))
        return adapter


class TestNeural(SavedTester):
    def make(self) -> Any:
        f = NeuralValueFunction(4, 2)
        f.quality, f.signature = Quality(0.5, 0.1, 0.2, 10, 5, 0.1, 0.2), film().signature
        return f

    def read(self, path: Path) -> Any:
        return mo.load_value_function(path)

    def content(self, thing: Any) -> Any:
        return dict(thing.state_dict()), type(thing).__name__, thing.quality, thing.signature


class TestGP(TestNeural):
    def make(self) -> Any:
        phi = rand32(5, 2)
        return GPValueFunction.conditioned(phi, phi.sum(1), torch.eye(2), 0.1)


class TestUpdateRule(SavedTester):
    def make(self) -> Any:
        torch.manual_seed(0)
        return UpdateRule(hidden=3)

    def read(self, path: Path) -> Any:
        return load_update_rule(path)

    def content(self, thing: Any) -> Any:
        return dict(thing.state_dict()), thing.hidden


class TestSetLoss(SavedTester):
    def make(self) -> Any:
        torch.manual_seed(0)
        return SetLoss(2)

    def read(self, path: Path) -> Any:
        return load_set_loss(path)

    def content(self, thing: Any) -> Any:
        return dict(thing.state_dict()), type(thing).__name__


class TestRelationalLoss(TestSetLoss):
    def make(self) -> Any:
        torch.manual_seed(0)
        return RelationalLoss("f1", absolute=True)

    def read(self, path: Path) -> Any:
        return load_relational_loss(path)

    def content(self, thing: Any) -> Any:
        return dict(thing.state_dict()), thing.metric, thing.absolute


class TestLossPolicy(TestSetLoss):
    def make(self) -> Any:
        torch.manual_seed(0)
        return LossPolicy("margin", observed=2, kinds=1, history=3)

    def read(self, path: Path) -> Any:
        return load_loss_policy(path)

    def content(self, thing: Any) -> Any:
        return dict(thing.state_dict()), thing.family, thing.observed, thing.kinds, thing.history


class TestTrajectories(SavedTester):
    name: ClassVar = "round-0-task-00000.safetensors"

    def make(self) -> Any:
        size = {"size": Outcome(3.0)}
        told = tuple(Evaluation(cost, size, ((cost, cost + 0.1),), 0.1 * cost) for cost in (0.25, 0.5))
        return Trajectory(0, 0, rand32(3, 4), rand32(2), torch.tensor([0, 2]), told, film().signature)

    def save(self, thing: Any, path: Path) -> None:
        TrajectoryStore(path.parent).add(thing)
        (written,) = path.parent.glob("round-*")
        assert written == path

    def read(self, path: Path) -> Any:
        (found,) = load_trajectories(path.parent)
        return found

    def content(self, thing: Any) -> Any:
        return dict(vars(thing))


class TestInference(SavedTester):
    name: ClassVar = "inference.yaml"
    checked: ClassVar = False
    dated: ClassVar = False

    def make(self) -> Any:
        return {"threshold": 0.25, "flip": True, "views": 3}

    def save(self, thing: Any, path: Path) -> None:
        known = [
            mo.Setting("threshold", values=(0.25, 0.5), default=0.5),
            mo.Setting("flip", values=(False, True), default=False),
            mo.Setting("views", values=(1, 3), default=1),
        ]
        settings = mo.Settings(known, apply=lambda values: nullcontext())
        save_inference(path, settings, thing)

    def read(self, path: Path) -> Any:
        return mo.load_inference(path)

    def content(self, thing: Any) -> Any:
        return dict(sorted(thing.items()))


class TestModelsWeights(SavedTester):
    error: ClassVar = (mo.errors.DataError, mo.errors.FileFormatError)
    checked: ClassVar = False  # anyone's reader reads it
    dated: ClassVar = False

    def make(self) -> Any:
        return network()

    def save(self, thing: Any, path: Path) -> None:
        save_checkpoint(path, thing.state_dict())

    def read(self, path: Path) -> Any:
        model = network()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        load_checkpoint(model, path)
        return model

    def content(self, thing: Any) -> Any:
        return dict(thing.state_dict())
