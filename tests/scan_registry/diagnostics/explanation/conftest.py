"""What tests of ``explain`` are given."""

from __future__ import annotations

import pytest
from explaining import Describe, Factory

from scan_registry.dispatch.select import System


@pytest.fixture
def hopper(archive_factory: Factory, a_device: Describe) -> System:
    """A 9.0 with all CUDA variants as machine code and as PTX, and no compiler."""
    return System(a_device(), (archive_factory("ptx80"), archive_factory("sm90")))
