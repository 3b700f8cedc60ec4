"""The ranks that tests share, and the size of the test matrix."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from pool import Pool

# The full matrix of families x ranks x lengths x strategies takes long: `make test-all`.
FULL = os.environ.get("AUTOSP_FULL") == "1"
# The same examples each time, so that a change is judged by what it changes; `make test-all` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)
settings.load_profile("new" if FULL else "same")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
