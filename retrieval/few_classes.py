"""What so few classes can tell: said before a search goes on, as validation often has few."""

import math
from collections.abc import Callable

from metricopt_ext.methods.guard import CONFIDENCE, deviates
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation, stacked_pairs
from metricopt_ext.tasks.metric import Query
from metricopt_ext.utils.words import counted


def error_over_classes(start: Evaluation) -> float | None:
    """Return the standard error of a metric over classes, from divisions of them into halves; None without halves.

    Over all divisions, the mean square of the difference between halves is 4 S^2 / C, for C classes whose values have
    the variance S^2: half its root is the standard error S / sqrt(C) of their mean.

    Args:
        start: The evaluation of the model as it was trained.
    """
    pairs = stacked_pairs([start])
    return None if pairs is None else float((pairs[0, :, 0] - pairs[0, :, 1]).square().mean().sqrt()) / 2


class FewClasses:
    """Says at the first query, of the model as it was trained, what gain could be told from chance.

    Before anything was changed, nobody knows how a gain differs between classes. Were it by as much as the metric
    itself does (values before and after that correlate by 1/2 over the classes), its standard error would be the
    metric's own. A smaller change differs by less.

    Args:
        metric: Its name and units.
        classes: Returns how many classes it has; 0 if that isn't known.
        say: Shows a line.
        confidence: How sure the guard must be, at least 0.5 and below 1.
    """

    def __init__(
        self,
        metric: CostScale,
        classes: Callable[[], int],
        say: Callable[[str], None],
        confidence: float = CONFIDENCE,
    ) -> None:
        self.metric, self.classes, self.say, self.needed = metric, classes, say, deviates(confidence)
        self._said = False

    def __call__(self, query: Query) -> None:
        """Look at a query; the first one tells."""
        if self._said:
            return
        self._said = True
        error = error_over_classes(query.evaluation)
        if error is None or not math.isfinite(error):
            return
        of = counted(self.classes(), "class") if self.classes() else "its classes"
        self.say(
            f"{self.metric.name} is {query.value:.4f} at first, with a standard error of {error:.4f} over {of}; a gain"
            f" that varies as much between classes must exceed {self.needed * error:.4f} to be told from chance"
        )
