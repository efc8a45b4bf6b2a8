"""Experiments: one seed of a task's tool, its config, methods, record, report and command line."""
