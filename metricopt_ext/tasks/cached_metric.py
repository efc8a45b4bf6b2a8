"""A metric that remembers its answers in a file, so that an interrupted run asks nothing twice."""

from pathlib import Path

from torch import nn

from metricopt_ext.errors import FileFormatError
from metricopt_ext.tasks.metric import Answer, Metric
from metricopt_ext.utils.files import read_json, write_json


class RememberedMetric(Metric):
    """A metric with a file of its answers, in the order in which they were given.

    Runs are repeatable, so a run that is started again asks the same questions in the same order: the answers on file
    are given first, and booked as they were, before the metric itself is asked.

    Args:
        metric: The metric; both share a ledger.
        path: The JSON file, written anew with every answer; None remembers nothing beyond this object.

    Attributes:
        answers: The answers given through this object so far.

    Raises:
        FileFormatError: The file holds something else.
    """

    def __init__(self, metric: Metric, path: Path | None) -> None:
        super().__init__(
            metric.function, maximize=metric.maximize, bounds=metric.bounds, name=metric.name, ledger=metric.ledger
        )
        self.metric = metric
        self.path = path
        self.answers: list[Answer] = []
        self._on_file = [] if path is None or not path.exists() else _read(path)

    def ask(self, model: nn.Module, purpose: str) -> Answer:
        """Give the next answer on file, or ask the metric (see `Metric.ask`) and write its answer down."""
        if len(self.answers) < len(self._on_file):
            self.ledger.spend(purpose)
            answer = self._on_file[len(self.answers)]
        else:
            answer = self.metric.ask(model, purpose)
        self.answers.append(answer)
        if self.path is not None and len(self.answers) > len(self._on_file):
            write_json(self.path, {"answers": self.answers})
        return answer


def _read(path: Path) -> list[Answer]:
    try:
        return [Answer(cost, None if halves is None else _pair(*halves)) for cost, halves in read_json(path)["answers"]]
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path} holds no answers of a metric: {error!r}; delete it to have them asked again"
        ) from error


def _pair(a: float, b: float) -> tuple[float, float]:
    return a, b
