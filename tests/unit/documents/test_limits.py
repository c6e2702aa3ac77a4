"""Documents from strangers: what is refused, and that it costs little to refuse it."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, with_config

from csdctl import documents
from csdctl.documents import MAX_DEPTH, MAX_SCALAR, MAX_SIZE, check_values, load_text, parse_document
from csdctl.errors import InputError


class Open(documents.Document):
    """A document with a part of any shape."""

    seed: int = 0
    rate: float = 0.0
    args: dict[str, Any] = {}


@dataclass(frozen=True)
class Data:
    path: str
    on: str = "host"


@dataclass(frozen=True)
class Entry:
    name: str
    port: Annotated[int, Field(ge=1)] = 22


@with_config(documents.STRICT)
@dataclass(frozen=True)
class Settings:
    model: str = ""
    rate: float = 0.1
    public: Data | None = None
    nodes: tuple[Entry, ...] = ()
    flags: dict[str, bool] = field(default_factory=dict)


class Counted(documents.Document):
    counts: list[int] = Field(default=[])


def parse(text: str) -> Open:
    return parse_document(text, Open, name="job.yaml")


def refused(text: str, expected: type[object] = Open) -> str:
    with pytest.raises(InputError) as raised:
        parse_document(text, expected, name="job.yaml")
    return raised.value.message


def bomb(levels: int, first: str = "[x, x, x]") -> str:
    """Aliases of aliases, nine times as large with every level."""
    lines = [f"  a0: &a0 {first}"]
    lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "args:\n" + "\n".join(lines)


class TestLimits:
    @pytest.mark.parametrize(
        "text",
        [
            bomb(10),
            f"args:\n  a: &a {'x' * MAX_SCALAR}\n  b: [{', '.join(['*a'] * (MAX_SIZE // MAX_SCALAR))}]",
            "args: {a: [" + "0," * (MAX_SIZE // documents.VALUE_SIZE) + "]}",
        ],
    )
    def test_size_is_bounded_with_aliases_expanded(self, text: str) -> None:
        assert len(parse(bomb(4)).args["a3"]) == 9
        assert f"expanded, its values have more than {MAX_SIZE:,} characters" in refused(text)

    def test_depth_is_bounded(self) -> None:
        levels = MAX_DEPTH - 1  # besides the document and `args`
        assert parse("args: {a: " + "[" * (levels - 1) + "]" * (levels - 1) + "}")
        assert f"expected at most {MAX_DEPTH}" in refused("args: {a: " + "[" * levels + "]" * levels + "}")
        assert f"expected at most {MAX_DEPTH}" in refused("- " * 5000)

    def test_only_the_first_problems_are_reported(self) -> None:
        lines = refused("".join(f"k{n}: 1\n" for n in range(1000))).splitlines()
        assert len(lines) == documents.MAX_PROBLEMS + 1
        assert lines[-1] == f"job.yaml: and {1000 - documents.MAX_PROBLEMS} more problems"

    def test_file_is_not_read_beyond_the_limit(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"#" * documents.MAX_TEXT_BYTES)
        assert len(load_text(tmp_path / "a")) == documents.MAX_TEXT_BYTES
        with (tmp_path / "a").open("ab") as file:
            file.truncate(1 << 40)
        with pytest.raises(InputError, match="has more than 2,097,152 bytes"):
            load_text(tmp_path / "a")


class TestFilesThatAreNone:
    @pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/tty", "/proc/self"])
    def test_device_or_directory_is_refused(self, tmp_path: Path, device: str) -> None:
        (tmp_path / "job.yaml").symlink_to(device)
        with pytest.raises(InputError, match="cannot read .*job.yaml"):
            load_text(tmp_path / "job.yaml")

    def test_named_pipe_is_refused_without_waiting_for_its_writer(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "job.yaml")
        with pytest.raises(InputError, match="not a regular file"):
            load_text(tmp_path / "job.yaml")

    def test_output_of_a_command_is_read(self) -> None:
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as file:
            file.write("seed: 1")
        assert load_text(Path(f"/dev/fd/{reader}")) == "seed: 1"
        os.close(reader)


class TestValues:
    """The values of JSON; everything else of YAML is text or refused."""

    @pytest.mark.parametrize(
        "written", ["1:30", "1:2:3", "010", "0x10", "0b1", "1_000", "2026-01-02", "yes", "on", "=", "1e3"]
    )
    def test_what_yaml_1_1_would_convert_is_text(self, written: str) -> None:
        assert parse(f"args: {{a: {written}}}").args == {"a": written}

    @pytest.mark.parametrize(("written", "value"), [("-5", -5), ("1.5e-3", 0.0015), (".5", 0.5), ("~", None)])
    def test_numbers_and_null(self, written: str, value: object) -> None:
        assert parse(f"args: {{a: {written}, b: !!str {written}}}").args == {"a": value, "b": written}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("args: {b: &a [[{c: *a}]]}", "alias `*a` is part of what it stands for"),
            (f"args: {{a: {'x' * (MAX_SCALAR + 1)}}}", "expected at most 4,096"),
            (f"? {'x' * (MAX_SCALAR + 1)}\n: 1", "expected at most 4,096"),
            *((f"rate: {number}", "must be a finite number") for number in (".nan", "-.inf", "1.0e+999")),
            ("seed: 1" + "0" * 4000, "a number of 4,001 digits, expected at most 18"),
            *(
                (f"{key}: one\n", "is not text: write it in quotes")
                for key in ("1", "true", "~", "[a]", "? [a]\n")
            ),
            *(
                (f"args: {{a: {tag} {value}}}", "could not determine a constructor for the tag")
                for tag in ("!!python/object/apply:os.system", "!!binary", "!!set", "!own", "!!merge")
                for value in ("x", "[x]", "{x: x}")
            ),
            *((f"args: {{a: {value}}}", "not valid YAML: ") for value in ("!!int many", "!!str [x]")),
            ("args: {<<: {a: 1}}", "merge keys (`<<`) are not supported"),
            ('args: {a: 1, "a": 2}', "duplicate key `a`"),
            *(
                (f'args: {{a: "{escape}]52;c"}}', "is not allowed")
                for escape in (r"\0", r"\e", r"\x9b", r"\uD800", r"\r")
            ),
            *(
                (text, "not valid YAML: ")
                for text in ("a: \0", 'a: "\\UFFFFFFFF"', "a: *b", "%YAML 9.9\n---\na: 1", "a: 1\n---\nb: 1")
            ),
        ],
    )
    def test_what_json_cannot_hold_is_refused(self, text: str, message: str) -> None:
        assert message in refused(text)

    def test_byte_order_mark_is_skipped_and_utf_16_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes("seed: 1".encode("utf-8-sig"))
        assert load_text(tmp_path / "a") == "seed: 1"
        (tmp_path / "a").write_bytes("seed: 1".encode("utf-16"))
        with pytest.raises(InputError, match="byte 0 is not UTF-8"):
            load_text(tmp_path / "a")

    @given(
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**59), 2**59)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=20)
            | st.from_regex(r"[-+]?[0-9]{1,4}[.eE:x_-]?[0-9]{0,4}", fullmatch=True),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(
                    st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=8), inner, max_size=4
                )
            ),
            max_leaves=10,
        )
    )
    def test_what_csdctl_writes_is_read_as_it_was(self, value: Any) -> None:
        if "<<" in json.dumps(value):
            return
        assert parse(yaml.safe_dump({"args": {"a": value}}, sort_keys=False, allow_unicode=True)).args == {
            "a": value
        }


class TestJson:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("[" * 100_000, "nested too deeply"),
            ("[1" + "0" * 5000 + "]", "cannot be read"),
            ('{"a": ', "cannot be read"),
        ],
    )
    def test_damaged_text_is_one_sentence(self, text: str, problem: str) -> None:
        with pytest.raises(InputError) as raised:
            documents.parse_json_document(text, "facts.json")
        assert problem in raised.value.message
        assert raised.value.message.startswith("facts.json ")
        assert "\n" not in raised.value.message

    @pytest.mark.fault(36)
    def test_remedy_is_to_create_it_again(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text('{"a": ')
        with pytest.raises(InputError, match="cannot be read") as raised:
            documents.load_json(tmp_path / "file")
        assert "create it again" in raised.value.remedy
        with pytest.raises(InputError, match="does not exist"):
            documents.load_json(tmp_path / "other")

    def test_wrong_value_is_named(self) -> None:
        assert check_values({"counts": [1]}, Counted, "facts.json") == Counted(counts=[1])
        with pytest.raises(InputError, match=r"facts.json: `counts.1`: .* \(received 'x'\)"):
            check_values({"counts": [1, "x"]}, Counted, "facts.json")
        with pytest.raises(InputError, match="facts.json: unknown key `more`"):
            check_values({"more": 1}, Counted, "facts.json")


class TestRefusedDocuments:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("rate: 1\nmodle: m\n", "job.yaml:2: unknown key `modle`, did you mean `model`?"),
            (
                "model: m\npublic:\n  path: /data\n  pth: /data\n",
                "job.yaml:4: unknown key `public.pth`, did you mean `path`?",
            ),
            (
                "nodes:\n- name: csd0\n- name: csd1\n  prot: 22\n",
                "job.yaml:4: unknown key `nodes.1.prot`, did you mean `port`?",
            ),
            ("colour: red", "job.yaml:1: unknown key `colour`"),
            ("model: m\npublic:\n  on: host\n", "job.yaml:2: key `public.path` is missing"),
            ("model: m\nrate: fast\n", "job.yaml:2: `rate`: must be a number (received 'fast')"),
            (
                "nodes:\n- {name: a, port: 0}",
                "job.yaml:2: `nodes.0.port`: must be greater than or equal to 1 (received 0)",
            ),
            ("", "job.yaml: expected keys such as model, rate, public, received an empty file"),
            ("- model: m\n", "job.yaml: expected keys such as model, rate, public, received a list"),
            ("public: 7", "job.yaml:1: `public`: must have keys such as path, on (received 7)"),
            ("rate: .inf", "job.yaml:1: `rate`: must be a finite number (received inf)"),
        ],
    )
    def test_problem_is_reported_with_its_line(self, text: str, message: str) -> None:
        assert refused(text, Settings) == message

    def test_all_problems_are_reported_at_once(self) -> None:
        lines = refused("modle: m\nrate: fast\npublic: {}\n", Settings).splitlines()
        assert sorted(line.split(": ")[0] for line in lines) == ["job.yaml:1", "job.yaml:2", "job.yaml:3"]

    @pytest.mark.parametrize(
        ("text", "line"),
        [("model: m\nrate: [1\n", 3), ("model: m\n\trate: 1\n", 2), ("a: 1\n---\nb: 2\n", 2)],
    )
    def test_invalid_yaml_is_reported_with_its_line(self, text: str, line: int) -> None:
        assert refused(text, Settings).startswith(f"job.yaml:{line}: not valid YAML: ")
