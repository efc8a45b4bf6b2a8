"""What the paper does with a value function: recipes, of which Algorithm 1 is one, and Algorithm S1."""
