"""A short round of fuzzing with a fixed seed, and whether the harness finds faults that were put there."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csdctl.errors import InputError
from tests.fuzz import documents, messages, ssh, worker_files
from tests.fuzz.harness import bounded_memory, fuzz, try_input
from tests.fuzz.target import CORPUS, Form, Target

pytestmark = pytest.mark.filterwarnings("ignore")  # numpy warns of headers that Python 2 wrote
ALL = (*documents.TARGETS, *messages.TARGETS, *ssh.TARGETS, *worker_files.TARGETS)
TARGETS = {target.name: target for target in ALL}
SEED = int(os.environ.get("FUZZ_SEED", "1"))
NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "60"))
DEFECTS = Path("build/fuzz")
DOCUMENTS = sorted(name for name, target in TARGETS.items() if target.form in (Form.YAML, Form.JSON))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=8,
)
MAX_CORPUS_BYTES = 1 << 15
"""Limit for the corpus of one target; larger inputs are made by a program."""


def save(name: str, content: bytes) -> Path:
    """Write the input of a defect; return its path."""
    path = DEFECTS / name / hashlib.sha256(content).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_changed_inputs_are_accepted_or_refused_as_documented(name: str) -> None:
    defects = fuzz(TARGETS[name], SEED, NUM_INPUTS)
    assert not defects, "\n".join(
        f"{save(name, content)}: {content[:300]!r}\n{defect}" for content, defect in defects.values()
    )


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


def turn(content: bytes, directory: Path) -> None:
    """Never end."""
    while True:
        pass


def refuse_at_length(content: bytes, directory: Path) -> None:
    """Refuse with a message that nobody reads."""
    raise InputError("x" * 30_000)


def test_planted_fault_is_found_from_a_seed_and_in_the_same_way_again() -> None:
    defects = fuzz(a_target(look_up), 1, 60)
    assert any(place.startswith("KeyError") for place in defects), defects
    assert fuzz(a_target(look_up), 1, 60) == defects != fuzz(a_target(look_up), 2, 60)


def test_memory_time_and_message_beyond_their_limits_are_defects(tmp_path: Path) -> None:
    with bounded_memory():
        large = try_input(a_target(lambda content, directory: bytearray(1 << 30).clear()), b"", tmp_path)
    assert large.place.startswith("MemoryError")
    assert len(bytearray(1 << 28)) == 1 << 28, "the limit is gone afterwards"
    endless = try_input(a_target(turn), b"", tmp_path, endless_cpu_s=0.05)
    assert endless.place.startswith("EndlessError")
    slow = try_input(a_target(lambda content, directory: None), b"", tmp_path, max_cpu_s=0.0)
    assert slow.defect.startswith("took")
    assert "30,000 characters" in try_input(a_target(refuse_at_length), b"", tmp_path).defect
