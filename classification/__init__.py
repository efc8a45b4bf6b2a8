"""Classifiers, tabular or of images, finetuned for classification metrics."""
