"""Finetuning of retrieval embeddings for ranking metrics such as Recall@k.

`recall` computes Recall@k with FAISS and makes a metric of it; `accuracy` offers it to pytorch-metric-learning. `task`
makes that library's losses the surrogate loss of a task, `losses` has two more for it, and `hooks` records trajectories
of its trainers. The other modules are those of `tools/finetune_retrieval.py`, named as in `classification`.
"""
