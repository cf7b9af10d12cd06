"""Configurations: their schema, and how they are read and written."""
