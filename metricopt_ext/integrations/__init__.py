"""The search as a part of other packages: each module needs its host, and nothing of the core imports it."""
