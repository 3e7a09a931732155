"""Reports of rows: as dict, JSON, columns and CSV, from the fields alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jchop._common.text import RowReport, TableOrLine


class Named:
    """An object with a text of its own."""

    def __str__(self) -> str:
        return "named"


@dataclass(frozen=True)
class Line:
    name: str
    value: float
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lines(RowReport):
    rows: tuple[Line, ...]
    rule: object = Named()
    limit: float = math.inf

    def _parts(self) -> Iterator[TableOrLine]:
        yield [("name", "value"), *((row.name, f"{row.value:g}") for row in self.rows)]


class LinesWithInfinities(Lines):
    _infinities_as_text = True


ROWS = (Line("a", 0.5, (2, 3)), Line("b", math.nan))


def test_rows_come_last_and_numbers_that_are_not_finite_are_none() -> None:
    found = Lines(ROWS).as_dict()
    rows = [{"name": "a", "value": 0.5, "sizes": [2, 3]}, {"name": "b", "value": None, "sizes": []}]
    assert found == {"rule": "named", "limit": None, "rows": rows} and list(found)[-1] == "rows"
    assert json.loads(Lines(ROWS).to_json(indent=1)) == found
    assert LinesWithInfinities(ROWS).as_dict() == found | {"limit": "inf"}


def test_columns_and_csv() -> None:
    columns = Lines(ROWS).columns()
    assert columns["name"] == ["a", "b"] and columns["sizes"] == [(2, 3), ()]
    assert Lines(ROWS).to_csv() == "name,value,sizes\na,0.5,2 3\nb,nan,\n"
    assert Lines(()).columns() == {} and str(Lines(ROWS)).splitlines()[1] == "a     0.5"
