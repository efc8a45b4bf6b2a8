"""Hugging Face's language models, tiny and untrained, from attaching to what `from_pretrained` reads, by defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metricopt_ext as mo

T = pytest.importorskip("transformers")

WORDS, LABELS = 40, 3
COMMON = {"vocab_size": WORDS, "num_labels": LABELS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = COMMON | {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 24,
}
DISENTANGLED = BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 12}
LLAMA = BERT | {"num_key_value_heads": 1}
T5 = COMMON | {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
GPT2 = COMMON | {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
DISTIL = COMMON | {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 24}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertForSequenceClassification", "BertConfig", BERT),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", BERT),
    "DistilBERT": ("DistilBertForSequenceClassification", "DistilBertConfig", DISTIL),
    "MPNet": ("MPNetForSequenceClassification", "MPNetConfig", BERT),
    "DeBERTa": ("DebertaForSequenceClassification", "DebertaConfig", DISENTANGLED),
    "DeBERTa-v2": ("DebertaV2ForSequenceClassification", "DebertaV2Config", DISENTANGLED | {"position_buckets": 6}),
    "GPT-2": ("GPT2ForSequenceClassification", "GPT2Config", GPT2),
    "Llama": ("LlamaForSequenceClassification", "LlamaConfig", LLAMA),
    "Qwen2": ("Qwen2ForSequenceClassification", "Qwen2Config", LLAMA),
    "Gemma": ("GemmaForSequenceClassification", "GemmaConfig", LLAMA | {"head_dim": 8}),
    "T5 encoder": ("T5ForTokenClassification", "T5Config", T5),
    "GPT-2, tied": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"tie_word_embeddings": True}),
}
CHECKPOINTED = ("BERT", "Llama")  # whose gradients are tried with checkpointing too


def model_of(name: str) -> Any:
    kind, config, options = MODELS[name]
    torch.manual_seed(0)
    return getattr(T, kind)(getattr(T, config)(**options)).eval()


def inputs_of(name: str) -> dict[str, Tensor]:
    """Sentences of two lengths, padded, with labels of each sentence or each word."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (24, 7), generator=rng)
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0
    ids = ids * mask
    if "tied" in name:
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}
    each = ids % LABELS if name.startswith("T5") else ids[:, 0] % LABELS
    return {"input_ids": ids, "attention_mask": mask, "labels": each}


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**{name: each for name, each in inputs.items() if name != "labels"}).logits


def searched(adapter: mo.Adapter, inputs: dict[str, Tensor]) -> mo.Result:
    rows = [{name: each[row] for name, each in inputs.items()} for row in range(24)]

    def accuracy(model: nn.Module) -> tuple[float, tuple[float, float]]:
        hits = (logits_of(model, inputs).argmax(-1) == inputs["labels"]).double()
        return float(hits.mean()), (float(hits[::2].mean()), float(hits[1::2].mean()))

    task = mo.FinetuneTask(
        adapter,
        loss=lambda model, batch: model(**batch).loss,
        batches=mo.DatasetBatches(rows, 4),
        metric=mo.Metric(accuracy, maximize=True),
    )
    assert task.at_once == 1
    return mo.optimize_metric(task, queries=10, callback=mo.Callback())


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("name", MODELS)
def test_it_is_attached_searched_merged_and_saved(name: str, tmp_path: Path) -> None:
    model, inputs = model_of(name), inputs_of(name)
    before = logits_of(model, inputs)
    adapter = mo.attach_film(model, dim=3)
    assert all("norm" in layer.lower() or "ln_" in layer for layer in adapter.layers)
    assert torch.equal(logits_of(model, inputs), before)
    result = searched(adapter, inputs)
    assert sum(result.queries.values()) <= 10
    adapter.set_phi(torch.tensor([0.3, -0.2, 0.4]))
    tuned = logits_of(model, inputs)
    assert (tuned - before).abs().max() > 1e-3
    adapter.save(tmp_path / "adapter.safetensors")
    loaded = mo.load_adapter(model_of(name), tmp_path / "adapter.safetensors")
    assert torch.equal(logits_of(loaded.model, inputs), tuned)
    adapter.merge()
    torch.testing.assert_close(logits_of(model, inputs), tuned, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(logits_of(again, inputs), tuned, rtol=1e-4, atol=1e-5)
    if "tied" in name:
        assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing_gives_the_same_search(name: str) -> None:
    inputs, found = inputs_of(name), []
    for checkpointing in (False, True):
        model = model_of(name)
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
            for module in model.modules():  # what a model drops by a function can't be pinned
                for dropped in ("p", "attention_dropout"):
                    if hasattr(module, dropped):
                        setattr(module, dropped, 0.0)
        adapter = mo.attach_film(model, dim=3)
        loss, batch = (lambda model, batch: model(**batch).loss), inputs
        task = mo.FinetuneTask(
            adapter, loss=loss, batches=lambda *place, batch=batch: batch, metric=mo.Metric(lambda: 0.0, maximize=True)
        )
        found.append(task.loss_and_gradient(torch.full((2, 3), 0.1), 0, [0, 1], 0))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_classifier(kind: Callable[..., nn.Module], tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cells = nn.Embedding(20, 8), kind(8, 8, batch_first=True)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.cells(self.embed(x))[0][:, -1]))

    torch.manual_seed(0)
    model, x = Net().eval(), torch.randint(0, 20, (40, 5))
    y = x[:, -1] % 3
    adapter = mo.attach_film(model, dim=3, outputs=mo.Outputs())

    def accuracy(model: nn.Module) -> float:
        return float((model(x).argmax(1) == y).double().mean())

    task = mo.FinetuneTask(
        adapter,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=mo.TensorBatches(x, y, batch_size=8),
        metric=mo.Metric(accuracy, maximize=True),
    )
    assert task.at_once == 1
    result = mo.optimize_metric(task, queries=16, callback=mo.Callback())
    assert result.after == pytest.approx(accuracy(adapter.merge()))
