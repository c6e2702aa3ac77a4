import json
from pathlib import Path

import pytest
from pydantic import Field

from csdctl.documents import Document, load_document, parse_document
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


class TestAcceptedDocuments:
    def test_file_is_parsed_into_the_model(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text("model: größe\npublic: {path: /data}\nnodes:\n- {name: csd0}\n")
        settings = load_document(tmp_path / "job.yaml", Settings)
        assert (settings.model, settings.public, settings.nodes) == (
            "größe",
            Data(path="/data"),
            [Entry(name="csd0")],
        )

    @pytest.mark.parametrize("word", ["host", "on", "off", "yes", "no", "y", "trueman", "falsework"])
    def test_yaml_1_1_booleans_are_read_as_strings(self, word: str) -> None:
        settings = parse(f"public:\n  path: {word}\n  on: {word}\n")
        assert settings.public == Data(path=word, on=word)

    def test_true_and_false_are_booleans(self) -> None:
        assert parse("flags: {a: true, b: False, c: TRUE}").flags == {"a": True, "b": False, "c": True}

    def test_json_is_accepted_as_yaml(self) -> None:
        assert parse(json.dumps({"model": "m", "rate": 1e-3})).rate == 1e-3


class TestRefusedDocuments:
    def test_unknown_key_is_reported_with_its_line_and_the_nearest_key(self) -> None:
        assert refused("rate: 1\nmodle: m\n") == "job.yaml:2: unknown key `modle`, did you mean `model`?"

    def test_unknown_nested_key_suggests_a_key_of_the_same_level(self) -> None:
        text = "model: m\npublic:\n  path: /data\n  pth: /data\n"
        assert refused(text) == "job.yaml:4: unknown key `public.pth`, did you mean `path`?"

    def test_unknown_key_in_a_list_is_reported_with_its_index(self) -> None:
        text = "nodes:\n- name: csd0\n- name: csd1\n  prot: 22\n"
        assert refused(text) == "job.yaml:4: unknown key `nodes.1.prot`, did you mean `port`?"

    def test_unknown_key_without_a_close_match_gets_no_suggestion(self) -> None:
        assert refused("colour: red") == "job.yaml:1: unknown key `colour`"

    def test_missing_key_is_reported_with_the_line_of_its_parent(self) -> None:
        assert refused("model: m\npublic:\n  on: host\n") == "job.yaml:2: key `public.path` is missing"

    def test_wrong_type_is_reported_with_the_received_value(self) -> None:
        message = refused("model: m\nrate: fast\n")
        assert message.startswith("job.yaml:2: `rate`: ")
        assert "number" in message
        assert message.endswith("(received 'fast')")

    def test_value_out_of_range_is_reported_with_the_received_value(self) -> None:
        assert "job.yaml:2: `nodes.0.port`:" in refused("nodes:\n- {name: a, port: 0}")
        assert "(received 0)" in refused("nodes:\n- {name: a, port: 0}")

    def test_all_problems_are_reported_at_once(self) -> None:
        lines = refused("modle: m\nrate: fast\npublic: {}\n").splitlines()
        assert sorted(line.split(": ")[0] for line in lines) == ["job.yaml:1", "job.yaml:2", "job.yaml:3"]

    def test_mapping_instead_of_a_list_is_reported(self) -> None:
        assert refused("nodes: {name: csd0}").startswith("job.yaml:1: `nodes`: ")

    @pytest.mark.parametrize(("text", "found"), [("", "nothing"), ("# only a comment\n", "nothing")])
    def test_empty_file_is_reported_with_the_expected_keys(self, text: str, found: str) -> None:
        assert refused(text) == f"job.yaml: expected keys such as model, rate, public, found {found}"

    @pytest.mark.parametrize(("text", "found"), [("- model: m\n", "list"), ("model", "str"), ("5", "int")])
    def test_document_that_is_not_a_mapping_is_refused(self, text: str, found: str) -> None:
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
    def test_invalid_yaml_is_reported_with_its_line(self, text: str, line: int) -> None:
        assert refused(text).startswith(f"job.yaml:{line}: not valid YAML: ")

    def test_missing_file_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="job.yaml does not exist"):
            load_document(tmp_path / "job.yaml", Settings)

    def test_file_that_is_not_text_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_bytes(b"model: \xff\xfe")
        with pytest.raises(InputError, match="cannot be read"):
            load_document(tmp_path / "job.yaml", Settings)
        with pytest.raises(InputError, match="cannot be read"):
            load_document(tmp_path, Settings)
