"""Finetuning of retrieval embeddings for ranking metrics such as Recall@k.

`recall` computes Recall@k with FAISS and makes a metric of it, `ranking` has precision, MRR, NDCG and mean average
precisions; `accuracy` offers Recall@k to pytorch-metric-learning. `task` turns that library's losses into the surrogate
loss of a task, `hooks` records trajectories of its trainers, and `search` tunes phi with a trainer and a tester. The
other modules belong to `tools/finetune_retrieval.py` and are named as in `classification`.
"""
