"""The protocols that clients speak: requests, and the answers made of a generation's events."""
