"""Programs of the project that are not installed; run them from a checkout."""
