"""pytorch-metric-learning: a search with trainer and tester records, fits and saves f; then the trainer follows it."""

import argparse
from functools import partial

import torch
from pytorch_metric_learning import losses, miners, samplers, testers, trainers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import metricopt_ext as mo  # +
from metricopt_ext.retrieval.search import tune_with_trainer  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--queries", type=int, default=60)  # +
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
run = tune_with_trainer(trainer, tester, datasets, queries=args.queries, metric=score, merge=False)  # +
adapter = mo.Adapter(trunk)  # +
print(run, f"test, after: {on_test()['test']}", sep="\n")
run.fit.f.save("f.safetensors")  # ++
adapter.set_phi(torch.zeros(32))  # ++
f = mo.load_value_function("f.safetensors")  # ++
trainer.optimizers = {"trunk_optimizer": mo.MetricOpt(adapter.parameters(), f, lr=0.01, steps=33)}  # ++
trainer.freeze_these = ("embedder",)  # ++
trainer.train(start_epoch=1, num_epochs=3)  # ++
print("test, after following f:", on_test()["test"])
adapter.merge()  # +
torch.save({"trunk": trunk.state_dict(), "embedder": embedder.state_dict()}, "pml_follow.pth")
