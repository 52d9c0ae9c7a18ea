"""Batches → workers → update: where the stages are wired and training runs."""

from headrace.engine.loader import Loader

__all__ = ["Loader"]
