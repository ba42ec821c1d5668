"""Texts of tests as trees and regions."""

from verification.math.expression import parse_expression
from verification.math.regions import Region, parse_region
from verification.math.trees import Tree
from verification.math.values import same_value


def parsed(text: str) -> Tree:
    """The tree of a text that the grammar reads."""
    tree = parse_expression(text)
    assert tree is not None, text
    return tree


def region_of(text: str) -> Region:
    """The region that a text describes."""
    region = parse_region(text)
    assert region is not None, text
    return region


def is_same(first: str, second: str) -> bool | None:
    """Whether two expressions are equal, both ways round."""
    one, other = parsed(first), parsed(second)
    result = same_value(one, other)
    assert same_value(other, one) is result
    return result
