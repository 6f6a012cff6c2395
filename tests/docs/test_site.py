"""The README and the site as a whole: links, addresses, and tables that have to name everything there is."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import PAGES, ROOT, documents

import scan_registry
import scan_registry.aot
import scan_registry.kernels

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
URLS = PROJECT["urls"]


def configuration() -> Any:
    class Loader(yaml.SafeLoader):
        """For a file in which nothing but plain values counts here."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    Loader.add_multi_constructor("!relative", lambda *_: None)
    return yaml.load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def text_of(page: str) -> str:
    return (PAGES / page).read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert 120 <= len(README.splitlines()) < 200


def test_the_readme_is_right_on_pypi() -> None:
    """Which shows it alone, so every link and image is absolute; HTML is dropped there."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    assert re.findall(r"<(?!!--)/?[a-z]+", README) == []


def test_addresses_are_those_of_the_project() -> None:
    config = configuration()
    assert config["site_url"] == URLS["Documentation"] == URLS["Homepage"]
    assert config["repo_url"] == URLS["Repository"]
    raw = URLS["Repository"].replace("github.com", "raw.githubusercontent.com")
    known = (URLS["Documentation"], f"{URLS['Repository']}/", f"{raw}/main/")
    for page in documents():
        for link in re.findall(r"https://[^\s)>\]`]+", page.read_text(encoding="utf-8")):
            if "scan-registry" in link:
                assert link.startswith(known), f"{page}: {link}"


def test_addresses_of_pages_and_files_lead_somewhere() -> None:
    """mkdocs checks links between pages; these lead from outside, or out."""
    blob = re.compile(rf"{re.escape(URLS['Repository'])}/(?:blob|tree)/main/([^\s)>\]#]+)")
    raw = re.compile(r"https://raw\.githubusercontent\.com/[^/]+/[^/]+/main/([^\s)>\]#]+)")
    site = re.compile(rf"{re.escape(URLS['Documentation'])}([^\s)>\]#]*)")
    for page in documents():
        text = page.read_text(encoding="utf-8")
        for path in blob.findall(text) + raw.findall(text):
            assert (ROOT / path).exists(), f"{page}: {path}"
        for path in site.findall(text):
            stem = path.strip("/") or "index"
            assert (PAGES / f"{stem}.md").is_file(), f"{page}: {path}"


def test_every_page_is_in_the_navigation_once() -> None:
    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for item in entry.values() if isinstance(entry, dict) else entry:
                yield from leaves(item)

    listed = list(leaves(configuration()["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(PAGES)) for page in PAGES.rglob("*.md"))


def package_files(*patterns: str) -> Iterator[Path]:
    for package in (scan_registry, scan_registry.kernels, scan_registry.aot):
        assert package.__file__ is not None
        for pattern in patterns:
            yield from Path(package.__file__).parent.rglob(pattern)


def variables_read() -> set[str]:
    """Every environment variable that the package reads, from its sources."""
    result: set[str] = set()
    for path in package_files("*.py"):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"SCAN_REGISTRY_|environ|getenv|flag\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                own = re.fullmatch(r"SCAN_REGISTRY_[A-Z_]+", node.value)
                result |= {node.value} if own else set()
            inputs: ast.AST | None = None
            if isinstance(node, ast.Call) and node.args:
                called = ast.unparse(node.func)
                inputs = node.args[0] if called in ("os.environ.get", "os.getenv", "flag") else None
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                inputs = node.slice
            elif isinstance(node, ast.Compare) and "os.environ" in map(
                ast.unparse, node.comparators
            ):
                inputs = node.left
            if isinstance(inputs, ast.Constant):
                result.add(inputs.value)
    for path in [
        *package_files("*.c", "*.h"),
        *ROOT.glob("scan_registry/csrc/*.[ch]"),
        *ROOT.glob("kernels/*/cpu/*.[ch]"),
    ]:
        result |= set(re.findall(r"\bgetenv\(\"(\w+)\"\)", path.read_text(encoding="utf-8")))
    return result


def test_the_table_of_environment_variables_is_complete() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \|", text_of("reference/environment.md"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == variables_read()


#: Exceptions that no user meets: they are caught where they are of use.
INTERNAL = {"UnfitError", "CaptureError", "FamilyNameError", "UsageError"}


def test_the_page_on_errors_names_every_exception() -> None:
    classes = {
        name
        for path in package_files("*.py")
        for name in re.findall(
            r"^ *class (\w+(?:Error|Warning))\b", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert classes >= INTERNAL
    page = text_of("reference/errors.md")
    named = {name for name in classes if re.search(rf"`{name}`", page)}
    assert classes - INTERNAL == named


def test_the_api_pages_have_every_public_name_once() -> None:
    pages = sorted((PAGES / "reference" / "api").glob("*.md"))
    listed = [
        name
        for page in pages
        for name in re.findall(
            r"^::: scan_registry\.([\w.]+)$", page.read_text(encoding="utf-8"), re.M
        )
    ]
    assert len(listed) == len(set(listed))
    packages = {"compat", "distributed", "jax", "nn", "ops"}
    public = set(scan_registry.__all__) - {"__version__", *packages}
    for package in ("jax", "nn", "distributed"):
        public |= {f"{package}.{name}" for name in getattr(scan_registry, package).__all__}
    assert public <= set(listed)
    for name in scan_registry.compat.__all__:  # of some, the functions of their modules
        assert any(f"{entry}.".startswith(f"compat.{name}.") for entry in listed), name


def test_a_search_finds_what_is_not_supported() -> None:
    """The site's search goes by the words of a page."""
    words = set(re.findall(r"\w+", text_of("limits.md").lower()))
    assert words >= {"windows", "macos", "amd", "rocm", "onnx", "license", "float64", "jax", "tpu"}


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_the_package_in_text_are_there(page: Path) -> None:
    text = re.sub(
        r"<!-- skip: .*?-->\n```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    for name in set(re.findall(r"\bscan_registry(?:\.[A-Za-z_]+)+\b(?![/\w])", text)):
        if name in ("scan_registry.archives", "scan_registry.aot", "scan_registry.kernels"):
            continue  # the group of entry points; what only builds use
        result: Any = scan_registry
        for part in name.split(".")[1:]:
            assert hasattr(result, part), name
            result = getattr(result, part)


#: Words that were given up in documents, and what is written instead.
WORDS = {
    r"rungs?": "tier",
    r"(?<!Streaming )multiprocessors?": "SM",
    r"peers?": "baseline",
    r"(un)?proven": "(not) GPU-tested",
    r"unit disc": "|gate| ≤ 1",
    r"throw-away": "commit the script, or leave it out",
    r"in turns": "interleaved",
    r"performance goals?": "performance target",
    r"few and long": "few channels, long sequences",
}


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_words_that_were_given_up_are_not_used(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("--no-peers", "").replace("--goals", "")
    for word, better in WORDS.items():
        result = re.search(rf"\b(?:{word})\b", text, re.IGNORECASE)
        assert result is None, f"{result[0]!r}: write {better}"


def test_what_a_table_says_to_edit_is_there() -> None:
    """Files of the repository, by their paths, and in one of a row's files each name that the row has."""
    text = text_of("developers/paths.md")
    section = text.partition("## Where to change what\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 8
    for row in rows:
        words = re.findall(r"`([^`]+)`", row)
        paths = [word for word in words if "/" in word]
        files = [list(ROOT.glob(path.replace("<family>", "*"))) for path in paths]
        assert all(files), row
        texts = [file.read_text(encoding="utf-8") for group in files for file in group]
        for name in set(words) - set(paths):
            assert any(re.search(rf"\b{name}\b", text) for text in texts), name
