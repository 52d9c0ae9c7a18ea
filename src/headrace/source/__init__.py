"""Where examples live: ``open_source`` makes a source of columns from whatever the user has."""

from headrace.source.arrays import ArraySource
from headrace.source.check import check_finite
from headrace.source.datasets import DatasetSource
from headrace.source.opening import open_source
from headrace.source.options import OpenOptions

__all__ = ["ArraySource", "DatasetSource", "OpenOptions", "check_finite", "open_source"]
