"""An ImageNet-style trainer, in the manner of PyTorch's example, tuned for the mean recall of its classes."""

import argparse
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import metricopt_ext as mo  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", nargs="?", type=Path, default="imagenet_trainer", help="has train and val; else digits")
parser.add_argument("--arch", default="resnet18", choices=models.list_models(models))
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--resume", type=Path)
parser.add_argument("--evaluate", action="store_true", help="the model that is resumed, and no more")


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    to_tensor = transforms.Compose([transforms.Resize(16), transforms.ToTensor()])
    augmented = transforms.Compose([transforms.RandomAffine(10, (0.1, 0.1)), to_tensor])
    train_set = datasets.ImageFolder(args.data / "train", augmented)
    train = DataLoader(train_set, batch_size=64, shuffle=True)
    val_loader = DataLoader(datasets.ImageFolder(args.data / "val", to_tensor), batch_size=250)
    model = nn.DataParallel(models.get_model(args.arch, num_classes=len(train_set.classes)).to(device))
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    if args.resume:
        model.load_state_dict(torch.load(args.resume, map_location=device)["state_dict"])
    if args.evaluate:
        print(f"mean recall: {validate(val_loader, model, device)[0]:.4f}")
        return
    for epoch in range(args.epochs):
        model.train()
        for images, target in train:
            optimizer.zero_grad()
            loss(model(images.to(device)), target.to(device)).backward()
            optimizer.step()
        scheduler.step()
        print(f"mean recall after epoch {epoch + 1}: {validate(val_loader, model, device)[0]:.4f}")
        torch.save({"epoch": epoch + 1, "arch": args.arch, "state_dict": model.state_dict()}, "checkpoint.pth.tar")
    metric = mo.Metric(lambda: validate(val_loader, model, device), maximize=True)  # metric
    print(mo.tune_model(model, loss=loss, batches=train, metric=metric, queries=60))  # +
    torch.save({"epoch": args.epochs, "arch": args.arch, "state_dict": model.state_dict()}, "model_best.pth.tar")  # +


@torch.inference_mode()
def validate(loader: DataLoader, model: nn.Module, device: torch.device) -> tuple[float, list[float]]:
    model.eval()
    pairs = [(model(images.to(device)).argmax(1).cpu(), target) for images, target in loader]
    predicted, target = (torch.cat(each) for each in zip(*pairs, strict=True))
    return mean_recall(predicted, target), [mean_recall(predicted[i::2], target[i::2]) for i in (0, 1)]  # metric


def mean_recall(predicted: Tensor, target: Tensor) -> float:
    return mean(float((predicted[target == label] == label).float().mean()) for label in target.unique())


def draw_digits(folder: Path) -> None:
    digits, rng = load_digits(), np.random.default_rng(0)
    for i, (pixels, label) in enumerate(zip(digits.images[:1300], digits.target, strict=False)):
        if i >= 900 or rng.random() < 0.85**label:  # few nines to train on
            path = folder / ("train" if i < 900 else "val") / str(label) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15.9).astype(np.uint8)).convert("RGB").save(path)


if __name__ == "__main__":
    if not (args := parser.parse_args()).data.exists():
        draw_digits(args.data)
    main(args)
