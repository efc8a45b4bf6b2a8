"""Versions of what numbers depend on."""

import importlib.metadata
import platform

DISTRIBUTION = "metricopt-ext"
PACKAGES = (
    *(DISTRIBUTION, "torch", "torchvision", "numpy", "scipy", "scikit-learn", "diffsort"),
    *("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12", "pytorch-metric-learning"),
)


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    found = {package: version for package in PACKAGES if (version := installed(package))}
    return {"python": platform.python_version(), **found}


def installed(distribution: str) -> str | None:
    """Return a distribution's version; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
