"""Any classifier of timm's, whatever its norms (BatchNorm, GroupNorm, LayerNorm), on long-tailed digits."""

import argparse

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score

import metricopt_ext as mo  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="test_resnet", help="e.g. test_efficientnet_gn, test_convnext, test_vit")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--queries", type=int, default=60)  # +
args = parser.parse_args()
torch.manual_seed(0)
digits, shuffled = load_digits(), torch.randperm(1797)
x = F.interpolate(torch.tensor(digits.images[shuffled] / 16).float()[:, None], size=32).expand(-1, 3, -1, -1)
y = torch.tensor(digits.target[shuffled])
train, val, test = slice(0, 800), slice(800, 1300), slice(1300, None)
tail = torch.rand(800) < 0.7 ** y[train]  # few nines, many zeros
x_train, y_train = x[train][tail], y[train][tail]
model = timm.create_model(args.model, num_classes=10, **({"img_size": 32} if "vit" in args.model else {}))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def predict(model: torch.nn.Module, part: slice) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(x[part]).argmax(1)


for _ in range(args.epochs):
    model.train()
    for rows in torch.randperm(len(x_train)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(x_train[rows]), y_train[rows]).backward()
        optimizer.step()
print(f"macro F1 on test, before: {f1_score(y[test], predict(model, test), average='macro'):.4f}")


def macro_f1(model: torch.nn.Module) -> tuple[float, list[float]]:  # +
    pairs = torch.stack((y[val], predict(model, val)))  # +
    value, *halves = (f1_score(*part, average="macro") for part in (pairs, pairs[:, ::2], pairs[:, 1::2]))  # +
    return value, halves  # +


task = mo.FinetuneTask(  # +
    adapter := mo.attach_film(model, dim=32, outputs=mo.Outputs()),  # +
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),  # +
    batches=mo.TensorBatches(x_train, y_train, batch_size=64),  # +
    metric=mo.Metric(macro_f1, maximize=True),  # +
)  # +
print(mo.optimize_metric(task, queries=args.queries))  # +
adapter.merge()  # +
print(f"macro F1 on test, after: {f1_score(y[test], predict(model, test), average='macro'):.4f}")
torch.save(model.state_dict(), "timm_model.pth")
