"""To be built."""
