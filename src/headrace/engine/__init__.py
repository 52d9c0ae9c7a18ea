"""Batches → workers → update: where the stages are wired and training runs."""

from headrace.engine.fit import fit as fit
from headrace.engine.loader import Loader as Loader
from headrace.engine.options import FitOptions as FitOptions
from headrace.engine.run import Run as Run
