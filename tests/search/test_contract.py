"""Each search, and each algorithm that learns f first, keeps to the contract, with whatever options a run has."""

from typing import Any, ClassVar

from metricopt_ext.methods.algorithm1 import Algorithm1
from metricopt_ext.methods.algorithm_s1 import AlgorithmS1
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.value.learners import RidgeLearner
from testers.strategy import StrategyTester


class TestGuided(StrategyTester):
    pass


class TestGuidedFromStarts(StrategyTester):
    starts = True


class TestGuidedFromLines(StrategyTester):
    lines = True


class TestGuidedUnderAConstraint(StrategyTester):
    constraint = True


class TestGuidedWithSettings(StrategyTester):
    settings = True


class TestGuidedWithHoldout(StrategyTester):
    holdout = True


class TestGuidedWithAll(StrategyTester):
    queries = 30
    starts = lines = constraint = settings = holdout = True


class TestGuidedRepeated(StrategyTester):
    queries = 36
    metric_options: ClassVar = {"repeats": 2}


class TestCMAES(StrategyTester):
    def strategy(self) -> Any:
        return CMAES()


class TestCMAESWithAll(TestCMAES):
    starts = lines = constraint = settings = holdout = True


class TestGuidedES(StrategyTester):
    queries = 30

    def strategy(self) -> Any:
        return GuidedES()


class TestGuidedESWithAll(TestGuidedES):
    starts = lines = constraint = settings = True


class TestRandomSearch(StrategyTester):
    def strategy(self) -> Any:
        return RandomSearch()


class TestRecipe(StrategyTester):
    queries = 62
    asks_and_tells, collected_again = False, 9

    def strategy(self) -> Any:
        return Recipe(steps=6, evals=3, rounds=2, folds=2, trials=1, learners=(RidgeLearner(),))


class TestRecipeWithHoldout(TestRecipe):
    holdout = True


class TestAlgorithm1(StrategyTester):
    queries = 30
    asks_and_tells, collected_again = False, 9

    def strategy(self) -> Any:
        return Algorithm1(steps=6, evals=3)


class TestAlgorithmS1(StrategyTester):
    queries = 30
    asks_and_tells, collected_again = False, 9

    def strategy(self) -> Any:
        return AlgorithmS1(steps=6, evals=3, tasks=2, pairs=2, hidden=4)
