"""A loop under Hugging Face's Accelerate: phi is searched on the unwrapped model, judged by what was prepared."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from sklearn.metrics import recall_score
from torch.utils.data import DataLoader, TensorDataset
from transformers import ConvNextConfig, ConvNextForImageClassification

import metricopt_ext as mo  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--queries", type=int, default=60)  # +
args = parser.parse_args()
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
digits, rows = load_digits(), torch.randperm(1797)
x, y = torch.tensor(digits.images[rows] / 16).float()[:, None], torch.tensor(digits.target[rows])
tail = (torch.rand(800) < 0.7 ** y[:800]).nonzero().flatten()  # few nines, many zeros
parts = (tail, torch.arange(800, 1300), torch.arange(1300, 1797))
train_set, val_set, test_set = (TensorDataset(x[part], y[part]) for part in parts)
sizes = {"num_channels": 1, "patch_size": 1, "num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]}
model = ConvNextForImageClassification(ConvNextConfig(**sizes, layer_scale_init_value=1.0, num_labels=10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train, val, test = accelerator.prepare(
    model, optimizer, DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 500), DataLoader(test_set, 500)
)


@torch.inference_mode()
def evaluate(loader: DataLoader) -> tuple[float, list[float]]:
    model.eval()
    pairs = [accelerator.gather_for_metrics((y, model(x).logits.argmax(1))) for x, y in loader]
    true, predicted = (torch.cat(each) for each in zip(*pairs, strict=True))
    halves = [recall_score(true[i::2], predicted[i::2], average="macro") for i in (0, 1)]  # +
    return recall_score(true, predicted, average="macro"), halves  # +


for _ in range(args.epochs):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x).logits, y))
        optimizer.step()
print(f"macro recall on test, before: {evaluate(test)[0]:.4f}")
task = mo.FinetuneTask(  # +
    adapter := mo.attach_film(accelerator.unwrap_model(model), dim=32, outputs=mo.Outputs()),  # +
    loss=lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]),  # +
    batches=mo.DatasetBatches(train_set, 64),  # +
    metric=mo.Metric(lambda: evaluate(val), maximize=True, name="macro recall"),  # +
)  # +
print(mo.optimize_metric(task, queries=args.queries))  # +
adapter.merge()  # +
print(f"macro recall on test, after: {evaluate(test)[0]:.4f}")
accelerator.save(accelerator.unwrap_model(model).state_dict(), "accelerate_loop.pth")
