"""Programs that are not installed; run them from a checkout."""
