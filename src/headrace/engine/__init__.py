"""Batches → workers → update: where the stages are wired and training runs."""
