"""Finetuning of retrieval embeddings for ranking metrics such as Recall@k.

Empty so far: only the package exists.
"""
