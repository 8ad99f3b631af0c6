"""Training: the loop, what a worker does, and how Ray starts workers."""
