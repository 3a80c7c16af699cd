"""Transfers: many tensors at once, between any layouts, names, ranks and jobs. The core imports none of it."""
