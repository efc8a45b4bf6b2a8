"""Workers on Ray score the trials of a search; one is slow, one dies. The result is that of one process, to the bit."""

import copy
import os
import time

import ray
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score
from torch import nn

import metricopt_ext as mo  # +

torch.manual_seed(0)
x, y = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
x = x.float() / 16
train = (torch.rand(600) < 0.65 ** y[:600]).nonzero()[:, 0]  # a long tail: few nines, many zeros
model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(30):
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def score(file: str) -> tuple[float, list[float]]:
    torch.set_num_threads(1)  # as many in each process: sums are rounded by how they are divided
    network = copy.deepcopy(model).eval()
    network.load_state_dict(torch.load(file))
    found = network(x[600:]).argmax(1)
    value, *halves = (balanced_accuracy_score(y[600 + i :: n], found[i::n]) for i, n in ((0, 1), (0, 2), (1, 2)))
    return value, halves


@ray.remote
class Worker:
    def __init__(self, number: int) -> None:
        self.number, self.scored = number, 0

    def score(self, file: str) -> tuple[float, list[float]]:
        self.scored += 1
        if self.number == 1 and self.scored == 3:
            os._exit(1)  # as if its machine went down
        time.sleep(0.2 * (self.number == 2))  # a slow one
        return score(file)


# On a cluster, the trials' files lie where all machines can read.
def by_workers(search: mo.Search) -> None:  # +
    idle, under_way, again = [Worker.remote(number) for number in range(3)], {}, []  # +
    while True:  # +
        while idle and (trials := again or search.ask()):  # +
            trial, worker = trials.pop(), idle.pop(0)  # +
            trial.checkpoint(file := os.path.abspath(f"trial-{trial.id}.pth"))  # +
            under_way[worker.score.remote(file)] = trial, worker  # +
        if not under_way:  # +
            if again:  # +
                raise RuntimeError(f"all workers died, and {len(again)} trials are open")  # +
            return  # +
        (done,), _ = ray.wait([*under_way])  # +
        trial, worker = under_way.pop(done)  # +
        try:  # +
            search.tell(trial.id, *ray.get(done))  # +
            idle.append(worker)  # +
        except ray.exceptions.RayActorError:  # +
            print(f"a worker died; another one scores trial {trial.id}")  # +
            again.append(trial)  # +


def in_one_process(search: mo.Search) -> None:
    while trials := search.ask():
        trials[0].checkpoint("trial.pth")
        search.tell(trials[0].id, *score("trial.pth"))


def tuned(ask_and_tell) -> nn.Module:  # +
    adapter = mo.attach_film(copy.deepcopy(model), dim=16, outputs=mo.Outputs())  # +
    with mo.Search(adapter, queries=60, maximize=True, bounds=(0, 1)) as search:  # +
        ask_and_tell(search)  # +
        print(search.result())  # +
    return adapter.merge()  # +


state = tuned(by_workers).state_dict()
alone = tuned(in_one_process).state_dict()
print("the same as in one process:", all(torch.equal(state[name], each) for name, each in alone.items()))
torch.save(state, "ray_workers.pth")
