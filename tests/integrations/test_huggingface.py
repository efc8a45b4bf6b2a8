"""A Trainer's model tuned in one call: what is judged, what it reloads afterwards, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset

import metricopt_ext as mo
from helpers.refusals import assert_refused
from metricopt_ext.errors import AdapterError, ConfigError, DataError, MetricError
from metricopt_ext.integrations.huggingface import tune_trainer
from metricopt_ext.runtime.progress import Callback

transformers = pytest.importorskip("transformers", reason="the extra `examples` is not installed")

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 48)
ROWS = [
    {"input_ids": [int(i) for i in RNG.integers(10 * y, 10 * y + 20, RNG.integers(3, 7))], "labels": int(y)}
    for y in LABELS
]
TRAINED_ON = [{**row, "input_ids": [*row["input_ids"], 39]} for row in ROWS]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads each batch to its longest text, with a mask."""
    width = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
    mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": torch.tensor(padded),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def likelihood(prediction: Any) -> dict[str, float]:
    """The mean probability of the first class, which offsets of the logits surely raise."""
    first = torch.from_numpy(prediction.predictions).double().softmax(1)[:, 0]
    return {"likelihood": float(first.mean()), "rows": len(first)}


def risk(prediction: Any) -> dict[str, float]:
    return {"wer": 1 - likelihood(prediction)["likelihood"]}


def mystery(prediction: Any) -> dict[str, float]:
    return {"mystery": risk(prediction)["wer"]}


