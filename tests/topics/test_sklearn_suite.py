"""scikit-learn's own tests of its class, run against ours.

The file is imported from the installed scikit-learn and its names are bound to our class. Differences: none
of its tests is left out but `test_dirichlet_expectation`, which tests scikit-learn's compiled helper and not
the class. Our warning about more topics than documents is allowed.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import headrace

suite = importlib.import_module("sklearn.decomposition.tests.test_online_lda")
LEFT_OUT = {"test_dirichlet_expectation"}

pytestmark = [
    pytest.mark.filterwarnings("ignore::headrace.topics.options.TopicWarning"),
]


@pytest.fixture(autouse=True)
def our_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LatentDirichletAllocation", headrace.LatentDirichletAllocation)


@pytest.fixture(params=[np.float32, np.float64])
def global_dtype(request: pytest.FixtureRequest) -> Any:
    """scikit-learn's own fixture, which its plugin defines."""
    return request.param


@pytest.fixture
def global_random_seed() -> int:
    return 42


for _name, _test in vars(suite).copy().items():
    if _name.startswith("test_") and _name not in LEFT_OUT:
        globals()[_name] = _test
