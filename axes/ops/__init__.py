"""Operations on sharded tensors, by name."""
