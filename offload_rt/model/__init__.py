"""Models: loading, running passes over caches, and CUDA graphs."""
