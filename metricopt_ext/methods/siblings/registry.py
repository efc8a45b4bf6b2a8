"""The sibling methods by the names that tools and reports know them by."""

from metricopt_ext.methods.siblings.ala import AdaptiveLossAlignment
from metricopt_ext.methods.siblings.reloss import ReLoss
from metricopt_ext.methods.siblings.sibling import Sibling
from metricopt_ext.methods.siblings.surrogate_learning import SurrogateLearning

# With their papers' settings; the contract test runs all of them.
SIBLINGS: dict[str, Sibling] = {
    "sl_u": SurrogateLearning("universal"),
    "sl_s": SurrogateLearning("scratch"),
    "sl_r": SurrogateLearning("refined"),
    "reloss": ReLoss(),
    "reloss_only": ReLoss(cross_entropy=False),
    "ala": AdaptiveLossAlignment("classes"),
    "ala_mixture": AdaptiveLossAlignment("mixture"),
    "ala_focal": AdaptiveLossAlignment("focal"),
}

# Those that train embeddings for the distances between them; the others train classifiers.
FOR_EMBEDDINGS = ("ala_mixture", "ala_focal")
