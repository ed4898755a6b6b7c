"""What all tests share: offline, single-threaded, no time limits in property tests, end-to-end runs last."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before any test imports torch or transformers, which read them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A busy machine makes any example slow; that is no finding.
settings.register_profile("verl_oppo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("verl_oppo")

E2E = Path(__file__).parent / "e2e"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what lies in tests/e2e and moves it to the end, the order otherwise kept."""
    for item in items:
        if E2E in item.path.parents:
            item.add_marker(pytest.mark.e2e)
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)
