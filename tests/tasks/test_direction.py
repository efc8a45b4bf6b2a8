"""Whether higher is better, as a metric's name says it."""

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.direction import direction

# Names that say which way is better, and those that don't, or say both.
HIGHER = "val_f1 valid/mAP50 Acc@1 val_acc_epoch meanIoU BinaryF1Score recall@1 ndcg@10 bbox/AP50 d2_brier_score top5"
LOWER = (
    "val_loss validation/loss valLoss eval_wer CER val_rmse MAE perplexity ppl error_rate top1_err fpr95 EER ECE fid kl"
    " brier_score log_loss MSELoss total_cost regret latency fid_score loss/dataloader_idx_1"
)
NEITHER = (
    "my_metric val_power false_positive_rate terror lossless error-free loss_free_acc accuracy_loss acc_drop giou_loss"
    " recall_negative neg_loss loss_reduction d_prime mean_rank 1-AUC f"
)


def test_which_way_is_better_is_told_or_said_by_the_name_or_asked_for() -> None:
    for names, expected in ((HIGHER, True), (LOWER, False)):
        assert {name: direction(name, None) for name in names.split()} == dict.fromkeys(names.split(), expected)
    for name in NEITHER.split():
        assert_refused(lambda name=name: direction(name, None), ConfigError, repr(name), "maximize=True")  # type: ignore[misc]
        assert not direction(name, maximize=False)
    assert direction("val_loss", maximize=True)
