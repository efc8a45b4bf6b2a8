"""Evidence: methods side by side on the same data, as tables, plots and files."""
