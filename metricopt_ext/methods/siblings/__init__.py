"""The systems beside MetricOpt: each gives back a typed result for a task, a number of queries and a seed."""
