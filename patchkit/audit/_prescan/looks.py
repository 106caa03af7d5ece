"""What a look says: names and functions on which it depends whether something patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Before the name of a function: it depends on what that function returns.
RETURNED = "()"
# Before a function and one of the names that it is given: it depends on both, where the
# function returns what it is given.
PASSED = "(=)"
# A function that returns what it is given.
GIVEN = "="

Import = tuple[str, int, str]  # module, level, name ("" for the module itself)


@dataclass(frozen=True, slots=True)
class Looked:
    """What a look at one function says.

    Attributes:
        alone: The names on which it depends whether it patches by itself; the empty
            string where it depends on none.
        when_called: It may patch what its caller gives it.
        setter: It may set an attribute of what its caller gives it.
        called: The functions that it calls or hands on.
        called_with: Those of them that get something that may be foreign, each with
            the name on which that depends.
        passed: Those of them that get one of its parameters.
        gives: The functions on which it depends whether what it returns is a module, a
            class, a function, a path, a text or a test of a version; the empty string
            where it depends on none.
    """

    alone: frozenset[str]
    when_called: bool
    setter: bool
    called: frozenset[str]
    called_with: frozenset[tuple[str, str]]
    passed: frozenset[str]
    gives: frozenset[str]


@dataclass(frozen=True, slots=True)
class FileLook:
    """What a look at one file says.

    Attributes:
        alone: The names on which it depends whether something in it patches.
        helpers: Functions that may patch what they are given.
        setters: Those of them that may set an attribute of it.
        passing: Functions that hand a parameter on, and to whom.
        giving: Functions that may return something that matters, and what they have it from.
        called_with: What is called with something that may be foreign, and the name on
            which that depends.
        called: Everything that is called or handed on.
        functions: First line of each outermost function -> the look at it.
        imports: Local name -> where it may come from: module, level, name.
        defined: Names that the module itself defines.
    """

    alone: frozenset[str]
    helpers: frozenset[str]
    setters: frozenset[str]
    passing: tuple[tuple[str, frozenset[str]], ...]
    giving: tuple[tuple[str, frozenset[str]], ...]
    called_with: frozenset[tuple[str, str]]
    called: frozenset[str]
    functions: Mapping[int, Looked]
    imports: Mapping[str, frozenset[Import]]
    defined: frozenset[str]
