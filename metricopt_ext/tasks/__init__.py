"""The finetuning task: batches, loss and metric, and the trajectories that finetuning leaves behind."""
