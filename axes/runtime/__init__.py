"""What needs torch and a running job: groups, device meshes, sharded tensors, executing plans."""
