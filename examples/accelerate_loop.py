"""A loop under Hugging Face's Accelerate: each process judges its shard of the data, and all tune one model."""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from sklearn.metrics import recall_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metricopt_ext as mo  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
digits, rows = load_digits(), torch.randperm(1797)
x, y = torch.tensor(digits.images[rows] / 16).float()[:, None], torch.tensor(digits.target[rows])
tail = (torch.rand(800) < 0.7 ** y[:800]).nonzero().flatten()  # few nines, many zeros
parts = (tail, torch.arange(800, 1300), torch.arange(1300, 1797))
train_set, val_set, test_set = (TensorDataset(x[part], y[part]) for part in parts)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
model, optimizer, train, val, test = accelerator.prepare(
    model, optimizer, DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 250), DataLoader(test_set, 250)
)


@torch.inference_mode()
def evaluate(loader: DataLoader) -> tuple[float, list[float]]:
    model.eval()
    pairs = [accelerator.gather_for_metrics((y, model(x).argmax(1))) for x, y in loader]
    true, predicted = (torch.cat(each).cpu() for each in zip(*pairs, strict=True))
    halves = [recall_score(true[i::2], predicted[i::2], average="macro") for i in (0, 1)]  # metric
    return recall_score(true, predicted, average="macro"), halves  # metric


for _ in range(args.epochs):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        accelerator.backward(criterion(model(x), y))
        optimizer.step()
accelerator.print(f"macro recall on test, before: {evaluate(test)[0]:.4f}")
metric = mo.Metric(lambda: evaluate(val), maximize=True)  # metric
run = mo.tune_model(model, loss=criterion, batches=train, metric=metric, queries=60)  # +
accelerator.print(run, f"macro recall on test, after: {evaluate(test)[0]:.4f}", sep="\n")
accelerator.save(accelerator.unwrap_model(model).state_dict(), "accelerate_loop.pth")
accelerator.end_training()