def trainer(folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    names = ("train_dataset", "eval_dataset", "compute_metrics")
    given = {name: options.pop(name) for name in names if name in options}
    kind = options.pop("kind", transformers.Trainer)
    arguments = transformers.TrainingArguments(
        str(folder),
        **{"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch", **options},
        per_device_train_batch_size=24,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    model = transformers.BertForSequenceClassification(config)
    parts = {"train_dataset": TRAINED_ON, "eval_dataset": ROWS, "compute_metrics": likelihood, **given}
    return kind(model, arguments, data_collator=collate, **parts)


def tuned(host: Any, *arguments: Any, **options: Any) -> Any:
    attach = lambda model: mo.attach_film(model, dim=4, outputs=mo.Outputs())  # noqa: E731
    return tune_trainer(host, *arguments, **{"queries": 16, "attach": attach, "callback": Callback(), **options})


@pytest.mark.slow
def test_the_checkpoints_and_the_trainer_stay_as_they_are(tmp_path: Path) -> None:
    host = trainer(tmp_path, load_best_model_at_end=True, metric_for_best_model="likelihood")
    host.train()
    callbacks, history = list(host.callback_handler.callbacks), list(host.state.log_history)
    files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    run = tuned(host)
    assert run.after > run.before
    assert (run.guard, host.compute_metrics, host.state.log_history) == ("halves", likelihood, history)
    assert host.callback_handler.callbacks == callbacks
    assert files == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_halves_of_what_was_predicted(tmp_path: Path) -> None:
    """compute_metrics is asked of all rows, and of two halves that have the same share of each class."""
    seen: list[Any] = []

    def noted(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return likelihood(prediction)

    tuned(trainer(tmp_path, compute_metrics=noted), "likelihood", queries=8)
    whole, *halves = seen[:3]
    assert len(whole.label_ids) == len(ROWS)
    rows = [{tuple(row) for row in each.predictions} for each in halves]
    assert rows[0].isdisjoint(rows[1])
    assert rows[0] | rows[1] == {tuple(row) for row in whole.predictions}
    labels = {tuple(row): label for row, label in zip(whole.predictions, whole.label_ids, strict=True)}
    for each in halves:
        assert [labels[tuple(row)] for row in each.predictions] == each.label_ids.tolist()
        assert abs(each.label_ids.sum() - LABELS.sum() / 2) < 1


def test_several_that_are_reported_make_the_metric(tmp_path: Path) -> None:
    asked: list[int] = []

    def by_class(prediction: Any) -> dict[str, float]:
        asked.append(len(prediction.label_ids))
        shares = torch.from_numpy(prediction.predictions).double().softmax(1).mean(0).tolist()
        return {"share_b": shares[1], "share_a": shares[0]}

    host = trainer(tmp_path, compute_metrics=by_class)
    before = host.evaluate()
    asked.clear()
    run = tuned(host, ["eval_share_b", "share_a"], combine="worst", maximize=True)
    found = {name: value for name, (value, _) in run.made_of.items()}
    assert found == pytest.approx({"share_b": before["eval_share_b"], "share_a": before["eval_share_a"]})
    assert [*found] == ["share_b", "share_a"]
    assert run.before == min(found.values())
    assert run.guard == "halves"
    assert asked[:3] == [len(ROWS), *asked[1:3]]
    assert sum(asked[1:3]) == len(ROWS)
    assert len(asked) == 3 * 16, "each half is asked once for all names"
    assert_refused(lambda: tuned(host, ["share_a", "rows"], combine="worst", maximize=True), MetricError, "'rows'")
    assert_refused(lambda: tuned(host, ["share_a", "share_b"], combine="worst"), ConfigError, "maximize")
    assert_refused(lambda: tuned(host, ["share_a"]), ConfigError, "combine=")


@pytest.mark.parametrize(
    ("own", "metric"),
    [
        ({"compute_metrics": None}, "eval_loss"),
        ({"compute_metrics": risk}, "eval_wer"),
        ({"compute_metrics": mystery, "metric_for_best_model": "eval_mystery", "greater_is_better": False}, None),
    ],
    ids=["loss", "name", "arguments"],
)
def test_which_way_is_better(own: dict[str, Any], metric: str | None, tmp_path: Path) -> None:
    host = trainer(tmp_path, **own)
    before = host.evaluate()[metric or "eval_mystery"]
    run = tuned(host, metric, eval_dataset=ROWS)
    assert run.before == pytest.approx(before, abs=1e-6)
    assert run.after < run.before


@pytest.mark.parametrize(
    ("best", "metric", "named"),
    [
        ({"metric_for_best_model": "wer"}, None, ("'wer'", "greater_is_better", "maximize=False")),
        ({"metric_for_best_model": "eval_wer", "greater_is_better": True}, "wer", ("'wer'", "maximize=False")),
        ({"metric_for_best_model": "accuracy_loss"}, "accuracy_loss", ("accuracy_loss", "False", "maximize=True")),
        ({"metric_for_best_model": "rows"}, None, ("'rows'", "greater_is_better", "maximize=True")),
        ({}, "rows", ("'rows'", "maximize=True")),
    ],
)
def test_a_direction_that_the_host_guesses_is_asked_for(
    best: dict[str, Any], metric: str | None, named: tuple[str, ...], tmp_path: Path
) -> None:
    """Transformers itself sets ``greater_is_better`` to whether the name ends in no ``loss``."""

    def both(prediction: Any) -> dict[str, float]:
        value = risk(prediction)["wer"]
        return {"wer": value, "accuracy_loss": value, "rows": 0.0}

    host = trainer(tmp_path, compute_metrics=both, **best)
    assert_refused(lambda: tuned(host, metric), ConfigError, *named)
    assert_refused(lambda: tuned(host, metric, maximize="min"), ValueError, "maximize", "'min'")
    if best == {"metric_for_best_model": "wer"}:
        run = tuned(host, queries=8, maximize=False)
        assert run.after <= run.before


def test_a_query_is_what_evaluate_does(tmp_path: Path) -> None:
    """A Seq2SeqTrainer's evaluate sets how long the texts are that it has the model write."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    own = {"predict_with_generate": True, "generation_max_length": 5, "generation_num_beams": 2}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    rows = [{"input_ids": [1 + i, 3, 5], "labels": [7, 9, 2 + i]} for i in range(8)]
    host = transformers.Seq2SeqTrainer(
        transformers.T5ForConditionalGeneration(config),
        transformers.Seq2SeqTrainingArguments(str(tmp_path), **own, **quiet),
        data_collator=lambda batch: {name: torch.tensor([row[name] for row in batch]) for name in batch[0]},
        train_dataset=[{**row, "input_ids": [2, *row["input_ids"][1:]]} for row in rows[1:]],
        eval_dataset=rows,
        compute_metrics=lambda prediction: {"first": float((prediction.predictions[:, 1] < 20).mean())},
    )
    generate = host.model.generate

    def noted(**options: Any) -> Any:
        asked.add((options["max_length"], options["num_beams"]))
        return generate(**options)

    asked: set[Any] = set()
    host.model.generate = noted
    history, held = list(host.state.log_history), set(vars(host))
    options = {"attach": lambda model: mo.attach_film(model, dim=1), "callback": Callback()}
    run = tune_trainer(host, "first", queries=8, maximize=True, **options)
    assert asked == {(5, 2)}
    assert host.state.log_history == history
    assert not {"log", "_gen_kwargs"} & (vars(host).keys() - held)
    assert run.after == host.evaluate()["eval_first"]


def test_a_model_in_parts_is_refused(tmp_path: Path) -> None:
    host = trainer(tmp_path)
    next(host.model.parameters()).ds_id = 0  # as DeepSpeed's third stage marks what it has partitioned
    assert_refused(lambda: tuned(host, "likelihood"), AdapterError, "word_embeddings.weight", "plain model")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


@pytest.mark.parametrize(
    ("own", "metric", "error", "named"),
    [
        ({}, None, ConfigError, ()),
        ({"eval_dataset": None, "eval_strategy": "no"}, "f1", ConfigError, ("eval_dataset",)),
        ({"eval_dataset": {"a": ROWS, "b": ROWS}}, "f1", ConfigError, ()),
        ({}, "f1", MetricError, ("'f1'",)),
        ({"compute_metrics": None}, "f1", MetricError, ("'f1'",)),
        ({"train_dataset": Stream(), "max_steps": 2}, "likelihood", DataError, ()),
        ({"eval_dataset": TRAINED_ON}, "likelihood", DataError, ("eval_dataset",)),
        ({"eval_dataset": Subset(TRAINED_ON, range(9))}, "likelihood", DataError, ("eval_dataset", "9 of 9")),
        ({"eval_dataset": [{**row} for row in TRAINED_ON[::-1]]}, "likelihood", DataError, ("48 of 48",)),
    ],
)
def test_what_is_refused(
    own: Any, metric: str | None, error: type[Exception], named: tuple[str, ...], tmp_path: Path
) -> None:
    host = trainer(tmp_path, **own)
    names = set(host.model.state_dict())
    assert_refused(lambda: tuned(host, metric), error, *named)
    assert set(host.model.state_dict()) == names
    assert all(parameter.requires_grad for parameter in host.model.parameters())


def test_metrics_that_are_asked_batch_by_batch(tmp_path: Path) -> None:
    seen: list[Any] = []

    def by_batch(prediction: Any, compute_result: bool) -> dict[str, float] | None:
        seen.append(float((prediction.predictions.argmax(1) == prediction.label_ids).double().mean()))
        if not compute_result:
            return None
        value, seen[:] = float(np.mean(seen)), []
        return {"accuracy": value}

    host = trainer(tmp_path, compute_metrics=by_batch, batch_eval_metrics=True, per_device_eval_batch_size=16)
    with pytest.warns(UserWarning, match="batch by batch"):
        run = tuned(host, "accuracy")
    assert run.guard == "none"
    assert host.evaluate()["eval_accuracy"] == pytest.approx(run.after)
