"""What every package uses: files, seeds, configs, progress, processes."""
