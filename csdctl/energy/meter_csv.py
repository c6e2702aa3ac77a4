"""The CSV file of a power meter on the host: a header with `time` and `watts`, and a row for each reading.

Times are Unix seconds, or ISO 8601 as in 2026-01-31T12:00:00+00:00; without an offset they are UTC.
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from csdctl.energy.reading import parse_number, parse_watts

REMEDY = "the first line is `time,watts`, a row `1769860800.0,212.5` or `2026-01-31T12:00:00Z,212.5`"


def parse_meter(lines: Iterable[str]) -> Iterator[tuple[float, float]]:
    """Yield Unix time and watts of each row, in order; raises ValueError with the line.

    The meter may be writing the last line: it is left out when it is no row.
    """
    rows = csv.reader(lines)
    header = [cell.strip().lower() for cell in next(rows, [])]
    if "time" not in header or "watts" not in header:
        raise ValueError(f"expected columns `time` and `watts`, received {', '.join(header)[:100]!r}")
    time_column, watts_column = header.index("time"), header.index("watts")
    failed = ""
    for row in rows:
        if failed:
            raise ValueError(failed)
        if not row:
            continue
        try:
            yield _parse_time(row[time_column].strip()), parse_watts(row[watts_column].strip())
        except (ValueError, IndexError) as error:
            failed = f"line {rows.line_num}: {error}"


def _parse_time(text: str) -> float:
    try:
        return parse_number(text, "a time")
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"expected a time, received {text[:40]!r}") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
