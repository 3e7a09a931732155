"""Tables of calls that are refused: all entries are tried, and those that are not refused as they say are named."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Refused = Mapping[Any, tuple[Callable[[], Any], type[BaseException] | tuple[type[BaseException], ...], str]]


def assert_refused(table: Refused) -> None:
    """Every call raises the error beside it, with a message in which the text is found, as by `pytest.raises`."""
    assert table
    wrong = []
    for name, (make, error, text) in table.items():
        try:
            make()
        except error as raised:
            if not re.search(text, str(raised)):
                wrong.append(f"{name}: {raised}\n    does not match {text!r}")
        except Exception as raised:  # an error of another kind is what the test reports
            wrong.append(f"{name}: {raised!r} is no {error}")
        else:
            wrong.append(f"{name}: nothing was raised")
    assert not wrong, "\n".join(wrong)
