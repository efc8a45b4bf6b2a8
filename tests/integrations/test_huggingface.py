"""A Trainer's model tuned in one call: what is judged, what it reloads afterwards, what is refused."""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset

import metricopt_ext as mo
from helpers.refusals import assert_refused, assert_warned, having
from metricopt_ext.errors import AdapterError, ConfigError, DataError, MetricError
from metricopt_ext.integrations import huggingface
from metricopt_ext.integrations.huggingface import tune_trainer
from metricopt_ext.runtime.progress import Callback

transformers = pytest.importorskip("transformers", reason="the extra `examples` is not installed")

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 48)
ROWS = [
    {"input_ids": [int(i) for i in RNG.integers(10 * y, 10 * y + 20, RNG.integers(3, 7))], "labels": int(y)}
    for y in LABELS
]


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
    parts = {"train_dataset": ROWS, "eval_dataset": ROWS, "compute_metrics": likelihood, **given}
    return kind(model, arguments, data_collator=collate, **parts)


def tuned(host: Any, *arguments: Any, **options: Any) -> Any:
    attach = lambda model: mo.attach_film(model, dim=4, outputs=mo.Outputs())  # noqa: E731
    return tune_trainer(host, *arguments, **{"queries": 16, "attach": attach, "callback": Callback(), **options})


class Counted(transformers.TrainerCallback):
    evaluated = 0

    def on_evaluate(self, *arguments: Any, **options: Any) -> None:
        self.evaluated += 1

    on_prediction_step = on_evaluate


@pytest.mark.slow
def test_what_the_trainer_reloads_is_what_was_judged(tmp_path: Path) -> None:
    host, counted = trainer(tmp_path, load_best_model_at_end=True, metric_for_best_model="likelihood"), Counted()
    host.train()
    before, untuned = host.evaluate()["eval_likelihood"], copy.deepcopy(host.model.state_dict())
    host.add_callback(counted)
    callbacks = list(host.callback_handler.callbacks)
    run = tuned(host)
    assert counted.evaluated == 0
    assert host.callback_handler.callbacks == callbacks
    assert host.compute_metrics is likelihood
    assert sum(run.queries.values()) == 16
    assert run.guard == "halves"
    assert run.before == pytest.approx(before, abs=1e-6)
    assert run.after > run.before + 0.01
    assert host.evaluate()["eval_likelihood"] == pytest.approx(run.after, abs=1e-6)
    weights = host.model.state_dict()
    assert weights.keys() == untuned.keys()
    folders = sorted(tmp_path.glob("checkpoint-*"))
    assert len(folders) == 2
    best = Path(host.state.best_model_checkpoint)
    for folder in {best, folders[-1]}:
        state = load_file(folder / "model.safetensors")
        assert all(torch.equal(each, weights[name]) for name, each in state.items())
    kept = load_file(best / "untuned" / "model.safetensors")
    assert all(torch.equal(each, untuned[name]) for name, each in kept.items())
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(best / "untuned")
    assert all(torch.equal(each, untuned[name]) for name, each in loaded.state_dict().items())

    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)  # no epoch is left
    assert all(torch.equal(each, weights[name]) for name, each in resumed.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("masked", "population"), [(False, 32), (True, 1)])
def test_the_population_is_what_the_model_can_do(masked: bool, population: int, tmp_path: Path) -> None:
    """BERT's code looks into a mask, which ``vmap`` can't."""

    def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        of_one_length = [row | {"input_ids": (row["input_ids"] * 6)[:6]} for row in rows]
        return {name: each for name, each in collate(of_one_length).items() if masked or name != "attention_mask"}

    host, said = trainer(tmp_path, num_train_epochs=1), list[str]()
    host.data_collator = collated
    shown = type("Shown", (Callback,), {"say": lambda self, line: said.append(line)})()
    run = tuned(host, "likelihood", callback=shown)
    assert said[0].startswith(f"population {population}: ")
    assert host.evaluate()["eval_likelihood"] == pytest.approx(run.after, abs=1e-6)


