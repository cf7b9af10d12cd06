"""Models: loading, running passes over caches, CUDA graphs, and the scheduler that batches passes."""
