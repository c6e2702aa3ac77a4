"""The architecture page against the code: pictures, rooms, and walks."""

import ast
import importlib.util
import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
MAX_HOPS = 15
HOP = re.compile(r"^(\d+)\. `([\w/]+\.py):([\w.]+)`( \(.+\))?$", re.MULTILINE)


def load_draw() -> ModuleType:
    path = ROOT / "docs" / "pictures" / "draw.py"
    specification = importlib.util.spec_from_file_location("draw", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


draw = load_draw()
WALKS = {
    section.splitlines()[0]: HOP.findall(section)
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
}


def names_defined_in(path: Path) -> set[str]:
    """Functions by name, methods as Class.method."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef))
    return found


def test_picture_of_the_rooms_matches_the_imports() -> None:
    drawn = (ROOT / "docs" / "pictures" / "rooms.svg").read_text()
    assert drawn == draw.render_rooms(), "run `python docs/pictures/draw.py`"


def test_picture_of_a_step_matches_the_code() -> None:
    drawn = (ROOT / "docs" / "pictures" / "step.svg").read_text()
    assert drawn == draw.render_step(), "run `python docs/pictures/draw.py`"
    for place, *_ in draw.STEP:
        file, _, name = place.partition(":")
        assert name in names_defined_in(ROOT / "csdctl" / "worker" / file), place


def test_step_calls_these_functions_in_this_order() -> None:
    source = (ROOT / "csdctl" / "worker" / "tasks" / "train.py").read_text()
    step = source[source.index("def _run_step") : source.index("def _exchange_reassigned")]
    several_ranks = step.partition("if communicator.size == 1:")[0] + step.partition("vector, layout")[2]
    places = [several_ranks.index(call) for _, call, _ in draw.STEP if call]
    assert places == sorted(places)


def test_every_room_is_described() -> None:
    table = PAGE.partition("## Rooms")[2].partition("## Where")[0]
    described = {
        room
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for room in re.findall(r"`([\w.]+)`", row)
    }
    rooms = {room for room in draw.read_imports() if not room.endswith("__main__")}
    packages = {room for room in rooms if (ROOT / "csdctl" / room.replace(".", "/")).is_dir()}
    assert packages <= described, "a room without a line on the page"
    assert {room for room in described if room != "worker"} <= packages, "a line about a room that is gone"


def test_files_of_the_page_exist() -> None:
    table = PAGE.partition("## Where a change goes")[2].partition("## Data")[0]
    for path in re.findall(r"`((?:csdctl|cli|worker|fleet|probes|reporting|tests)/[\w/.]*)`", table):
        assert (ROOT / path).exists() or (ROOT / "csdctl" / path).exists(), path


def test_there_are_five_walks() -> None:
    assert len(WALKS) == 5


@pytest.mark.parametrize("walk", WALKS)
class TestWalks:
    """A walk is a numbered list of file:function."""

    def test_hops_are_numbered_and_few(self, walk: str) -> None:
        assert [int(number) for number, *_ in WALKS[walk]] == list(range(1, len(WALKS[walk]) + 1))
        assert 2 <= len(WALKS[walk]) <= MAX_HOPS

    def test_functions_exist(self, walk: str) -> None:
        for _, file, name, _ in WALKS[walk]:
            assert name in names_defined_in(ROOT / "csdctl" / file), f"{file}:{name}"

    def test_no_room_is_visited_twice(self, walk: str) -> None:
        rooms: list[str] = []
        for _, file, *_ in WALKS[walk]:
            room = draw.room_of("csdctl." + file.removesuffix(".py").replace("/", "."))
            if not rooms or rooms[-1] != room:
                rooms.append(room)
        assert len(rooms) == len(set(rooms)), rooms

    def test_each_function_is_named_in_the_file_before(self, walk: str) -> None:
        """Unless the page says how else the walk gets there."""
        for (_, file, *_), (_, _, name, how) in pairwise(WALKS[walk]):
            last = name.rpartition(".")[2]
            assert how or last in (ROOT / "csdctl" / file).read_text(), f"{file} does not name {name}"
