"""Optuna tunes how noisy digits are smoothed, and the search the model that sees them, both by ask and tell."""

import optuna
import torch
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score
from torch import nn

import metricopt_ext as mo  # +

torch.manual_seed(0)
images, y = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
x = images.float().div(16).view(-1, 8, 8)
x_noisy = (x + 0.3 * torch.randn_like(x)).numpy()  # what the camera gives where the model is used
train = (torch.rand(600) < 0.65 ** y[:600]).nonzero()[:, 0]  # a long tail: few nines, many zeros
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(30):
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def score(model: nn.Module, rows: slice) -> float:
    smooth = torch.from_numpy(gaussian_filter(x_noisy[rows], (0, *sigmas)))
    return balanced_accuracy_score(y[rows], model.eval()(smooth).argmax(1))


study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
for _ in range(20):
    trial = study.ask()
    sigmas = [trial.suggest_float(name, 0, 2) for name in ("down", "across")]
    study.tell(trial, score(model, slice(600, 1200)))
sigmas = list(study.best_params.values())
print(f"on test, by Optuna: {score(model, slice(1200, None)):.4f}")
adapter = mo.attach_film(model, dim=16, outputs=mo.Outputs())  # +
with mo.Search(adapter, queries=100, maximize=True) as search:  # +
    while trials := search.ask(4):  # +
        for trial in trials:  # +
            with trial.applied() as moved:  # +
                value, *halves = (score(moved, slice(600 + i, 1200, n)) for i, n in ((0, 1), (0, 2), (1, 2)))  # +
            search.tell(trial.id, value, halves)  # +
    print(search.result())  # +
adapter.merge()  # +
print(f"on test, by both: {score(model, slice(1200, None)):.4f}")
torch.save(model.state_dict(), "optuna_search.pth")
