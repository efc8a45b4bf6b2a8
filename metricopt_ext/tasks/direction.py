"""Whether higher is better: as a user says, or as a metric's name does; never by a guess."""

import re

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.words import words_in

HIGHER = re.compile(
    r"\b(acc|accuracy|agreement|ami|m?ap|auc(pr)?|auprc?|auroc|(sacre)?bleu|correct|correlation|dice|f(?=[0-9])|fbeta"
    r"|gain|hits?|[a-z]*iou|jaccard|kappa|likelihood|match|matthews|mcc|meteor|mrr|ndcg|nmi|pearsonr?|precision|psnr"
    r"|quality|[dr](?=2\b)|recall|reciprocal|reward|roc|rouge|sensitivity|similarity|spearmanr?|specificity|ssim"
    r"|wins?)[0-9]*\b"
)
LOWER = re.compile(  # but not in d2_log_loss_score, which is higher-better as r2_score is
    r"^(?!.*\b[dr]2\b).*\b(b?ce|bouldin|brier|cer|costs?|deviance|distances?|divergence|ece|eer|entropy|err|errors?"
    r"|fid|fnr|fpr|kl|latency|logloss|loss|losses|mae|mcr|misclassification|nll|perplexity|pinball|ppl|regret|risk"
    r"|r?ms(le|e)|s?mape|ter|wer)[0-9]*\b"
)
SCORE = re.compile(r"\b(scores?|top[0-9]+)\b")  # higher by convention, unless it is of what is lower-better
TURNS = re.compile(  # what may turn the meaning of the word beside it
    r"\b(change|decrease|delta|diff|difference|drop|free|gap|improvement|inverse|less|minus|neg|negative|no|non|not"
    r"|ratio|reduction|without)\b|(^|[/ ])1 ?- ?[a-z]"
)


def known_direction(name: str) -> bool | None:
    """Return whether higher is better by a metric's name; None where it does not say, or says both.

    Examples:
        >>> known_direction("val_loss"), known_direction("mAP50"), known_direction("loss_free_acc")
        (False, True, None)
    """
    text = words_in(name)
    higher, lower = (bool(each.search(text)) for each in (HIGHER, LOWER))
    if (higher and lower) or TURNS.search(f"{text} {name}".lower()):
        return None
    return False if lower else higher or bool(SCORE.search(text)) or None


def direction(name: str, maximize: bool | None) -> bool:
    """Return whether higher is better, as told or else by a metric's name.

    Raises:
        ConfigError: Neither says so.
    """
    known = known_direction(name) if maximize is None else maximize
    if known is None:
        raise ConfigError(
            f"nothing tells whether a higher {name!r} is better; say maximize=True, or maximize=False if lower is"
        )
    return known
