"""Examples in memory: images, labels, splits, their shift, and the training of a model on them."""
