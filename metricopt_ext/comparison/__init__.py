"""Comparisons: methods at several budgets over seeds, their files, claims and report."""
