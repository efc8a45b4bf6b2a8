"""What a process knows of torchrun's ranks (`distributed`) without torch, which a tool may not have imported."""

import os


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Whether this process is the first that torchrun has started, or was not started by it."""
    return not launched() or int(os.environ["RANK"]) == 0


def is_of_another(error: BaseException) -> bool:
    """Whether an error was first raised on another rank, which tells of it."""
    return hasattr(error, "told_by_rank")


def restarts() -> int:
    """Return how often torchrun has started this program again (``--max-restarts``), after a rank has died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
