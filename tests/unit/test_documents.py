import contextlib
import datetime
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import Field

from csdctl.documents import (
    Document,
    build_aside,
    load_document,
    load_json,
    parse_document,
    save_bytes,
    save_json,
    save_text,
    write_aside,
)
from csdctl.errors import InputError


class Data(Document):
    path: str
    on: str = "host"


class Entry(Document):
    name: str
    port: int = Field(default=22, ge=1)


class Settings(Document):
    model: str = ""
    rate: float = 0.1
    public: Data | None = None
    nodes: list[Entry] = []
    flags: dict[str, bool] = {}


def parse(text: str) -> Settings:
    return parse_document(text, Settings, name="job.yaml")


def refused(text: str) -> str:
    with pytest.raises(InputError) as raised:
        parse(text)
    return raised.value.message


class TestWhatIsRead:
    def test_file_becomes_the_model(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text("model: größe\npublic: {path: /data}\nnodes:\n- {name: csd0}\n")
        settings = load_document(tmp_path / "job.yaml", Settings)
        assert (settings.model, settings.public, settings.nodes) == (
            "größe",
            Data(path="/data"),
            [Entry(name="csd0")],
        )

    @pytest.mark.parametrize("word", ["host", "on", "off", "yes", "no", "y", "trueman", "falsework"])
    def test_words_that_old_yaml_takes_for_booleans_stay_words(self, word: str) -> None:
        settings = parse(f"public:\n  path: {word}\n  on: {word}\n")
        assert settings.public == Data(path=word, on=word)

    def test_true_and_false_are_booleans(self) -> None:
        assert parse("flags: {a: true, b: False, c: TRUE}").flags == {"a": True, "b": False, "c": True}

    def test_json_is_yaml(self) -> None:
        assert parse(json.dumps({"model": "m", "rate": 1e-3})).rate == 1e-3


class TestWhatIsRefused:
    def test_unknown_key_is_told_with_line_and_nearest_key(self) -> None:
        assert refused("rate: 1\nmodle: m\n") == "job.yaml:2: unknown key `modle`, did you mean `model`?"

    def test_unknown_nested_key_is_told_with_the_nearest_of_its_own_place(self) -> None:
        text = "model: m\npublic:\n  path: /data\n  pth: /data\n"
        assert refused(text) == "job.yaml:4: unknown key `public.pth`, did you mean `path`?"

    def test_unknown_key_in_a_list_is_told_with_its_number(self) -> None:
        text = "nodes:\n- name: csd0\n- name: csd1\n  prot: 22\n"
        assert refused(text) == "job.yaml:4: unknown key `nodes.1.prot`, did you mean `port`?"

    def test_unknown_key_like_no_other_gets_no_suggestion(self) -> None:
        assert refused("colour: red") == "job.yaml:1: unknown key `colour`"

    def test_missing_key_is_told_with_the_line_of_what_lacks_it(self) -> None:
        assert refused("model: m\npublic:\n  on: host\n") == "job.yaml:2: key `public.path` is missing"

    def test_wrong_type_is_told_with_what_was_received(self) -> None:
        said = refused("model: m\nrate: fast\n")
        assert said.startswith("job.yaml:2: `rate`: ")
        assert "number" in said
        assert said.endswith("(received 'fast')")

    def test_value_out_of_range_is_told_with_what_was_received(self) -> None:
        assert "job.yaml:2: `nodes.0.port`:" in refused("nodes:\n- {name: a, port: 0}")
        assert "(received 0)" in refused("nodes:\n- {name: a, port: 0}")

    def test_everything_wrong_is_told_at_once(self) -> None:
        lines = refused("modle: m\nrate: fast\npublic: {}\n").splitlines()
        assert sorted(line.split(": ")[0] for line in lines) == ["job.yaml:1", "job.yaml:2", "job.yaml:3"]

    def test_mapping_where_a_list_belongs_is_told(self) -> None:
        assert refused("nodes: {name: csd0}").startswith("job.yaml:1: `nodes`: ")

    @pytest.mark.parametrize(("text", "found"), [("", "nothing"), ("# only a comment\n", "nothing")])
    def test_empty_file_is_told_which_keys_are_expected(self, text: str, found: str) -> None:
        assert refused(text) == f"job.yaml: expected keys such as model, rate, public, found {found}"

    @pytest.mark.parametrize(("text", "found"), [("- model: m\n", "list"), ("model", "str"), ("5", "int")])
    def test_something_else_than_keys_is_told(self, text: str, found: str) -> None:
        assert refused(text).endswith(f"found {found}")

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("model: m\nrate: [1\n", 3),
            ("model: m\n\trate: 1\n", 2),
            ("model: m: n", 1),
            ("model: !!python/object/apply:os.system [ls]", 1),
            ("a: 1\n---\nb: 2\n", 2),
        ],
    )
    def test_what_is_no_yaml_is_told_with_the_line(self, text: str, line: int) -> None:
        assert refused(text).startswith(f"job.yaml:{line}: not valid YAML: ")

    @pytest.mark.parametrize("text", ["model: 2020-13-45", "model: !!int many", "model: " + "[" * 3000])
    def test_yaml_that_cannot_be_made_a_value_is_told(self, text: str) -> None:
        assert refused(text).startswith("job.yaml: not valid YAML: ")

    def test_keys_that_are_no_words_are_told(self) -> None:
        assert "job.yaml:1: `1`" in refused("1: one\n")

    def test_date_where_a_word_belongs_is_told(self) -> None:
        assert refused(f"model: {datetime.date(2026, 1, 2)}").startswith("job.yaml:1: `model`: ")

    def test_file_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="job.yaml does not exist"):
            load_document(tmp_path / "job.yaml", Settings)

    def test_file_that_is_no_text_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_bytes(b"model: \xff\xfe")
        with pytest.raises(InputError, match="cannot be read"):
            load_document(tmp_path / "job.yaml", Settings)
        with pytest.raises(InputError, match="cannot be read"):
            load_document(tmp_path, Settings)


