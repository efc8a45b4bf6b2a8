"""The names of the sibling methods."""

from metricopt_ext.methods.siblings.ala import AdaptiveLossAlignment
from metricopt_ext.methods.siblings.registry import FOR_EMBEDDINGS, SIBLINGS
from metricopt_ext.methods.siblings.reloss import ReLoss
from metricopt_ext.methods.siblings.sibling import Sibling
from metricopt_ext.methods.siblings.surrogate_learning import SurrogateLearning


def test_every_entry_is_a_method_with_settings_of_its_own() -> None:
    assert all(isinstance(method, Sibling) for method in SIBLINGS.values())
    assert len(set(map(repr, SIBLINGS.values()))) == len(SIBLINGS)


def test_surrogate_learning_has_the_settings_of_its_paper() -> None:
    for name, surrogate in {"sl_u": "universal", "sl_s": "scratch", "sl_r": "refined"}.items():
        method = SIBLINGS[name]
        assert isinstance(method, SurrogateLearning)
        assert (method.surrogate, method.iterations, method.model_steps, method.surrogate_steps) == (
            surrogate,
            300_000,
            3,
            10,
        )
        assert method.model_lr == method.surrogate_lr == method.clip == 1e-5
        assert (method.universal.positive, method.universal.mean, method.universal.std) == (0.5, 0.0, 1.0)
        assert method.universal.lr == method.universal.clip == 1e-5


def test_reloss_has_the_settings_of_its_paper() -> None:
    for name, cross_entropy in {"reloss": True, "reloss_only": False}.items():
        method = SIBLINGS[name]
        assert isinstance(method, ReLoss)
        assert method.cross_entropy == cross_entropy
        assert (method.training.lr, method.training.weight_decay, method.training.penalty) == (0.01, 1e-4, 10.0)


def test_adaptive_loss_alignment_has_the_settings_of_its_paper() -> None:
    for name, loss in {"ala": "classes", "ala_mixture": "mixture", "ala_focal": "focal"}.items():
        method = SIBLINGS[name]
        assert isinstance(method, AdaptiveLossAlignment)
        assert (method.loss, method.children, method.history, method.link) == (loss, 10, 10, "sigmoid")
        assert method.action_steps == method.reward_evals == 200
        assert (method.gamma, method.beta, method.policy_lr, method.offset) == (0.9, 0.1, 0.001, 1.0)
        assert (method.optimizer, method.momentum) == ("sgd", 0.9)
        assert (name in FOR_EMBEDDINGS) == (loss != "classes")
    assert set(FOR_EMBEDDINGS) < set(SIBLINGS)
