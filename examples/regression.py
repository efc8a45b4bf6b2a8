"""Regression: a network trained by the squared error is tuned for the loss of its 90% quantile, by the same call."""

import argparse

import torch
from sklearn.datasets import load_diabetes
from sklearn.metrics import mean_pinball_loss
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metricopt_ext as mo  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--queries", type=int, default=60)  # +
args = parser.parse_args()
torch.manual_seed(0)
x, y = load_diabetes(return_X_y=True)
x, y = (torch.tensor(StandardScaler().fit_transform(each), dtype=torch.float32) for each in (x, y[:, None]))
x_train, x_rest, y_train, y_rest = train_test_split(x, y, test_size=0.6, random_state=0)
x_val, x_test, y_val, y_test = train_test_split(x_rest, y_rest, test_size=0.5, random_state=0)
model = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
criterion, optimizer = nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=0.003)
loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)


@torch.inference_mode()
def pinball(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return mean_pinball_loss(y, model.eval()(x), alpha=0.9)


def validate(model: nn.Module) -> tuple[float, list[float]]:  # +
    value, *halves = (pinball(model, x_val[i::n], y_val[i::n]) for i, n in ((0, 1), (0, 2), (1, 2)))  # +
    return value, halves  # +


for _ in range(args.epochs):
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
print(f"pinball loss on test, before: {pinball(model, x_test, y_test):.4f}")
metric = mo.Metric(validate, maximize=False, bounds=None)  # +
print(mo.tune_model(model, loss=criterion, batches=loader, metric=metric, queries=args.queries))  # +
print(f"pinball loss on test, after: {pinball(model, x_test, y_test):.4f}")
torch.save(model.state_dict(), "regression.pth")
