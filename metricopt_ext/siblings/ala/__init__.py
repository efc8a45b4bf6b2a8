"""Adaptive Loss Alignment (Huang et al., 2019): a controller that changes a loss's parameters while models train."""
