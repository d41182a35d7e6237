"""Every kernel of the library is run on poisoned memory."""

import pytest

from kernels.cases import poisoned

__all__ = ["poisoned"]


@pytest.fixture(autouse=True)
def always_poisoned(poisoned: None) -> None: ...
