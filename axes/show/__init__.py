"""Show: what the library knows, as pictures. The top layer: it may look at anything, nothing needs it."""