@contextmanager
def no_room_beyond(num_bytes: int) -> Iterator[None]:
    """Writes fail, half-way, in any file that grows beyond `num_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


class TestSaving:
    def test_missing_directories_are_made(self, tmp_path: Path) -> None:
        save_text(tmp_path / "a" / "b" / "file", "größe")
        assert (tmp_path / "a" / "b" / "file").read_text(encoding="utf-8") == "größe"

    def test_old_content_is_replaced_and_nothing_else_is_left(self, tmp_path: Path) -> None:
        save_bytes(tmp_path / "file", b"a long old content")
        save_bytes(tmp_path / "file", b"new")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"new"}

    def test_failing_write_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        save_bytes(tmp_path / "file", b"old")
        with no_room_beyond(4096), pytest.raises(OSError, match="too large"):
            save_bytes(tmp_path / "file", bytes(100_000))
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}

    def test_failing_rename_leaves_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "file").mkdir()
        with pytest.raises(IsADirectoryError):
            save_text(tmp_path / "file", "new")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_interrupted_writing_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        save_bytes(tmp_path / "file", b"old")
        with contextlib.suppress(KeyboardInterrupt), write_aside(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyboardInterrupt
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}

    def test_directory_appears_whole_or_not_at_all(self, tmp_path: Path) -> None:
        with contextlib.suppress(KeyboardInterrupt), build_aside(tmp_path / "model") as aside:
            (aside / "half").write_bytes(b"x")
            raise KeyboardInterrupt
        assert list(tmp_path.iterdir()) == []
        for content in (b"one", b"two"):
            with build_aside(tmp_path / "model") as aside:
                (aside / "file").write_bytes(content)
            assert [path.name for path in tmp_path.iterdir()] == ["model"]
            assert (tmp_path / "model" / "file").read_bytes() == content

    def test_what_is_no_json_leaves_the_old_file(self, tmp_path: Path) -> None:
        save_json(tmp_path / "file", {"a": 1})
        with pytest.raises(TypeError):
            save_json(tmp_path / "file", {"a": object()})
        assert load_json(tmp_path / "file") == {"a": 1}
        assert len(list(tmp_path.iterdir())) == 1

    @pytest.mark.fault(36)
    def test_half_a_json_file_is_told_with_a_remedy(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text('{"a": ')
        with pytest.raises(InputError, match="cannot be read") as raised:
            load_json(tmp_path / "file")
        assert "create it again" in raised.value.remedy
        with pytest.raises(InputError, match="does not exist"):
            load_json(tmp_path / "other")
