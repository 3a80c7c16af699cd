"""Pictures: values of the library as text, SVG and HTML, explanations, and the command line.

The top layer: it may look at everything, and nothing needs it.
"""
