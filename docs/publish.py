"""Puts a built site beside the published ones, and tells each of them about all: the folders and their pages.

    python docs/publish.py BUILT SITE NAME

BUILT is the output of Sphinx. SITE holds a folder for each version; NAME is the new one, replaced if it exists: a
release such as ``v0.1.0``, or ``dev``. The lists are scripts and not JSON, so that they load from files, too.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

FIRST = """<!doctype html>
<meta charset="utf-8">
<title>jchop</title>
<meta http-equiv="refresh" content="0; url={name}/index.html">
<link rel="canonical" href="{name}/index.html">
<a href="{name}/index.html">jchop {name}</a>
"""


def age(name: str) -> tuple[bool, Version]:
    """A key that sorts releases by their numbers, above all other names."""
    try:
        return True, Version(name)
    except InvalidVersion:
        return False, Version("0")


def pages(folder: Path) -> list[str]:
    """The pages of a site, without their suffix."""
    found = (path.relative_to(folder) for path in folder.rglob("*.html"))
    return sorted(path.with_suffix("").as_posix() for path in found if path.parts[0] != "_static")


def publish(built: Path, site: Path, name: str) -> list[str]:
    """Copies a site, and writes the lists and the first page; returns the versions, the newest release first."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"NAME={name!r} must be the name of a folder: letters, digits, dots and dashes")
    if not (built / "index.html").is_file():
        raise ValueError(f"BUILT={built} has no index.html")
    shutil.rmtree(site / name, ignore_errors=True)
    shutil.copytree(built, site / name, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    names = sorted((path.parent.name for path in site.glob("*/index.html")), key=lambda each: (age(each), each))[::-1]
    lists = json.dumps({each: pages(site / each) for each in names})
    for each in names:
        (site / each / "_static" / "versions.js").write_text(f"var VERSIONS = {lists};\n", encoding="utf-8")
    final = [each for each in names if age(each)[0] and not age(each)[1].is_prerelease]
    (site / "index.html").write_text(FIRST.format(name=[*final, *names][0]), encoding="utf-8")
    (site / ".nojekyll").touch()  # GitHub would leave out folders that begin with an underscore
    return names


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    print("\n".join(publish(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
