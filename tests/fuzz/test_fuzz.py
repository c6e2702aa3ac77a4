"""A short round of fuzzing with a fixed seed, and whether the harness finds faults that were put there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csdctl.errors import InputError
from tests.fuzz.harness import Limits, Tally, bounded_memory, fuzz, save_defects, try_input
from tests.fuzz.mutation import Mutator
from tests.fuzz.target import CORPUS, Form, Target
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore")  # numpy warns of headers that Python 2 wrote
SEED, NUM_INPUTS = 1, 60
DOCUMENTS = sorted(name for name, target in TARGETS.items() if target.form in (Form.YAML, Form.JSON))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=8,
)
MAX_CORPUS_BYTES = 1 << 15
"""Limit for the corpus of one target; larger inputs are made by a program."""


def defects_of(tally: Tally) -> str:
    """Return every defect with its input, as a message of a failed test shows them."""
    return "\n".join(f"{content[:300]!r}\n{defect}" for content, defect in tally.defects.values())


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_changed_inputs_are_accepted_or_refused_as_documented(name: str) -> None:
    tally = fuzz(TARGETS[name], SEED, NUM_INPUTS)
    assert not tally.defects, defects_of(tally)
    assert tally.num_tried > NUM_INPUTS


@given(st.sampled_from(DOCUMENTS), VALUES)
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_value_in_place_of_a_document_is_refused_or_taken(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: object
) -> None:
    content = json.dumps(value).encode()
    outcome = try_input(TARGETS[name], content, tmp_path_factory.mktemp(name))
    assert not outcome.defect, outcome.defect


def test_corpus_is_small_and_belongs_to_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)
    for directory in CORPUS.iterdir():
        assert sum(path.stat().st_size for path in directory.iterdir()) <= MAX_CORPUS_BYTES, directory.name


def a_target(take: Callable[[bytes, Path], None]) -> Target:
    return Target("planted", Form.JSON, take, (InputError,), lambda: [b'{"name": "csd0", "size": 7}'])


def look_up(content: bytes, directory: Path) -> None:
    """Refuse what is no JSON object; a missing key is a planted fault."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise InputError("not JSON") from None
    if not isinstance(found, dict):
        raise InputError("not an object")
    str(found["size"])


def test_planted_fault_is_found_and_its_input_written(tmp_path: Path) -> None:
    tally = fuzz(a_target(look_up), SEED, NUM_INPUTS)
    assert any(place.startswith("KeyError") for place in tally.defects), tally
    assert 0 < tally.num_accepted < tally.num_tried
    for path in save_defects({"planted": tally}, tmp_path):
        assert "KeyError" in path.with_suffix(".txt").read_text()


def test_same_seed_makes_the_same_inputs() -> None:
    def inputs(seed: int) -> list[bytes]:
        mutator = Mutator(Form.YAML, (), seed)
        return [mutator.next([b"a: [1, 2]\n"]) for _ in range(50)]

    assert inputs(1) == inputs(1) != inputs(2)


def test_memory_beyond_the_limit_is_a_defect(tmp_path: Path) -> None:
    with bounded_memory():
        outcome = try_input(a_target(lambda content, directory: bytearray(1 << 30).clear()), b"", tmp_path)
    assert outcome.place.startswith("MemoryError")
    assert len(bytearray(1 << 28)) == 1 << 28, "the limit is gone afterwards"


def test_time_or_message_beyond_the_limit_is_a_defect(tmp_path: Path) -> None:
    def turn(content: bytes, directory: Path) -> None:
        while True:
            pass

    outcome = try_input(a_target(turn), b"", tmp_path, Limits(endless_cpu_s=0.05))
    assert outcome.place.startswith("EndlessError")
    slow = try_input(a_target(lambda content, directory: None), b"", tmp_path, Limits(cpu_s=0.0))
    assert slow.defect.startswith("took")

    def refuse(content: bytes, directory: Path) -> None:
        raise InputError("x" * 30_000)

    assert "30,000 characters" in try_input(a_target(refuse), b"", tmp_path).defect
