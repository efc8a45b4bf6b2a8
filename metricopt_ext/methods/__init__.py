"""Whole methods: from a task and a number of queries to a tuned phi."""
