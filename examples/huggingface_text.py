"""Hugging Face's Trainer: text classification in the manner of transformers' run_glue, tuned for its own F1."""

import argparse

import numpy as np
import torch
from sklearn.metrics import f1_score
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from metricopt_ext.integrations.huggingface import tune_trainer  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()
set_seed(0)

# Comments of which few are rude: most of their words are everybody's, some rather of one kind.
WORDS, CLASSES = [f"word{i}" for i in range(200)], ["fine", "unkind", "rude"]
rng = np.random.default_rng(0)


def comment(label: int) -> dict[str, object]:
    telling = rng.random(12) < 0.3
    words = np.where(telling, 20 * label + rng.integers(0, 20, 12), rng.integers(0, 200, 12))
    return {"text": " ".join(WORDS[i] for i in words[: rng.integers(6, 13)]), "label": int(label)}


sizes, shares = {"train": 1200, "validation": 400, "test": 600}, {"train": [0.8, 0.13, 0.07]}
raw = {
    name: [comment(y) for y in rng.choice(3, size, p=shares.get(name, [0.5, 0.3, 0.2]))] for name, size in sizes.items()
}
vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
sets = {
    name: [{**tokenizer(row["text"], truncation=True, max_length=32), "label": row["label"]} for row in rows]
    for name, rows in raw.items()
}
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
config = BertConfig(vocab_size=len(vocabulary), num_labels=len(CLASSES), max_position_embeddings=32, **sizes)
model = AutoModelForSequenceClassification.from_config(config)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    predicted = prediction.predictions.argmax(axis=1)
    return {"f1": f1_score(prediction.label_ids, predicted, average="macro")}


arguments = TrainingArguments(
    "huggingface_text", num_train_epochs=args.epochs, learning_rate=2e-3, per_device_train_batch_size=32,
    per_device_eval_batch_size=256, eval_strategy="epoch", save_strategy="epoch", save_total_limit=2,
    load_best_model_at_end=True, metric_for_best_model="f1", report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
trainer = Trainer(
    model, arguments, train_dataset=sets["train"], eval_dataset=sets["validation"], processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=compute_metrics,
)  # fmt: skip
trainer.train()
print(f"macro F1 on test, before: {trainer.predict(sets['test']).metrics['test_f1']:.4f}")
print(tune_trainer(trainer, "f1", queries=60))  # +
trainer.save_model()
print(f"macro F1 on test, after: {trainer.predict(sets['test']).metrics['test_f1']:.4f}")
reloaded = AutoModelForSequenceClassification.from_pretrained("huggingface_text").eval()
batch = DataCollatorWithPadding(tokenizer)(sets["test"])
with torch.inference_mode():
    predicted = reloaded(**batch).logits.argmax(1)
print(f"of what was saved: {f1_score(batch['labels'], predicted, average='macro'):.4f}")
