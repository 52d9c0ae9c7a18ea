"""Disk → pinned host memory → device: which rows make up a buffer, and how buffers are filled."""

from headrace.buffer.passes import PassShape, pass_ranges, row_numbers

__all__ = ["PassShape", "pass_ranges", "row_numbers"]
