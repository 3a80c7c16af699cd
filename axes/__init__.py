"""axes: named-axis sharding for PyTorch, in einops notation."""
