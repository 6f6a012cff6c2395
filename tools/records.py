"""Write JSON files one record a line, so that a diff shows which records changed.

python tools/records.py FILE …     rewrite files, such as what `scan-registry bench --json` printed
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def text(document: Any) -> str:
    """``document`` as JSON. A record, which is an object in a list, has a line to itself, unless it holds records."""
    return _text(document, "", spread=True) + "\n"


def write_records(path: Path, document: Any) -> None:
    """Write ``document`` to ``path`` as ``text`` formats it."""
    path.write_text(text(document), encoding="utf-8")


def _text(value: Any, indent: str, spread: bool = False) -> str:
    inner = f"{indent} "
    if isinstance(value, Mapping) and value and (spread or _holds_records(value)):
        rows = [f"{json.dumps(str(key))}: {_text(item, inner)}" for key, item in value.items()]
        opening, closing = "{}"
    elif isinstance(value, Sequence) and _holds_records(value):
        rows = [_text(item, inner) for item in value]
        opening, closing = "[]"
    else:
        return json.dumps(value)
    separator = f",\n{inner}"
    return f"{opening}\n{inner}{separator.join(rows)}\n{indent}{closing}"


def _holds_records(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_records, value.values()))
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, Mapping) or _holds_records(item) for item in value)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    for path in parser.parse_args().files:
        write_records(path, json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
