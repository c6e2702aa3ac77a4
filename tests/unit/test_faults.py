"""Every fault and every attack on the lists has a test, and every marker has its line on a list."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
import yaml

from docs import generate

TESTS = Path(__file__).parents[1]


def faults() -> set[int]:
    sections: Mapping[str, Mapping[int, object]] = yaml.safe_load((TESTS / "faults.yaml").read_text())
    return {number for faults in sections.values() for number in faults}


def attacks() -> set[int]:
    return {*yaml.safe_load((TESTS / "attacks.yaml").read_text())}


@pytest.mark.parametrize(("marker", "listed"), [("fault", faults), ("attack", attacks)])
def test_lists_and_markers_have_the_same_numbers(marker: str, listed: Callable[[], Collection[int]]) -> None:
    assert set(generate.tests_with(marker)) == listed()
