"""What all tests share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def one_kernel() -> Iterator[None]:
    """Hold back other workers' kernels: each picks five free ports and opens them later, and two may pick the same."""
    fcntl = pytest.importorskip("fcntl", reason="only POSIX has file locks of this kind")
    with (Path(tempfile.gettempdir()) / "course-tests-kernel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
