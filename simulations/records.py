"""Records on disk: one JSON object a line, plain or compressed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr_modulated import InvalidDataError

Record = dict[str, Any]
RECORDS = "records.jsonl"


def append_record(path: Path, record: Record) -> None:
    """Append one JSON line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def recover_records(path: Path) -> list[Record]:
    """Read a file that will be appended to; cut off a last line that a crash left unfinished."""
    if not path.exists():
        return []
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        path.write_bytes(complete)
    return _parse(complete.decode("utf-8"), path)


def find_records(places: Iterable[Path]) -> list[Record]:
    """All records of files and directories (``*.jsonl``, ``*.jsonl.gz``, at any depth).

    The same run found twice counts once.

    Raises
    ------
    InvalidDataError
        If nothing is found, or a line is not a record.
    """
    found: dict[str, Record] = {}
    for place in places:
        files = sorted(place.rglob("*.jsonl*")) if place.is_dir() else [place]
        for file in files:
            if not file.exists():
                raise InvalidDataError(f"no such file or directory: {file}")
            data = file.read_bytes()
            text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
            for record in _parse(text, file):
                found.setdefault(json.dumps([record.get("experiment"), record["id"]]), record)
    if not found:
        raise InvalidDataError("no records found; give directories that hold *.jsonl or *.jsonl.gz")
    return list(found.values())


def archive_records(records: Iterable[Record], path: Path) -> None:
    """Write records compressed and small: six significant digits, sorted, the same bytes each time."""
    ordered = sorted(records, key=lambda record: (record["kind"], record["id"]))
    text = "".join(json.dumps(_rounded(record), allow_nan=False) + "\n" for record in ordered)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _parse(text: str, path: Path) -> list[Record]:
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            raise InvalidDataError(f"{path}, line {number}: not JSON; remove the line to go on") from None
        if not isinstance(record, dict) or "id" not in record or "kind" not in record:
            raise InvalidDataError(f"{path}, line {number}: not a record of this version (id, kind)")
        records.append(record)
    return records
