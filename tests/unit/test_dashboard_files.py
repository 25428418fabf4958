"""The dashboard's files: complete, packaged, from nowhere else, no way to markup."""

import re
import tomllib
from pathlib import Path

import pytest

import tokenmill

ROOT = Path(tokenmill.__file__).parent / "producer" / "gateway" / "static"
FILES = sorted(path for path in ROOT.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
PAGES = [path for path in FILES if path.suffix == ".html"]
PREFIX = "/dashboard/static/"
NOT_PRELOADED = {"js/theme_early.js", "js/login.js", "js/main.js"}
MARKUP = (
    r"\b(innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|srcdoc|eval"
    r"|document\.write|DOMParser|new Function)\b"
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_page_names_every_module_for_preloading() -> None:
    page = (ROOT / "index.html").read_text()
    named = re.findall(rf'rel="modulepreload" href="{PREFIX}([^"]+)"', page)
    assert sorted(named) == sorted(set(map(name, SCRIPTS)) - NOT_PRELOADED)


def test_whatever_is_named_is_there_and_whatever_is_there_is_named() -> None:
    wanted = {name(page) for page in PAGES}
    for path in FILES:
        text = path.read_text()
        for link in re.findall(rf'(?:src|href)="{PREFIX}([^"]+)"', text):
            assert (ROOT / link).is_file(), f"{name(path)} names {link}"
            wanted.add(link)
        if path.suffix == ".js":
            for module in re.findall(r'from "(\.[^"]+)"', text):
                found = (path.parent / module).resolve()
                assert found.is_file(), f"{name(path)} imports {module}"
    assert wanted == set(map(name, FILES))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_comes_from_elsewhere_or_stands_inline(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]{2,}", text)
    assert "@import" not in text
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_no_script_makes_markup_of_text(path: Path) -> None:
    assert re.findall(MARKUP, path.read_text()) == []


def test_every_file_goes_into_the_package() -> None:
    project = Path(tokenmill.__file__).resolve().parent / "pyproject.toml"
    if not project.is_file():
        pytest.skip("the package is installed, so there is no pyproject.toml")
    settings = tomllib.loads(project.read_text())
    patterns = settings["tool"]["setuptools"]["package-data"][
        "tokenmill.producer.gateway"
    ]
    packed = {
        path
        for pattern in patterns
        for path in ROOT.parent.glob(pattern)
        if path.is_file()
    }
    assert packed == set(FILES)
