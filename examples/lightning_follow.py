"""PyTorch Lightning: a callback searches phi at the end of fit; another fit follows the f that the search learned."""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multiclass_f1_score

import metricopt_ext as mo  # +
from metricopt_ext.integrations.lightning import SearchPhi  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--queries", type=int, default=60)  # +
args = parser.parse_args()


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        for name, rows in {"f1": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}.items():  # +
            self.log(name, multiclass_f1_score(self.net(batch[0][rows]), batch[1][rows], 10, average="macro"))  # +

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if hasattr(search, "run"):  # ++
            return mo.MetricOpt(mo.Adapter(self).parameters(), mo.load_value_function("f.safetensors"), steps=30)  # ++
        return torch.optim.Adam(self.parameters(), lr=3e-3)


L.seed_everything(0)
digits, rows = load_digits(), torch.randperm(1797)
x, y = torch.tensor(digits.data[rows] / 16).float(), torch.tensor(digits.target[rows])
tail = (torch.rand(800) < 0.7 ** y[:800]).nonzero().flatten()  # few nines, many zeros
train = DataLoader(TensorDataset(x[tail], y[tail]), batch_size=64, shuffle=True)
val, test = (DataLoader(TensorDataset(x[a:b], y[a:b]), batch_size=1000) for a, b in ((800, 1300), (1300, 1797)))
module, options = Classifier(), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
search = SearchPhi("f1", halves=("even", "odd"), queries=args.queries, merge=False)  # +
L.Trainer(max_epochs=args.epochs, callbacks=[search], **options).fit(module, train, val)  # +
print(search.run, "on test, after:", L.Trainer(**options).validate(module, test, verbose=False))
adapter = mo.Adapter(module)  # +
adapter.set_phi(torch.zeros(adapter.dim))  # ++
print("on test, before:", L.Trainer(**options).validate(module, test, verbose=False))
search.run.fit.f.save("f.safetensors")  # ++
L.Trainer(max_steps=30, **options).fit(module, train)  # ++
print("on test, after following f:", L.Trainer(**options).validate(module, test, verbose=False))
adapter.merge()  # +
torch.save(module.state_dict(), "lightning_follow.pth")
