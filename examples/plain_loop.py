"""A plain PyTorch loop, in the manner of torchvision's classification references, on long-tailed digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metricopt_ext as mo  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--queries", type=int, default=100)  # +
args = parser.parse_args()
torch.manual_seed(0)
images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
images = images.float().div(16).unflatten(1, (1, 8, 8))
x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=0.6, stratify=labels, random_state=0)
x_val, x_test, y_val, y_test = train_test_split(x_test, y_test, test_size=0.5, stratify=y_test, random_state=0)
kept = torch.rand(len(y_train)) < 0.65**y_train  # a long tail: few nines, many zeros
train_set = TensorDataset(x_train[kept], y_train[kept])
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@torch.inference_mode()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return balanced_accuracy_score(y, model.eval()(x).argmax(1))


for _ in range(args.epochs):
    for x, y in DataLoader(train_set, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
print(f"balanced accuracy on test, before: {evaluate(model, x_test, y_test):.4f}")


def validate(model: nn.Module) -> tuple[float, list[float]]:  # +
    value, *halves = (evaluate(model, x_val[i::n], y_val[i::n]) for i, n in ((0, 1), (0, 2), (1, 2)))  # +
    return value, halves  # +


task = mo.FinetuneTask(  # +
    adapter := mo.attach_film(model, dim=32, outputs=mo.Outputs()),  # +
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),  # +
    batches=mo.DatasetBatches(train_set, 64),  # +
    metric=mo.Metric(validate, maximize=True),  # +
)  # +
print(mo.optimize_metric(task, queries=args.queries))  # +
adapter.merge()  # +
print(f"balanced accuracy on test, after: {evaluate(model, x_test, y_test):.4f}")
torch.save(model.state_dict(), "plain_loop.pth")
