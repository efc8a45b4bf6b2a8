"""A ledger that counts a metric's queries by purpose, and refuses those beyond a budget."""

import math
from collections.abc import Mapping

from metricopt_ext.errors import BudgetError
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.words import counted


class Ledger:
    """Counts metric queries by purpose and refuses any beyond the budget.

    A call of the metric that a kill or the metric's own error cut short is made again when the run is resumed, and
    counts once: what the ledger has is the answers that the run used, not the calls that were lost.

    Args:
        budget: Maximum number of queries, at least 0; None for no limit.

    Raises:
        ValueError: The budget is out of range.
    """

    def __init__(self, budget: int | None = None) -> None:
        if budget is not None:
            check_integer(0, budget=budget)
        self.budget = budget
        self.spent_on: dict[str, int] = {}

    @property
    def spent(self) -> int:
        """Queries spent so far."""
        return sum(self.spent_on.values())

    @property
    def left(self) -> float:
        """Queries left; infinite without a budget."""
        return math.inf if self.budget is None else self.budget - self.spent

    def require(self, queries: int, purpose: str = "this run") -> None:
        """Refuse queries that are not left.

        Raises:
            BudgetError: Fewer are.
        """
        if queries > self.left:
            raise BudgetError(
                f"{counted(queries, 'query')} requested ({purpose}), {self.left} left of the metric's own budget of"
                f" {self.budget}; spent so far: {self.spent_on}"
            )

    def spend(self, purpose: str, queries: int = 1) -> None:
        """Count queries.

        Raises:
            BudgetError: Fewer queries are left.
        """
        self.require(queries, purpose)
        self.spent_on[purpose] = self.spent_on.get(purpose, 0) + queries

    def charge(self, spent_on: Mapping[str, int]) -> None:
        """Count queries by purpose, as another ledger has them; see `spend`."""
        for purpose, queries in spent_on.items():
            self.spend(purpose, queries)
