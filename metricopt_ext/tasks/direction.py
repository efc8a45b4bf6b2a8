"""Whether higher is better: as a user says, or as a metric's name does; never by a guess."""

import re

from metricopt_ext.errors import ConfigError

WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # val_AP50 has val and AP; meanIoU has mean, Io and U

HIGHER = re.compile(
    "acc|accuracy|agreement|ami|ap|auc|auprc|auroc|aupr|average|bleu|correct|correlation|dice|f|fbeta|gain|gini|hits?"
    "|jaccard|kappa|likelihood|map|matthews|mcc|meteor|mrr|ndcg|nmi|pearson|precision|psnr|purity|quality|recall"
    "|reciprocal|reward|roc|rouge|scores?|sensitivity|similarity|spearman|specificity|ssim|top|wins?"
)
LOWER = re.compile(
    "brier|calibration|cer|costs?|deviance|distances?|divergence|ece|eer|entropy|err|errors?|fid|fnr|fpr|hamming"
    "|latency|logloss|loss|losses|mae|mape|mcr|misclassification|mse|nll|perplexity|pinball|ppl|regret|risk|rmse"
    "|seconds|ter|time|wer"
)
FLIPS = re.compile("neg|negative")  # scikit-learn's scorers of errors, the negative log-likelihood
GOOD = re.compile(r"iou|(?<![a-z])[dr]2(?![a-z0-9])")  # anywhere in a name: mIoU, r2_score, d2_log_loss_score


def known_direction(name: str) -> bool | None:
    """Return whether higher is better by a metric's name; None where it does not say.

    Examples:
        >>> known_direction("val_loss"), known_direction("neg_mean_squared_error"), known_direction("mine")
        (False, True, None)
    """
    words = [each.lower() for each in WORDS.findall(name)]
    higher, lower, flips = (any(map(each.fullmatch, words)) for each in (HIGHER, LOWER, FLIPS))
    if GOOD.search(name.lower()):
        return True
    return (not lower) != flips if higher or lower else None


def direction(name: str, maximize: bool | None) -> bool:
    """Return whether higher is better, as told or else by a metric's name.

    Raises:
        ConfigError: Neither says so.
    """
    known = known_direction(name) if maximize is None else maximize
    if known is None:
        raise ConfigError(
            f"nothing tells whether a higher {name!r} is better; say so by maximize=True, or maximize=False of a loss"
        )
    return known
