import pytest
from pydantic import Field

from csdctl.documents import Document, parse_document
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
            (
                "model: m\nrate: fast\n",
                "job.yaml:2: `rate`: must be a number (received 'fast')",
            ),
            (
                "nodes:\n- {name: a, port: 0}",
                "job.yaml:2: `nodes.0.port`: must be greater than or equal to 1 (received 0)",
            ),
            ("", "job.yaml: expected keys such as model, rate, public, received an empty file"),
            ("- model: m\n", "job.yaml: expected keys such as model, rate, public, received a list"),
        ],
    )
    def test_problem_is_reported_with_its_line(self, text: str, message: str) -> None:
        assert refused(text) == message

    def test_all_problems_are_reported_at_once(self) -> None:
        lines = refused("modle: m\nrate: fast\npublic: {}\n").splitlines()
        assert sorted(line.split(": ")[0] for line in lines) == ["job.yaml:1", "job.yaml:2", "job.yaml:3"]

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
