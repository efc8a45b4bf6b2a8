"""A language model that is judged by what it writes: sums, all of whose digits must be right."""

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import metricopt_ext as mo  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--queries", type=int, default=80)  # +
args = parser.parse_args()
set_seed(0)
LETTERS = "_$0123456789+="  # padding, the end, and what sums are written in
pairs = [divmod(i, 100) for i in torch.randperm(10_000).tolist()]
prompts, answers = [f"{a}+{b}=" for a, b in pairs], [f"{str(a + b)[::-1]}$" for a, b in pairs]  # ones first
train, val, test = range(4000), range(4000, 4400), range(5000, 7000)


def encoded(texts, side):
    return pad_sequence([torch.tensor([LETTERS.index(c) for c in text]) for text in texts], True, 0, side)


def exact(model, part):  # whether all that is written is right, for each sum
    set_seed(0)  # where do_sample=True draws: it then meets the same draws each time
    written = []
    for ids in encoded([prompts[i] for i in part], "left").split(200):
        rows = model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=4, do_sample=False)
        written += ["".join(LETTERS[i] for i in row if i) for row in rows[:, ids.shape[1] :].tolist()]
    return torch.tensor([each == answers[i] for each, i in zip(written, part, strict=True)]).double()


def exact_match(model):  # +
    hits = exact(model, val)  # +
    return float(hits.mean()), (float(hits[::2].mean()), float(hits[1::2].mean()))  # +


ids = encoded([prompts[i] + answers[i] for i in train], "right")
learned = torch.tensor([[len(prompts[i])] for i in train]) <= torch.arange(ids.shape[1])  # the answer alone
labels = ids.where(learned & (ids > 0), -100)
rows = [{"input_ids": i, "attention_mask": (i > 0).long(), "labels": y} for i, y in zip(ids, labels, strict=True)]
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(LETTERS), pad_token_id=0, bos_token_id=None, eos_token_id=1, **sizes)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in torch.utils.data.DataLoader(rows * args.epochs, batch_size=64, shuffle=True):
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()
print(f"exact match on test, before: {exact(model.eval(), test).mean():.4f}")
adapter = mo.attach_film(model, dim=16)  # +
metric = mo.Metric(exact_match, maximize=True)  # +
batches = mo.DatasetBatches(rows, 64)  # +
task = mo.FinetuneTask(adapter, loss=lambda model, batch: model(**batch).loss, batches=batches, metric=metric)  # +
print(mo.optimize_metric(task, queries=args.queries))  # +
adapter.merge()  # +
print(f"exact match on test, after: {exact(model, test).mean():.4f}")
model.save_pretrained("generation")
