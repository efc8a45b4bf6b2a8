"""What is finetuned for what: batches, loss, metric, and the trajectories that finetuning leaves."""
