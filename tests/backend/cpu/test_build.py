"""A source is compiled once, and a broken one says why."""

import ctypes
import multiprocessing
from pathlib import Path

import pytest

from megatron_rl.backend.cpu.kernels import build

SOURCE = 'extern "C" int answer() { return 42; }'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of this test alone, and a cache of its own."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "_folder", lambda: tmp_path / "cache")
    build.load.cache_clear()
    yield tmp_path
    build.load.cache_clear()


def test_processes_that_start_together_share_one_compilation(folder: Path) -> None:
    (folder / "one.cpp").write_text(SOURCE)
    # Not forked: a child of a process with threads may hang when the pool ends it.
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        assert pool.map(_answer_from, [folder] * 3) == [42] * 3
    assert len(list((folder / "cache").glob("*.so"))) == 1


def _answer_from(folder: Path) -> int:
    """In a process of its own."""
    build.FOLDER, build._folder = folder, lambda: folder / "cache"
    return _answer("one")


def _answer(name: str) -> int:
    library = build.load(name)
    library.answer.restype = ctypes.c_int
    return library.answer()


def test_a_changed_source_or_header_is_compiled_anew(folder: Path) -> None:
    (folder / "one.cpp").write_text(SOURCE)
    assert _answer("one") == 42
    for name, text in (("one.cpp", SOURCE.replace("42", "43")), ("two.h", "// new")):
        (folder / name).write_text(text)
        build.load.cache_clear()
        assert _answer("one") == 43
    assert len(list((folder / "cache").glob("*.so"))) == 3


def test_a_source_that_does_not_compile_says_why(folder: Path) -> None:
    (folder / "one.cpp").write_text("int broken(")
    with pytest.raises(build.CompilerFailed, match="one.cpp"):
        build.load("one")
    assert not list((folder / "cache").glob("*.so"))


def test_a_host_without_a_compiler_is_told_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    (folder / "one.cpp").write_text(SOURCE)
    with pytest.raises(build.CompilerFailed, match=r"install the package g\+\+"):
        build.load("one")


def test_every_source_of_the_product_compiles() -> None:
    for name in build.names():
        build.load(name)


def test_all_sources_are_compiled_at_once_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        (folder / f"{name}.cpp").write_text(SOURCE)
    build.main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]
    assert len(list((folder / "cache").glob("*.so"))) == 2
    (folder / "three.cpp").write_text("no program")
    with pytest.raises(SystemExit, match=r"^error: g\+\+ .*three\.cpp"):
        build.main()
