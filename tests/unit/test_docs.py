"""The documentation is tested: commands, links, examples, keys, exit codes, navigation, pictures.

Pages that `make docs` generates are looked at in memory.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from csdctl.cli.app import COMMANDS as TABLE
from csdctl.cli.app import app
from csdctl.documents import parse_document
from csdctl.errors import ExitCode
from csdctl.fleet.fleet_file import FleetFile
from csdctl.job.model import Job
from csdctl.launch.mpirun import COMMON_OPTIONS
from csdctl.terminal.fleet import COLUMNS
from docs.generate import DOCUMENTS, list_commands
from docs.generate import PAGES as RENDERERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOP_PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
GENERATED = {DOCS / "reference" / name: render() for name, render in RENDERERS.items()}
DOCS_PAGES = sorted(page for page in DOCS.rglob("*.md") if page not in GENERATED)
PAGES = sorted([*DOCS_PAGES, *TOP_PAGES])
NAMES = {str(page.relative_to(DOCS)) for page in [*DOCS_PAGES, *GENERATED]}
COMMANDS = dict(list_commands(app))
LEAVES = [name for name, command in COMMANDS.items() if not getattr(command, "commands", None)]
LOCKS = [*sorted((ROOT / "requirements").glob("*.txt")), ROOT / "csdctl/workflows/provision/node.lock"]

PRIVATE_PATTERNS = {
    "a machine's own path": r"(?<![\w/.])/(?:work|root|tmp|home|Users|workspace)(?:/|\b)",
    "a loopback address with a port": r"127\.0\.0\.1:\d+",
    "a package index": r"pypi\.org|files\.pythonhosted|--(?:extra-)?index-url|--find-links (?!wheels\b)|file://",
    "an e-mail address": r"[\w.+-]+@[\w-]+\.[a-z]{2,}",
}


def display_path(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> Iterator[str]:
    """Return the fenced blocks of `page` that are marked as `language`."""
    return (found[1] for found in re.finditer(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL))


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def text_of(page: Path) -> str:
    return GENERATED.get(page) or page.read_text()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings: lower case, no punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def keys_of(model: type) -> set[str]:
    """Return the names of all keys that a file of `model` may have, at any depth."""
    schema = TypeAdapter(model).json_schema()
    parts = (schema, *schema.get("$defs", {}).values())
    return {name for part in parts for name in part.get("properties", {})}


def command_lines() -> list[tuple[str, str]]:
    """Return every `csdctl …` that a page shows, in a block or in backquotes, with the page."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [
            line
            for block in blocks(page, "console")
            for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE)
        ]
        lines += re.findall(r"`([^`\n]+)`", without_blocks(text))
        for line in lines:
            words = line.partition(" #")[0].strip()
            if re.match(r"(?:\S*/)?csdctl\s", words):
                found.append((display_path(page), re.sub(r"^\S*csdctl", "csdctl", words)))
    return found


class TestCommands:
    def test_list_of_commands_is_complete(self) -> None:
        listed = {name for section in TABLE.values() for name in section}
        assert listed == set(COMMANDS["csdctl"].commands)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_and_option_has_help(self, name: str) -> None:
        assert COMMANDS[name].help
        assert [p.name for p in COMMANDS[name].params if not getattr(p, "help", None)] == []

    @pytest.mark.parametrize("name", LEAVES)
    def test_every_command_is_in_a_handwritten_page(self, name: str) -> None:
        group = name.rpartition(" ")[0]
        texts = [page.read_text() for page in PAGES]
        assert any(re.search(rf"\b{name}\b", text) or f"`{group}`" in text for text in texts)

    @pytest.mark.parametrize(("page", "line"), command_lines())
    def test_every_command_and_option_in_a_page_exists(self, page: str, line: str) -> None:
        name = max((name for name in COMMANDS if f"{line} ".startswith(f"{name} ")), key=len)
        rest = line[len(name) :].partition(" -- ")[0].split()  # what follows `--` is for others
        is_complete = not rest or rest[0].startswith("-") or name in LEAVES
        assert is_complete, f"{page} shows `{line}`; known: {', '.join(LEAVES)}"
        options = {word.partition("=")[0] for word in rest if re.match(r"--?[A-Za-z]", word)}
        known = {"--help", "-v", "-vv"}
        for parameter in COMMANDS[name].params:
            known |= {*parameter.opts, *parameter.secondary_opts}
        assert options <= known, f"{page} shows `{line}`"

    def test_every_exit_code_is_listed_with_its_name(self) -> None:
        listed = re.findall(
            r"^\| (\d+) \| ([a-z ]+) \|", (DOCS / "reference/exit-codes.md").read_text(), re.MULTILINE
        )
        assert {(int(code), name.replace(" ", "_").upper()) for code, name in listed} == {
            (code.value, code.name) for code in ExitCode
        }

    @pytest.mark.parametrize("option", COMMON_OPTIONS)
    def test_every_option_of_mpirun_is_explained(self, option: str) -> None:
        assert f"`{option}`" in (DOCS / "reference" / "mpirun.md").read_text()

    def test_page_lists_the_checks_of_doctor(self) -> None:
        page = (DOCS / "how-to" / "examine-a-fleet.md").read_text()
        rows = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
        listed = {check for row in rows for check in re.findall(r"`([^`]+)`", row)}
        assert {check for checks in COLUMNS.values() for check in checks} - listed == set()


