"""pytorch-metric-learning's trainer and tester, as in its examples: the trunk is tuned for the tester's metric."""

import argparse
from functools import partial

import torch
from pytorch_metric_learning import losses, miners, samplers, testers, trainers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from metricopt_ext.retrieval.search import tune_with_trainer  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.images / 16).float()[:, None], torch.tensor(digits.target)
noisy = x * 0.5 + 0.2 * torch.randn(x.shape)  # what the deployment's camera gives
classes = {"train": (x, y < 3), "val": (noisy, (y >= 3) & (y < 7)), "test": (noisy, y >= 7)}
datasets = {name: TensorDataset(images[which], y[which]) for name, (images, which) in classes.items()}
trunk = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
)
embedder = nn.Linear(512, 16)
score = "mean_average_precision_at_r"
tester = testers.GlobalEmbeddingSpaceTester(
    accuracy_calculator=AccuracyCalculator(include=(score,), k="max_bin_count"), dataloader_num_workers=0
)
trainer = trainers.MetricLossOnly(
    models={"trunk": trunk, "embedder": embedder},
    optimizers={"trunk_optimizer": torch.optim.Adam([*trunk.parameters(), *embedder.parameters()])},
    batch_size=64,
    loss_funcs={"metric_loss": losses.TripletMarginLoss()},
    dataset=datasets["train"],
    mining_funcs={"tuple_miner": miners.MultiSimilarityMiner()},
    sampler=samplers.MPerClassSampler(datasets["train"].tensors[1], 16, length_before_new_iter=704),
    dataloader_num_workers=0,
)
trainer.train(num_epochs=args.epochs)
on_test = partial(tester.test, datasets, 0, trunk, embedder, [("test", ["test"])])
print("test, before:", on_test()["test"])
print(tune_with_trainer(trainer, tester, datasets, queries=60, metric=score))  # +
print("test, after:", on_test()["test"])
torch.save({"trunk": trunk.state_dict(), "embedder": embedder.state_dict()}, "pml_trainer.pth")
