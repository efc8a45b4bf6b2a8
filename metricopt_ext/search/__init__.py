"""How phi moves: under a value function, or on the metric itself (paper, section 3.2)."""