@pytest.mark.slow
def test_what_the_guard_did_not_change_leaves_the_files_alone(tmp_path: Path) -> None:
    host = trainer(tmp_path, num_train_epochs=1, compute_metrics=lambda prediction: {"f1": 0.5})
    host.train()
    run = tuned(host, "eval_f1")
    assert (run.before, run.after) == (0.5, 0.5)
    assert not list(tmp_path.rglob("untuned"))


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
        train_dataset=rows,
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
    run = tune_trainer(host, "first", queries=8, attach=lambda model: mo.attach_film(model, dim=1), callback=Callback())
    assert asked == {(5, 2)}
    assert host.state.log_history == history
    assert not {"log", "_gen_kwargs"} & (vars(host).keys() - held)
    assert run.after == host.evaluate()["eval_first"]


class Questions(transformers.Trainer):
    """Makes answers of the predictions in its own ``evaluate``, as transformers' script for questions does."""

    def evaluate(self, eval_dataset: Any = None, **options: Any) -> dict[str, float]:
        compute, self.compute_metrics = self.compute_metrics, None
        loop = self.evaluation_loop(self.get_eval_dataloader(eval_dataset), "Evaluation", prediction_loss_only=False)
        self.compute_metrics = compute
        prediction = transformers.EvalPrediction(np.array([[5.0, 0.0]]) + 0.01 * loop.predictions, loop.label_ids)
        metrics = {f"eval_{name}": each for name, each in compute(prediction).items()}
        self.log(metrics)
        return metrics


@pytest.mark.slow
def test_an_evaluate_of_ones_own_is_asked(tmp_path: Path) -> None:
    host = trainer(tmp_path, kind=Questions, eval_strategy="no", num_train_epochs=1)
    host.train()
    before, history = host.evaluate()["eval_likelihood"], list(host.state.log_history)
    run = tuned(host, "likelihood")
    assert run.before == pytest.approx(before, abs=1e-6)
    assert run.before > 0.9
    assert run.guard == "halves"
    assert host.state.log_history == history


@pytest.mark.slow
def test_checkpoints_of_other_weights_are_named(tmp_path: Path) -> None:
    falling = iter([0.9, 0.1])  # the first epoch is the better one
    host = trainer(tmp_path, metric_for_best_model="score", compute_metrics=lambda prediction: {"score": next(falling)})
    host.train()
    host.compute_metrics = likelihood
    first, last = sorted(tmp_path.glob("checkpoint-*"))
    assert_warned(lambda: tuned(host, "likelihood"), first.name, "load_best_model_at_end")
    assert not (first / "untuned").exists()
    assert (last / "untuned").exists()
    (tmp_path / "checkpoint-999").mkdir()
    host.state.best_model_checkpoint = None
    with pytest.warns(UserWarning, match=having("checkpoint-999")):
        assert huggingface._checkpoints_of(host) == []
    assert huggingface._checkpoints_of(trainer(tmp_path / "none")) == []


def in_shards(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a trainer's model saved in several files with an index, as a large one is."""
    whole = host.model.save_pretrained
    monkeypatch.setattr(
        host.model, "save_pretrained", lambda *args, **kwargs: whole(*args, max_shard_size="8KB", **kwargs)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("shards", "shards"), ("shards", "whole"), ("whole", "shards")])
