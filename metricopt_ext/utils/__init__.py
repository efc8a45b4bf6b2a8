"""What every floor uses and nobody else is named after: files, seeds, configs, progress, processes."""
