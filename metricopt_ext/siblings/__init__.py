"""The sibling methods: other systems that learn what to train for from a black-box metric, under one protocol."""
