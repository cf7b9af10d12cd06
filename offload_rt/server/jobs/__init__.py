"""The thread that owns the `LLM`: its queue of jobs, the prefixes that it keeps, and counters."""
