"""Versions of what numbers depend on."""

import importlib.metadata
import platform

PACKAGES = (
    *("metricopt-ext", "torch", "torchvision", "numpy", "scipy", "scikit-learn", "diffsort"),
    *("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12", "pytorch-metric-learning"),
)


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
