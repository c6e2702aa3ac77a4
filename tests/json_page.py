"""Compares JSON documents with docs/generate.py, which describes them for docs/reference/json.md."""

from typing import Any

from docs.generate import DOCUMENTS, Shown, json_types


def find_deviations(document: dict[str, Any], described: Shown) -> list[str]:
    """Return what of `document` is not described, and what is described that is not so."""
    names = [name for name in document if name != "schema"]
    deviations = [f"{name} is not described" for name in names if name not in described.fields]
    absent = described.fields.keys() - described.optional - document.keys()
    deviations += [f"{name} is absent" for name in sorted(absent)]
    for name in names:
        expected = json_types(described.fields.get(name, Any))
        if not isinstance(document[name], expected):
            deviations.append(f"{name}: {expected} is described, received {document[name]!r:.80}")
    return deviations


def check_document(document: dict[str, Any]) -> None:
    """Assert that a document is as it is described; raises KeyError for an unknown schema."""
    schema = document["schema"]
    assert find_deviations(document, DOCUMENTS[schema]) == [], schema
