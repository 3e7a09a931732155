"""The published versions of the pages know of each other."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from each_case import each

DOCS = Path(__file__).resolve().parents[1] / "docs"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("publish", DOCS / "publish.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(folder: Path, *pages: str) -> Path:
    for page in ("index", *pages, "_static/none"):
        path = folder / f"{page}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page)
    return folder


@pytest.mark.smoke
def test_each_version_lists_all_and_the_first_page_leads_to_the_newest_release(tmp_path: Path) -> None:
    publish, site = load().publish, tmp_path / "site"
    assert publish(built(tmp_path / "a", "tune", "gallery/posits"), site, "dev") == ["dev"]
    assert "url=dev/index.html" in (site / "index.html").read_text()
    for name in ("v0.9.0", "v0.10.0", "v0.11.0rc1"):
        names = publish(built(tmp_path / name, "tune"), site, name)
    assert names == ["v0.11.0rc1", "v0.10.0", "v0.9.0", "dev"]
    assert "url=v0.10.0/index.html" in (site / "index.html").read_text()
    for name in names:
        text = (site / name / "_static" / "versions.js").read_text()
        lists = json.loads(text.removeprefix("var VERSIONS = ").removesuffix(";\n"))
        assert list(lists) == names and lists["v0.9.0"] == ["index", "tune"]
        assert lists["dev"] == ["gallery/posits", "index", "tune"]


def test_a_version_is_replaced_as_a_whole(tmp_path: Path) -> None:
    publish, site = load().publish, tmp_path / "site"
    publish(built(tmp_path / "a", "old"), site, "dev")
    publish(built(tmp_path / "b", "new"), site, "dev")
    assert not (site / "dev" / "old.html").exists() and (site / "dev" / "new.html").exists()


@each("name", ["", "..", "a/b", "-x"])
def test_names_that_are_no_folders_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NAME="):
        load().publish(built(tmp_path / "a"), tmp_path / "site", name)


def test_a_folder_without_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no index\.html"):
        load().publish(tmp_path, tmp_path / "site", "dev")


def test_the_pages_load_the_list_and_have_a_place_for_it() -> None:
    conf, part = (DOCS / "conf.py").read_text(), (DOCS / "_templates" / "sidebar" / "versions.html").read_text()
    assert 'html_js_files = ["versions.js"]' in conf and '"versions"' in conf
    assert (DOCS / "_static" / "versions.js").read_text().endswith("var VERSIONS = {};\n") and "VERSIONS" in part
