"""What every package uses: files, configs, seeds, modules, words."""
