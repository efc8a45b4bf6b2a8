"""Relational Surrogate Loss Learning (Huang et al., 2022): a loss that ranks batches as the metric does."""
