"""The licences of what csdctl installs: the page, the rule, and metadata as packages write it."""

import re
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from requirements import licences

ROOT = Path(__file__).parents[3]
APPROVED = "Classifier: License :: OSI Approved"


def make_package(directory: Path, name: str, *fields: str) -> Distribution:
    """Write the metadata of an installed package."""
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", *fields])
    )
    return Distribution.at(info)


def locked_on_linux(file: str) -> set[str]:
    """Return the packages of a lock file that some platform of csdctl's installs."""
    lines = re.findall(r"^([a-z0-9][^\\\n]*)", (ROOT / "requirements" / file).read_text(), re.MULTILINE)
    pinned = [Requirement(line) for line in lines]
    return {
        one.name
        for one in pinned
        if not one.marker or any(one.marker.evaluate({**platform}) for platform in licences.PLATFORMS)
    }


class TestPage:
    def test_page_matches_the_installed_packages(self) -> None:
        page = (ROOT / "docs" / "reference" / "licences.md").read_text()
        assert page == licences.render_page(*licences.list_licences()), (
            "docs/reference/licences.md does not match what is installed. If that is intended, accept it:\n"
            "    .venv/bin/python requirements/licences.py > docs/reference/licences.md"
        )

    def test_every_licence_is_known_and_allowed(self) -> None:
        assert licences.find_problems(licences.list_licences()[0]) == []

    def test_page_lists_all_locked_packages_and_those_of_the_extras(self) -> None:
        listed, installed_with = licences.list_licences()
        assert {name for name in listed if installed_with[name] == ["csdctl"]} == locked_on_linux(
            "runtime.txt"
        )
        assert set(listed) <= locked_on_linux("dev.txt")
        assert {extra for extras in installed_with.values() for extra in extras} == set(
            licences.list_requirements()
        )

    def test_exceptions_are_all_needed(self) -> None:
        """A package that is no longer installed, or that names its licence by now, is no exception."""
        listed = licences.list_licences()[0]
        assert set(licences.COPYLEFT) <= set(listed)
        for name, stated in licences.READ_IN_THE_TEXT:
            package = licences.find_distribution(name)
            assert package is not None
            assert licences.read_statement(package) == stated


class TestMetadata:
    @pytest.mark.parametrize(
        ("fields", "licence"),
        [
            (["License-Expression: mit OR apache-2.0"], "MIT OR Apache-2.0"),
            (["License: MIT", "Classifier: License :: OSI Approved :: BSD License"], "MIT"),
            (["License: Apache 2.0"], "Apache-2.0"),
            ([f"{APPROVED} :: MIT License"], "MIT"),
            ([], ""),
            (["License: BSD"], ""),  # which one?
            # Both, or either?
            ([f"{APPROVED} :: MIT License", f"{APPROVED} :: Apache Software License"], ""),
        ],
    )
    def test_licence_is_an_expression_or_unknown(
        self, tmp_path: Path, fields: list[str], licence: str
    ) -> None:
        assert licences.read_licence("new", make_package(tmp_path, "new", *fields)) == licence


class TestRule:
    @pytest.mark.parametrize(
        ("name", "licence", "is_allowed"),
        [
            ("new", "MIT", True),
            ("new", "BSD-3-Clause AND Zlib", True),
            ("new", "GPL-3.0-only OR MIT", True),
            ("paramiko", "LGPL-2.1", True),
            ("asyncssh", "EPL-2.0 OR GPL-2.0-or-later", True),
            ("new", "GPL-3.0-only", False),
            ("new", "LGPL-2.1", False),  # allowed for paramiko, not for others
            ("new", "(GPL-3.0-only OR MIT) AND AGPL-3.0-only", False),
            ("paramiko", "GPL-3.0-only", False),
            ("new", "", False),
        ],
    )
    def test_permissive_alternative_is_allowed(self, name: str, licence: str, is_allowed: bool) -> None:
        assert licences.is_allowed(name, licence) is is_allowed