def test_sharded_weights_are_replaced_as_a_whole(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = trainer(tmp_path, num_train_epochs=1)
    with monkeypatch.context() as patched:
        if before == "shards":
            in_shards(host, patched)
        host.train()
    untuned = copy.deepcopy(host.model.state_dict())
    (folder,) = tmp_path.glob("checkpoint-*")
    if after == "shards":
        in_shards(host, monkeypatch)
    assert tuned(host, "likelihood").after > 0
    weights = host.model.state_dict()
    for where, form, expected in ((folder, after, weights), (folder / "untuned", before, untuned)):
        files = [each.name for each in where.glob("model*")]
        assert len(files) > 2 if form == "shards" else files == ["model.safetensors"]
        state = {name: each for file in where.glob("*.safetensors") for name, each in load_file(file).items()}
        assert state.keys() == expected.keys()
        assert all(torch.equal(each, expected[name]) for name, each in state.items())
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(where).state_dict()
        assert all(torch.equal(each, expected[name]) for name, each in loaded.items())
    assert not torch.equal(weights["classifier.bias"], untuned["classifier.bias"])


def test_a_model_in_parts_is_refused(tmp_path: Path) -> None:
    host = trainer(tmp_path)
    next(host.model.parameters()).ds_id = 0  # as DeepSpeed's third stage marks what it has partitioned
    assert_refused(lambda: tuned(host, "likelihood"), AdapterError, "word_embeddings.weight", "plain model")


@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False])
def test_weights_that_are_not_written_are_put_back(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = trainer(tmp_path, num_train_epochs=1)
    host.train()
    (file,) = tmp_path.glob("checkpoint-*/model.safetensors")
    before = file.read_bytes()

    def elsewhere(folder: str) -> None:
        if fails:
            raise OSError("the disk is full")

    monkeypatch.setattr(host, "save_model", elsewhere)
    expected: Any = (
        pytest.raises(OSError, match="the disk is full") if fails else pytest.warns(match="wrote no weights")
    )
    with expected:
        tuned(host, "likelihood")
    assert file.read_bytes() == before


def test_files_can_be_left_alone(tmp_path: Path) -> None:
    host = trainer(tmp_path, num_train_epochs=1)
    host.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert tuned(host, "likelihood", checkpoints=False).after > 0
    assert not list(tmp_path.rglob("untuned"))


def test_the_loss_as_the_metric(tmp_path: Path) -> None:
    host = trainer(tmp_path, compute_metrics=None)
    before = host.evaluate()["eval_loss"]
    run = tuned(host, "eval_loss", eval_dataset=ROWS)
    assert run.before == pytest.approx(before, abs=1e-6)
    assert run.after < run.before
    assert run.guard == "none"


@pytest.mark.parametrize(
    ("options", "maximize"),
    [
        ({}, True),
        ({"metric_for_best_model": "eval_wer", "greater_is_better": False}, False),
        ({"metric_for_best_model": "f1"}, True),
    ],
)
def test_which_way_is_better(options: dict[str, Any], maximize: bool, tmp_path: Path) -> None:
    assert huggingface._maximize(trainer(tmp_path, **options), "wer") is maximize
    assert huggingface._maximize(trainer(tmp_path), "eval_loss") is False


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


def test_what_can_not_be_merged_costs_no_query(tmp_path: Path) -> None:
    counted = Counted()
    host = trainer(tmp_path)
    host.add_callback(counted)
    host.model.scale = host.model.bert.embeddings.LayerNorm.weight
    assert_refused(lambda: tuned(host, "likelihood"), AdapterError, "LayerNorm.weight")
    assert not counted.evaluated


def test_halves_of_what_was_predicted() -> None:
    labels = np.array([0, 0, 1, 1, 1, 1])
    logits = np.arange(12.0).reshape(6, 2)
    pair = transformers.EvalPrediction(predictions=(logits, (logits[:, 0],)), label_ids=labels)
    halves = huggingface._halves_of(pair, 0)
    assert [sorted(labels[half.numpy()]) for half in halves] == [[0, 1, 1], [0, 1, 1]]  # type: ignore[union-attr]
    rows = torch.tensor([1, 4])
    taken = huggingface._rows(pair, rows)
    assert np.array_equal(taken.predictions[0], logits[[1, 4]])
    assert np.array_equal(taken.predictions[1][0], logits[[1, 4], 0])
    assert np.array_equal(taken.label_ids, labels[[1, 4]])
    single = transformers.EvalPrediction(predictions=logits, label_ids=np.arange(6))  # of no class there are two
    assert sorted(torch.cat(huggingface._halves_of(single, 0)).tolist()) == [0, 1, 2, 3, 4, 5]  # type: ignore[arg-type]
    listed = transformers.EvalPrediction(predictions=[logits, logits], label_ids=[labels, labels])
    assert "no arrays" in huggingface._halves_of(listed, 0)
    uneven = transformers.EvalPrediction(predictions=logits[:4], label_ids=labels)
    assert "different numbers of rows" in huggingface._halves_of(uneven, 0)


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
