"""Layouts, expressions, meshes, shardings and plans: what needs no torch, no process and no device."""
