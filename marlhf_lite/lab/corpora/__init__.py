"""The makers of the embedded data."""
