"""Reading directories as trees, and parsing trees of the command line."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.shipping.deliver import DEFAULT_IGNORED, FileTree, TreeRequest, is_ignored, parse_tree, read_tree


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in ("a", ".hidden", ".git/config", "deep/__pycache__/x.pyc", "deep/b.tmp", "deep/c"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "source"


def read(source: Path, *ignored: str) -> FileTree:
    return read_tree(TreeRequest(source, "there"), ignored)


def names(tree: FileTree) -> list[str]:
    return [name for name, _ in tree.files]


def test_everything_except_ignored_files_is_included(source: Path) -> None:
    assert names(read(source, *DEFAULT_IGNORED)) == [".hidden", "a", "deep/b.tmp", "deep/c"]
    assert names(read(source, *DEFAULT_IGNORED, "*.tmp")) == [".hidden", "a", "deep/c"]
    assert ".git/config" in names(read(source))


@pytest.mark.parametrize(
    ("pattern", "name", "is_directory", "fits"),
    [
        ("*.tmp", "a/b.tmp", False, True),
        ("*.tmp", "a.tmp/b", False, False),
        ("build/", "x/build", True, True),
        ("build/", "x/build", False, False),
        ("docs/*.pdf", "docs/a.pdf", False, True),
        ("docs/*.pdf", "x/docs/a.pdf", False, False),
        ("/top", "top", False, True),
        ("data[0-3]", "data2", True, True),
        ("DATA", "data", False, False),
    ],
)
def test_patterns_match_as_in_gitignore(pattern: str, name: str, is_directory: bool, fits: bool) -> None:
    assert is_ignored(name, [pattern], is_directory=is_directory) is fits


@pytest.mark.fault(31)
@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "deep/../../outside", "deep/up/../outside"])
def test_symbolic_link_pointing_outside_is_refused_by_name(source: Path, target: str) -> None:
    (source / "deep" / "up").symlink_to("..")
    (source / "link").symlink_to(target)
    with pytest.raises(InputError, match="source/link points outside the tree") as raised:
        read(source)
    assert "--ignore" in raised.value.remedy
    assert "link" not in names(read(source, "link", "up"))


def test_links_inside_stay_links_and_times_do_not_count(source: Path) -> None:
    before = read(source).files
    os.utime(source / "a", (0, 0))
    assert [stored.name for _, stored in read(source).files] == [stored.name for _, stored in before]
    (source / "deep" / "link").symlink_to("../a")
    (source / "dangling").symlink_to("not-there")
    assert read(source).links == (("dangling", "not-there"), ("deep/link", "../a"))


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        bind,
        os.mkfifo,
        pytest.param(
            lambda path: os.mknod(path, 0o020666, os.makedev(1, 3)), marks=pytest.mark.needs("root")
        ),
    ],
)
def test_special_files_are_refused_by_name(source: Path, make: Callable[[Path], object]) -> None:
    make(source / "special")
    with pytest.raises(InputError, match="source/special is a (socket|pipe|device) and cannot be deployed"):
        read(source)
    assert "a" in names(read(source, "special"))


class TestWrittenTrees:
    def test_destination_is_the_sources_name_or_what_follows_the_last_colon(self, tmp_path: Path) -> None:
        for name in ("tree", "odd:name"):
            (tmp_path / name).mkdir()
        tree, odd = tmp_path / "tree", tmp_path / "odd:name"
        assert parse_tree(str(tree)) == TreeRequest(tree, "tree")
        assert parse_tree(f"{tree}/") == TreeRequest(tree, "tree")
        assert parse_tree(f"{tree}:opt/x/") == TreeRequest(tree, "opt/x")
        assert parse_tree(f"{tree}:~/x") == TreeRequest(tree, "x")
        assert parse_tree(f"{tree}:/srv/x") == TreeRequest(tree, "/srv/x")
        assert parse_tree(f"{odd}:") == TreeRequest(odd, "odd:name")
        assert parse_tree(f"{odd}:x") == TreeRequest(odd, "x")

    @pytest.mark.parametrize(
        "written", ["", ":x", "{}/none", "{}/file", "{}:..", "{}:a/../b", "{}:.", "{}:~", "{}:/"]
    )
    def test_invalid_tree_is_an_error_with_a_remedy(self, tmp_path: Path, written: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match="--tree") as raised:
            parse_tree(written.format(tmp_path))
        assert raised.value.remedy