class TestFiles:
    @pytest.mark.parametrize("model", [FleetFile, Job])
    def test_every_key_is_described(self, model: type) -> None:
        tables = without_blocks((DOCS / "reference" / "files.md").read_text())
        words = set(re.findall(r"[a-z_][a-z0-9_]*", " ".join(re.findall(r"`([^`\n]+)`", tables))))
        assert keys_of(model) - words == {"args"} & keys_of(model)  # of a loss: written beside its name

    @pytest.mark.parametrize("page", PAGES, ids=display_path)
    def test_every_example_is_valid(self, page: Path) -> None:
        models: dict[str, type] = {"# fleet.yaml": FleetFile, "# job.yaml": Job}
        for block in blocks(page, "yaml"):
            parse_document(block, models[block.splitlines()[0]], name=display_path(page))
        for block in blocks(page, "python"):
            compile(block, display_path(page), "exec")

    def test_every_json_document_is_described(self) -> None:
        files = [path.read_text() for path in (ROOT / "csdctl").rglob("*.py")]
        named = {name for text in files for name in re.findall(r'"(csdctl\.[\w.-]+/\d+)"', text)}
        assert named == {*DOCUMENTS}, "describe them in docs/generate.py"


class TestPages:
    @pytest.mark.parametrize("page", [*PAGES, *GENERATED], ids=display_path)
    def test_internal_links_resolve_and_those_of_the_site_stay_in_it(self, page: Path) -> None:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text_of(page))):
            if re.match(r"https?:", target):
                continue
            file, _, anchor = target.partition("#")
            linked = (page.parent / file).resolve() if file else page
            assert linked in GENERATED or linked.exists(), f"{display_path(page)} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{display_path(page)} links to {target}"
            assert page in TOP_PAGES or linked.is_relative_to(DOCS), f"{display_path(page)} links to {target}"

    def test_every_page_is_in_the_index_and_in_the_navigation_of_the_site(self) -> None:
        index = (DOCS / "README.md").read_text() + text_of(DOCS / "reference" / "decisions.md")
        missing = {page for page in NAMES - {"README.md"} if not re.search(rf"\((\.\./)?{page}\)", index)}
        assert missing == set()
        assert sorted(self.leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == sorted(NAMES)

    @classmethod
    def leaves(cls, tree: Any) -> Iterator[str]:
        """Return the pages of a navigation tree."""
        if isinstance(tree, str):
            yield tree
            return
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from cls.leaves(branch)

    def test_pages_named_in_the_code_exist(self) -> None:
        for file in (ROOT / "csdctl").rglob("*.py"):
            for named in re.findall(r"docs/[\w/-]+(?:\.md)?", file.read_text()):
                matches = list(ROOT.glob(named if named.endswith(".md") else f"{named}*"))
                assert matches, f"{display_path(file)} names {named}"

    @pytest.mark.parametrize("what", PRIVATE_PATTERNS)
    @pytest.mark.parametrize(
        "page",
        [*PAGES, *(ROOT / name for name in ("pyproject.toml", "Makefile", "mkdocs.yml"))],
        ids=display_path,
    )
    def test_page_names_no_machine_or_person(self, page: Path, what: str) -> None:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            assert not re.search(PRIVATE_PATTERNS[what], line), (
                f"{display_path(page)}:{number} has {what}: {line}"
            )

    @pytest.mark.parametrize("picture", sorted(DOCS.rglob("*.svg")), ids=display_path)
    def test_picture_runs_nothing_loads_nothing_and_names_no_machine(self, picture: Path) -> None:
        text = picture.read_text()
        assert not re.search(r"<script|<image|<foreignObject|@import|href=\"(?!#)|url\((?!#)", text)
        assert set(re.findall(r"[> ](/(?:work|root|tmp|home|Users)/[\w.-]+)", text)) <= {"/tmp/csdctl"}

    @pytest.mark.parametrize("lock", LOCKS, ids=display_path)
    def test_locked_requirements_have_hashes_and_no_index(self, lock: Path) -> None:
        text = lock.read_text()
        assert "://" not in text
        assert not re.search(r"^-", text, re.MULTILINE)
        pinned = re.findall(r"^[a-z0-9][\w.-]*==.*?(?=^[a-z0-9]|\Z)", text, re.MULTILINE | re.DOTALL)
        assert pinned
        assert all("--hash=sha256:" in requirement for requirement in pinned)
