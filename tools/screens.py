"""Look at every page of the built site in a browser, on a phone and on a desk, in light and dark colours.

    python3 tools/dev.py site      builds the site into build/site
    python tools/screens.py        needs `pip install playwright`, and Chromium: an installed one, or that of
                                   `playwright install chromium`
    python tools/screens.py --save build/screens --page guides/recipes
                                   keeps a picture of each screen of one page

A page fails if it is wider than the screen, if a text's contrast with its background is below 4.5 (3 for large text, as WCAG 2
has it), if an identifier in a table breaks into lines, or if a link or picture within the site leads nowhere. Nothing outside
this machine is asked for.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SITE = Path(__file__).resolve().parents[1] / "build" / "site"
#: Where the site is published, of which mkdocs writes links from the page on errors: they count as links within the site.
PUBLISHED = "/scan-registry/"
WIDTHS = {"phone": 360, "desk": 1280}
SCHEMES = ("light", "dark")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

#: What is measured within a page. A colour is red, green, blue and alpha.
_MEASURE = """
() => {
  const rgba = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const visible = e => e.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const texts = [], broken = [], wide = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const e = node.parentElement;
    if (!node.data.trim() || !visible(e) || e.closest("script, style, .md-search, .md-skip, .md-top, svg")) continue;
    const style = getComputedStyle(e), behind = [];
    for (let p = e; p; p = p.parentElement) behind.push(rgba(getComputedStyle(p).backgroundColor));
    const size = parseFloat(style.fontSize), bold = parseInt(style.fontWeight) >= 700;
    texts.push({ text: node.data.trim().slice(0, 40), color: rgba(style.color), behind,
                 large: size >= 24 || (bold && size >= 18.66) });
  }
  for (const e of document.querySelectorAll("td code"))
    if (visible(e) && !/\\s/.test(e.textContent) && new Set([...e.getClientRects()].map(r => r.top)).size > 1)
      broken.push(e.textContent);
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    for (const e of document.querySelectorAll("article *"))
      if (visible(e) && e.getBoundingClientRect().right > width + 1 && !e.closest(".md-typeset__scrollwrap, pre, .highlight"))
        wide.push(e.tagName.toLowerCase() + " " + e.textContent.trim().slice(0, 40));
  return { texts, broken, wide, overflow: document.documentElement.scrollWidth - width };
}
"""


# --- Contrast ---------------------------------------------------------------------------------


def composed(layers: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The colour that shows, of layers from the front to the back; behind all of them is white."""
    red, green, blue = 255.0, 255.0, 255.0
    for layer in reversed([layer for layer in layers if len(layer) >= 3]):
        alpha = layer[3] if len(layer) > 3 else 1.0
        red, green, blue = (
            alpha * front + (1 - alpha) * back
            for front, back in zip(layer[:3], (red, green, blue), strict=True)
        )
    return red, green, blue


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """The ratio of two colours' luminances, as WCAG 2 defines it: from 1 to 21."""

    def luminance(color: Sequence[float]) -> float:
        parts = [value / 255 for value in color]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def faint(texts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Texts that are hard to read, each kind of them once."""
    seen = set()
    for text in texts:
        behind = composed(text["behind"])
        front = composed([text["color"], *text["behind"]])
        ratio = contrast(front, behind)
        if ratio < (3 if text["large"] else 4.5) and (front, behind) not in seen:
            seen.add((front, behind))
            yield f"contrast {ratio:.2f}: {text['text']!r}"


# --- Links ------------------------------------------------------------------------------------


class _Links(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        key = {"a": "href", "link": "href", "img": "src", "script": "src"}.get(tag, "")
        if target := values.get(key):
            self.targets.append(target)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}


@cache
def _links(path: Path) -> _Links:
    links = _Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links


def dead_links(page: Path, site: Path) -> Iterator[str]:
    """Links of a page within the site that lead to no file, or to no anchor of a page."""
    own = "http://site/" + page.relative_to(site).as_posix()
    for target in dict.fromkeys(_links(page).targets):
        parts = urlsplit(urljoin(own, target))
        if parts.netloc != "site" or parts.scheme != "http":
            continue
        path = site / unquote(parts.path).removeprefix(PUBLISHED).lstrip("/")
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            yield f"link to nowhere: {target}"
        elif parts.fragment and path.suffix == ".html":
            anchor = unquote(parts.fragment)
            if anchor not in _links(path).anchors and not anchor.startswith(("__", "only-")):
                yield f"link to no anchor: {target}"


# --- The browser ------------------------------------------------------------------------------


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the server is for this program alone."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The site's address on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def looked_at(
    browser: Browser, address: str, pages: Sequence[str], save: Path | None
) -> Iterator[str]:
    """What is wrong with pages, on every screen."""
    for (screen, width), scheme in product(WIDTHS.items(), SCHEMES):
        tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        for name in pages:
            tab.goto(address + name, wait_until="load")
            for fault in faults(tab):
                yield f"{name or 'index'}, {screen}, {scheme}: {fault}"
            if save is not None:
                save.mkdir(parents=True, exist_ok=True)
                file = f"{name.strip('/').replace('/', '-') or 'index'}-{screen}-{scheme}.png"
                tab.screenshot(path=save / file, full_page=True)
        tab.close()


def faults(tab: Page) -> Iterator[str]:
    """What is wrong with the page that a tab shows."""
    measured = tab.evaluate(_MEASURE)
    if measured["overflow"] > 0:
        yield f"wider than the screen by {measured['overflow']} pixels: {', '.join(measured['wide'][:3])}"
    for name in measured["broken"]:
        yield f"an identifier breaks: {name}"
    yield from faint(measured["texts"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=SITE, help="the built site")
    parser.add_argument("--page", action="append", help="such as guides/recipes; default: all")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep a picture of each screen")
    args = parser.parse_args()
    files = sorted(args.site.rglob("index.html"))
    if not files:
        print(f"{args.site} has no pages: run `python3 tools/dev.py site`", file=sys.stderr)
        return 2
    names = [
        "" if file.parent == args.site else f"{file.parent.relative_to(args.site).as_posix()}/"
        for file in files
    ]
    if args.page:
        names = [name for name in names if name.strip("/") in args.page]

    from playwright.sync_api import sync_playwright

    wrong = [f"{f.relative_to(args.site)}: {w}" for f in files for w in dead_links(f, args.site)]
    with sync_playwright() as playwright, served(args.site) as address:
        program = next(filter(None, map(shutil.which, CHROMIUM)), None)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        wrong += looked_at(browser, address, names, args.save)
        browser.close()
    print("\n".join(wrong))
    print(
        f"{len(names)} pages on {len(WIDTHS)} screens in {len(SCHEMES)} colours: {len(wrong)} faults"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
