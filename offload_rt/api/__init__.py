"""The Python API: `LLM`, contexts, batches and saved sessions."""
