"""A pytest plugin for the nbval run: a cell that writes a warning to stderr fails, and all cells are marked `alone`.

nbval itself throws the kernel's stderr away. A cell tagged `explains-warning` may warn; progress bars are no warnings.
Lessons measure, as do the tests marked so: one run of pytest takes both, with nothing beside it.
"""

from collections.abc import Generator
from typing import Any

import pytest

from tools.course import EXPLAINED_TAG, stderr_lines


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every cell, before pytest selects by mark."""
    for item in items:
        if hasattr(item, "cell"):
            item.add_marker("alone")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the cell, then look at what it wrote to stderr."""
    outcome = yield
    cell: Any = getattr(item, "cell", None)
    if cell is not None and EXPLAINED_TAG not in cell.metadata.get("tags", []):
        outputs: Any = getattr(item, "test_outputs", None) or ()
        text = "".join(output["text"] for output in outputs if output.get("name") == "stderr")
        if lines := stderr_lines(text):
            told = "\n".join(lines[:20])
            pytest.fail(f"The cell wrote to stderr. Mend it, or explain it and tag it {EXPLAINED_TAG}:\n{told}", False)
    return outcome
