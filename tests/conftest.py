"""Shared by all tests: marked tests are skipped where their device is missing."""

from __future__ import annotations

import signal

import pytest

# A shell that starts a job in the background makes it deaf to Ctrl-C; the tests of Ctrl-C, and the processes that
# they start, need Python's own handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
