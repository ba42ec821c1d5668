"""Every engine has what the contract names, also those whose programs are not installed here."""

import inspect

import pytest

from generation.engine import ENGINES, Engine, load_engine


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_engine_has_the_fields_of_the_contract(name: str) -> None:
    kind = load_engine(name)
    source = inspect.getsource(kind)
    for field in Engine.__annotations__:
        assert hasattr(kind, field) or f"self.{field} = " in source, field
