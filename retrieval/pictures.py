"""Query images with what they find before and after finetuning, and recall by the number of neighbours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import FileFormatError
from metricopt_ext.experiment.method import METHODS
from metricopt_ext.experiment.style import new_figure, over_seeds, save_figure
from metricopt_ext.retrieval.recall import nearest, recall_at_k
from metricopt_ext.utils.described import Finite, read_shaped
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted

ROWS, NEIGHBOURS = 6, 5
HIT, MISS = "#2e7d4f", "#c02942"
CURVE_KS = (1, 2, 4, 8, 16, 32, 64, 128)


def plot_neighbours(
    part: Split,
    before: Tensor,
    after: Tensor,
    path: Path,
    seed: int,
    queries: Tensor | None = None,
    augmentation: int = 0,
) -> Path:
    """Draw a random sample of the queries whose nearest neighbour became right or wrong, each with its neighbours.

    If there are too few such queries, others whose neighbours changed are added, then any.

    Args:
        part: Images, ``n x c x h x w`` in [0, 1] or uint8, and labels.
        before: Embeddings before finetuning, ``n x d``.
        after: Embeddings after finetuning, ``n x d``.
        path: The PNG file.
        seed: Seed of the sample.
        queries: Which of the images are queries, ``n`` booleans, and the others their gallery; None if each searches
            all others.
        augmentation: As in `recall_at_k`, after finetuning.
    """
    everywhere = torch.arange(len(part))
    own, items = (everywhere, everywhere) if queries is None else (everywhere[queries], everywhere[~queries])
    labels = part.y.cpu()
    y = labels[own]
    count = min(NEIGHBOURS, len(items) - (queries is None))
    found = []
    for each, mixed in ((before, 0), (after, augmentation)):
        gallery = None if queries is None else each[items]
        near = nearest(each[own], count, gallery=gallery, augmentation=mixed)
        found.append(items[torch.from_numpy(near)])
    right = [labels[rows[:, 0]] == y for rows in found]
    interest = 2 * (right[0] != right[1]).long() + (found[0] != found[1]).any(1).long()
    order = torch.randperm(len(y), generator=generator(seed, "neighbours"))
    shown = order[interest[order].argsort(descending=True, stable=True)][:ROWS].tolist()
    mended, broken = int((~right[0] & right[1]).sum()), int((right[0] & ~right[1]).sum())

    widths = [1.0] * (count + 1) + [0.25] + [1.0] * count  # a gap between before and after
    figure, panels = new_figure(
        0.95 * sum(widths), len(shown) + 0.7, len(shown), len(widths), gridspec_kw={"width_ratios": widths}
    )
    figure.suptitle(
        f"{counted(len(y), 'test query')}: the nearest neighbour became right for {mended}, wrong for {broken}\n"
        "green: the query's class, red: another",
        fontsize=9,
    )
    for line, query in zip(panels, shown, strict=True):
        _show(line[0], part.x[own[query]], "black", 1.0)
        line[count + 1].set_axis_off()
        for rows, columns in zip(found, (line[1 : count + 1], line[count + 2 :]), strict=True):
            for axes, item in zip(columns, rows[query].tolist(), strict=True):
                _show(axes, part.x[item], HIT if labels[item] == y[query] else MISS, 3.0)
    for column, title in ((0, "query"), (1, "before"), (count + 2, "after")):
        panels[0, column].set_title(title, fontsize=9, loc="left")
    return save_figure(figure, path)


def save_recalls(
    y: Tensor, embeddings: dict[str, tuple[Tensor, int]], path: Path, queries: Tensor | None = None
) -> None:
    """Write Recall@k on the test data, for several k, as JSON.

    Args:
        y: Labels, ``n``.
        embeddings: Embeddings by method, ``n x d``, and the ``augmentation`` of `recall_at_k`.
        path: The file.
        queries: Which of them are queries, ``n`` booleans, and the others their gallery; None if each searches all
            others.
    """
    y = y.cpu()
    ks = [k for k in CURVE_KS if k < (len(y) if queries is None else int((~queries).sum()))]
    recalls = {
        name: (
            recall_at_k(vectors, y, ks, augmentation=augmentation)
            if queries is None
            else recall_at_k(vectors[queries], y[queries], ks, gallery=(vectors[~queries], y[~queries]))
        ).at
        for name, (vectors, augmentation) in embeddings.items()
    }
    write_json(path, {"ks": ks, **{name: [at[k] for k in ks] for name, at in recalls.items()}})


def plot_recalls(files: Sequence[Path], path: Path) -> Path:
    """Draw recall by k before and after finetuning, mean and standard deviation over seeds.

    Args:
        files: What `save_recalls` wrote, one file for each seed; the k that all files have are drawn.
        path: The PNG file.
    """
    seeds = [read_shaped(file, dict[str, list[Finite]], "the recalls of a seed") for file in files]
    for file, seed in zip(files, seeds, strict=True):
        known = {"ks", *(name for name in seed if name in METHODS)}
        if not known == seed.keys() >= seeds[0].keys() or len({len(values) for values in seed.values()}) != 1:
            raise FileFormatError(f"{file} holds no recalls of a seed by k; delete it to regenerate it")
    ks = min((seed["ks"] for seed in seeds), key=len)
    figure, ((axes,),) = new_figure(5.4, 4.0)
    for name in (name for name in seeds[0] if name != "ks"):
        values = np.array([seed[name][: len(ks)] for seed in seeds])
        mean, std = values.mean(0), values.std(0)
        axes.plot(ks, mean, "o-", markersize=4, color=METHODS[name].colour, label=METHODS[name].title)
        axes.fill_between(ks, mean - std, mean + std, color=METHODS[name].colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.grid(alpha=0.25)
    axes.set_xlabel("k")
    axes.set_ylabel("test Recall@k (higher is better)")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title(over_seeds(len(seeds)), fontsize=9)
    return save_figure(figure, path)


def _show(axes: Any, image: Tensor, frame: str, width: float) -> None:
    axes.imshow(image.cpu().movedim(0, -1).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=_white(image))
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(visible=True, color=frame, linewidth=width)


def _white(image: Tensor) -> int:
    return 255 if image.dtype == torch.uint8 else 1
