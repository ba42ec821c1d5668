"""The built site: nothing on it is loaded from another host, and it works in a browser."""

import asyncio
import functools
import http.server
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.chromium import browse, needs_chromium

ROOT = Path(__file__).resolve().parents[2]
BUILDER = ROOT / ".cache" / "docs" / "venv" / ".installed"
needs_builder = pytest.mark.skipif(
    not BUILDER.exists(), reason="needs the programs that `bash tools/docs.sh` installs"
)
# Before the page itself there is an empty document, which is complete too.
_LOADED = "document.readyState == 'complete' && document.querySelector('article h1') !== null"


@functools.cache
def check_site() -> ModuleType:
    """tools/check_site.py, which runs outside of our environment."""
    spec = importlib.util.spec_from_file_location("check_site", ROOT / "tools" / "check_site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("html", "loaded"),
    [
        ('<script src="https://unpkg.com/mermaid@11"></script>', ["https://unpkg.com/mermaid@11"]),
        ('<link rel="stylesheet" href="//fonts.gstatic.com/x.css">', ["//fonts.gstatic.com/x.css"]),
        ('<link rel="preconnect" href="https://fonts.gstatic.com">', ["https://fonts.gstatic.com"]),
        ('<img srcset="a.png, https://a.example/b.png 2x">', ["https://a.example/b.png 2x"]),
        ("<style>a{background:url('http://a.example/x')}</style>", ["http://a.example/x"]),
        ('<a href="https://arxiv.org">paper</a>', []),
        ('<link rel="canonical" href="https://a.example/"><img src="a.svg">', []),
        ("<p>url(http://a.example/x)</p>", []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(html: str, loaded: list[str]) -> None:
    assert check_site().loads_of_page(html) == loaded


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the site, built now and served on loopback."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        ["bash", "tools/docs.sh", "build", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "loaded from elsewhere: nothing" in done.stdout
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=60)


@needs_builder
def test_a_link_to_a_heading_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for name in ("mkdocs.yml", "tools/docs.sh", "tools/check_site.py", "requirements/docs.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / ".cache" / "docs").mkdir(parents=True)
    (tmp_path / ".cache" / "docs" / "venv").symlink_to(BUILDER.parent)
    with (tmp_path / "docs" / "viewer.md").open("a") as page:
        page.write("\n[away](weights.md#no-such-heading)\n")
    done = subprocess.run(
        ["bash", "tools/docs.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "weights.md#no-such-heading" in done.stderr


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@needs_builder
@needs_chromium
@pytest.mark.parametrize("page", ["index.html", "how-it-works.html", "configuration.html"])
def test_a_page_asks_its_own_host_alone(site: str, page: str, tmp_path: Path) -> None:
    asked, widths, complaints = asyncio.run(_look(f"{site}/{page}", tmp_path))
    assert len(asked) >= 3
    assert [address for address in asked if not address.startswith(f"{site}/")] == []
    assert all(width > 0 for width in widths)
    assert (len(widths) >= 3) == (page == "how-it-works.html")
    assert complaints == []


async def _look(address: str, profile: Path) -> tuple[list[str], list[int], list[str]]:
    """What a page asks for, how wide its pictures are, and what the browser complains of."""
    async with browse(address, profile) as page:
        await page.until(_LOADED)
        asked = await page.value("performance.getEntriesByType('resource').map(e => e.name)")
        widths = await page.value(
            "[...document.querySelectorAll('article img')].map(image => image.naturalWidth)"
        )
        return asked, widths, page.complaints


@needs_builder
@needs_chromium
def test_the_search_finds_a_key(site: str, tmp_path: Path) -> None:
    asyncio.run(_search(f"{site}/index.html", "strict_staleness", tmp_path))


async def _search(address: str, words: str, profile: Path) -> None:
    async with browse(address, profile) as page:
        await page.until(_LOADED)
        await page.value("document.querySelector('label[for=__search]').click()")
        await page.value("document.querySelector('input.md-search__input').focus()")
        await page.write(words)
        await page.until(
            "[...document.querySelectorAll('.md-search-result__link')]"
            ".some(link => link.href.includes('configuration.html'))"
        )
