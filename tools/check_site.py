"""Finds resources that a built site loads from other hosts: python tools/check_site.py FOLDER

tools/docs.sh runs it outside .venv, so only the standard library is available. Hyperlinks are
allowed. Exit code 1 when it finds a resource, or no page.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

_LOADING = {
    "script": ("src",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset"),
    "video": ("src", "poster"), "audio": ("src",), "embed": ("src",), "object": ("data",),
    "input": ("src",), "use": ("href",), "image": ("href",), "form": ("action",),
}  # fmt: skip
_NO_LOAD = {"canonical", "next", "prev", "alternate", "edit", "license", "author"}
"""Relations of <link> that browsers do not fetch."""
_ELSEWHERE = re.compile(r"\s*(?:[a-z]+:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:https?:)?//[^\"')\s]*)", re.IGNORECASE)


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._is_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._is_style = tag == "style"
        names = _LOADING.get(tag, ())
        if tag == "link" and not set(given.get("rel", "").lower().split()) <= _NO_LOAD:
            names = ("href",)
        values = [part for name in names for part in given.get(name, "").split(",")]
        self.found += [value.strip() for value in values if _ELSEWHERE.match(value)]
        self.found += _IN_STYLE.findall(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.found += _IN_STYLE.findall(data)


def loads_of_page(html: str) -> list[str]:
    """Addresses on other hosts that a browser fetches to show the page."""
    parser = _Loads()
    parser.feed(html)
    return parser.found


def loads_of_site(folder: Path) -> dict[str, list[str]]:
    """Page or style sheet -> addresses on other hosts."""
    found = {str(path): loads_of_page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    sheets = sorted([*folder.rglob("*.css"), *folder.rglob("*.svg")])
    found |= {str(path): _IN_STYLE.findall(path.read_text()) for path in sheets}
    return {name: addresses for name, addresses in found.items() if addresses}


def main() -> int:
    folder = Path(sys.argv[1])
    pages = list(folder.rglob("*.html"))
    found = loads_of_site(folder)
    for name, addresses in found.items():
        print(f"{name} loads from elsewhere: {', '.join(addresses)}", file=sys.stderr)
    if not pages:
        print(f"{folder} holds no page", file=sys.stderr)
    else:
        print(f"{len(pages)} pages in {folder}; loaded from elsewhere: {len(found) or 'nothing'}")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
