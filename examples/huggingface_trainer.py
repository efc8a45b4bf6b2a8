"""Hugging Face's Trainer: a ViT, tuned for the F1 that its own compute_metrics reports."""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import metricopt_ext as mo  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
parser.add_argument("--queries", type=int, default=60)  # +
args = parser.parse_args()
torch.manual_seed(0)
digits, rows = load_digits(), np.random.default_rng(0).permutation(1797)
images, labels = torch.tensor(digits.images[rows] / 16).float()[:, None], digits.target[rows]
tail = np.flatnonzero(np.random.default_rng(1).random(800) < 0.7 ** labels[:800])  # few nines, many zeros
parts = (tail, range(800, 1300), range(1300, 1797))
train, val, test = ([{"pixel_values": images[i], "labels": labels[i]} for i in part] for part in parts)


def compute_metrics(output: EvalPrediction) -> dict[str, float]:
    predicted, true = output.predictions.argmax(1), output.label_ids
    parts = {"f1": slice(None), "f1_even": slice(0, None, 2), "f1_odd": slice(1, None, 2)}  # +
    return {name: f1_score(true[part], predicted[part], average="macro") for name, part in parts.items()}  # +


config = ViTConfig(
    hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, image_size=8, patch_size=2,
    num_channels=1, num_labels=10,
)  # fmt: skip
arguments = TrainingArguments(
    "huggingface", num_train_epochs=args.epochs, learning_rate=2e-3, per_device_train_batch_size=64,
    per_device_eval_batch_size=512, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no",
    disable_tqdm=True, seed=0,
)  # fmt: skip
model = ViTForImageClassification(config)
trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=val, compute_metrics=compute_metrics)
trainer.train()
print(f"macro F1 on test, before: {trainer.predict(test).metrics['test_f1']:.4f}")


def validate() -> tuple[float, list[float]]:  # +
    metrics = trainer.predict(val).metrics  # +
    return metrics["test_f1"], [metrics["test_f1_even"], metrics["test_f1_odd"]]  # +


task = mo.FinetuneTask(  # +
    adapter := mo.attach_film(model, dim=32, outputs=mo.Outputs()),  # +
    loss=lambda model, batch: model(**batch).loss,  # +
    batches=mo.DatasetBatches(train, 64, collate=trainer.data_collator),  # +
    metric=mo.Metric(validate, maximize=True),  # +
)  # +
print(mo.optimize_metric(task, queries=args.queries))  # +
adapter.merge()  # +
print(f"macro F1 on test, after: {trainer.predict(test).metrics['test_f1']:.4f}")
trainer.save_model("huggingface")
