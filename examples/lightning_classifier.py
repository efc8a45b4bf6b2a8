"""PyTorch Lightning's image classifier, with its data module, tuned at the end of fit for what its validation logs."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multiclass_f1_score

from metricopt_ext.integrations.lightning import SearchPhi  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=15)
args = parser.parse_args()


class Backbone(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.l1, self.norm, self.l2 = nn.Linear(64, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.relu(self.norm(self.l1(x.flatten(1)))))


class ImageClassifier(L.LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = Backbone(hidden)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.backbone(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_f1", self.f1(*batch))
        self.log_dict(
            {"even": self.f1(batch[0][::2], batch[1][::2]), "odd": self.f1(batch[0][1::2], batch[1][1::2])}
        )  # metric

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test_f1", self.f1(*batch))

    def f1(self, x: Tensor, y: Tensor) -> Tensor:
        return multiclass_f1_score(self.backbone(x), y, 10, average="macro")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Digits(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        digits, rows = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(digits.images[rows] / 16).float(), torch.tensor(digits.target[rows])
        tail = (torch.arange(800) % 100 < 100 * 0.7 ** y[:800]).nonzero().flatten()  # few nines, many zeros
        parts = {"train": tail, "val": torch.arange(800, 1300), "test": torch.arange(1300, 1797)}
        self.sets = {name: TensorDataset(x[part], y[part]) for name, part in parts.items()}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.sets["train"], batch_size=64, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.sets["val"], batch_size=500)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.sets["test"], batch_size=500)


if __name__ == "__main__":
    L.seed_everything(0)
    best = ModelCheckpoint("lightning_classifier", monitor="val_f1", mode="max", filename="best")
    search = SearchPhi("val_f1", halves=("even", "odd"), queries=60)  # +
    trainer = L.Trainer(max_epochs=args.epochs, callbacks=[best, search], logger=False, enable_progress_bar=False)  # +
    trainer.fit(module := ImageClassifier(), datamodule=Digits())
    print(search.run)
    trainer.test(module, datamodule=Digits())
    trainer.save_checkpoint("lightning_classifier.ckpt")
