"""The ranks that tests share, and the size of the test matrix."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pool import Pool

# The full matrix of families x ranks x lengths x strategies takes long: `make test-all`.
FULL = os.environ.get("AUTOSP_FULL") == "1"


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
