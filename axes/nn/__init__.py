"""Models: sharding modules, computing with them, and what is around them."""
