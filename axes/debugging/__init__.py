"""Debugging: checks and traces, listeners of the core that `axes.debug` turns on."""
