"""Each search, and each algorithm that learns f first, keeps to the contract, with whatever options a run has."""

from typing import Any, ClassVar

import pytest

from helpers.quadratics import QuadraticLearner
from metricopt_ext.methods.paper.joint import AlgorithmS1
from metricopt_ext.methods.paper.recipe import Algorithm1, Recipe
from metricopt_ext.search.direct import CMAES, GuidedES, RandomSearch
from testers.strategy import StrategyTester


class TestGuided(StrategyTester):
    grows = True
    refuses_noise = True
    beats = "random"


@pytest.mark.slow
class TestGuidedFromStarts(StrategyTester):
    grows = True
    starts = True


@pytest.mark.slow
class TestGuidedFromLines(StrategyTester):
    grows = True
    lines = True


@pytest.mark.slow
class TestGuidedUnderAConstraint(StrategyTester):
    grows = True
    constraint = True


class TestGuidedWithOutcomes(StrategyTester):
    grows = True
    outcomes = True
    beats = "random"


@pytest.mark.slow
class TestGuidedWithOutcomesUnderAConstraint(StrategyTester):
    grows = True
    outcomes = starts = constraint = True


@pytest.mark.slow
class TestGuidedWithSettings(StrategyTester):
    grows = True
    settings = True


@pytest.mark.slow
class TestGuidedWithHoldout(StrategyTester):
    grows = True
    holdout = refuses_noise = True


class TestGuidedWithAll(StrategyTester):
    grows = True
    queries = 30
    starts = lines = constraint = settings = holdout = True


@pytest.mark.slow
class TestGuidedRepeated(StrategyTester):
    grows = True
    queries = 36
    refuses_noise = True
    metric_options: ClassVar = {"repeats": 2}


class TestCMAES(StrategyTester):
    grows, ends = True, 0
    refuses_noise, beats = True, "start"

    def strategy(self) -> Any:
        return CMAES()


class TestCMAESWithAll(TestCMAES):
    refuses_noise, beats = False, None
    starts = lines = constraint = settings = holdout = True


class TestGuidedES(StrategyTester):
    refuses_noise, beats = True, "start"
    queries = 30

    def strategy(self) -> Any:
        return GuidedES()


@pytest.mark.slow
class TestGuidedESWithAll(TestGuidedES):
    refuses_noise, beats = False, None
    starts = lines = constraint = settings = True


class TestRandomSearch(StrategyTester):
    grows, ends = True, 0
    refuses_noise, beats = True, "start"

    def strategy(self) -> Any:
        return RandomSearch()


class TestRecipe(StrategyTester):
    refuses_noise, beats = True, "start"
    queries = 62
    asks_and_tells, collected_again = False, 9

    def strategy(self) -> Any:
        return Recipe(steps=6, evals=3, rounds=2, folds=2, trials=1, learner=QuadraticLearner())


@pytest.mark.slow
class TestRecipeWithHoldout(TestRecipe):
    holdout, beats = True, None


@pytest.mark.slow
class TestAlgorithm1(StrategyTester):
    refuses_noise = True
    queries = 30
    asks_and_tells, collected_again = False, 9

    def strategy(self) -> Any:
        return Algorithm1(steps=6, evals=3)


class TestAlgorithmS1(StrategyTester):
    refuses_noise = True
    queries = 30
    asks_and_tells, collected_again = False, 9

    def strategy(self) -> Any:
        return AlgorithmS1(steps=6, evals=3, tasks=2, pairs=2, hidden=4)
