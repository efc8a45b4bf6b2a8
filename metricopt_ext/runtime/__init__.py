"""A run's life: whose its folder is, its progress and log, its processes, and how it ends."""
