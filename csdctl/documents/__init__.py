"""Files of YAML and JSON: read within limits and checked, written atomically.

Everything that csdctl reads from a file is read here first. Files may come from strangers: their size, depth,
number of values and number of reported problems are bounded.
"""

from csdctl.documents.files import (
    build_atomically,
    load_json,
    load_text,
    make_directory,
    parse_json_document,
    save_bytes,
    save_json,
    save_text,
    split_lines,
    write_atomically,
)
from csdctl.documents.models import Document, check_values, load_document, parse_document

__all__ = [
    "Document",
    "build_atomically",
    "check_values",
    "load_document",
    "load_json",
    "load_text",
    "make_directory",
    "parse_document",
    "parse_json_document",
    "save_bytes",
    "save_json",
    "save_text",
    "split_lines",
    "write_atomically",
]
