"""`axes.launch`: a function on local ranks. The core imports nothing of this folder, which takes public names alone."""
