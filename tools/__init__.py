"""The subcommands of `metricopt`, a file each; each runs as a script too, `python tools/<name>.py`."""
