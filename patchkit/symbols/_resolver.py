"""From a name to the definition behind it: re-exports, star imports, inheritance.

Works over any *library* that can hand out raw modules by name, so that an installed
copy, a wheel and a source tree are all read alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from patchkit.symbols._facts import Record, SymbolFacts, facts_of
from patchkit.symbols._module import RawModule
from patchkit.symbols._symbol import Symbol


class Library(Protocol):
    """Where raw modules come from."""

    def raw(self, module: str) -> RawModule | None:
        """The module, None where the library has none of that name.

        Raises:
            SourceUnreadableError: The file is there and cannot be read.
        """

    def mentions(self, module: str, name: str) -> bool:
        """Whether reading the module could say anything about `name`; cheap to ask."""

    def assigned(self, module: str, owner: str, name: str) -> Record | None:
        """What the methods of a class assign to an attribute of the instance."""


@dataclass(frozen=True, slots=True)
class Found:
    """A definition, and how it was reached."""

    symbol: Symbol
    record: Record
    inherited: bool = False
    reexported: bool = False


class Resolver:
    """Looks names up in a library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._orders: dict[Symbol, tuple[Symbol, ...]] = {}
        self._found: dict[Symbol, Found | None] = {}

    def facts(self, symbol: Symbol) -> SymbolFacts | None:
        """Facts under the name asked for, wherever the definition stands."""
        found = self.find(symbol)
        if found is None:
            return None
        facts = facts_of(str(symbol), found.record)
        if found.inherited:
            return replace(facts, inherited_from=str(found.symbol))
        if found.symbol != symbol:
            return replace(facts, reexport_of=str(found.symbol))
        return facts

    def find(self, symbol: Symbol) -> Found | None:
        """The definition that `symbol` leads to, None where there is none."""
        if symbol in self._found:
            return self._found[symbol]
        self._found[symbol] = None  # modules that import a name from each other end here
        found = self._found[symbol] = self._search(symbol)
        return found

    def _search(self, symbol: Symbol) -> Found | None:
        raw = self._library.raw(symbol.module)
        if raw is None:
            return None
        record = raw.records.get(symbol.qualname)
        if record is not None:
            return Found(symbol, record)
        head, _, rest = symbol.qualname.partition(".")
        reference = raw.references.get(symbol.qualname)
        if reference is not None:
            return self._follow(reference, "", reexported="." not in symbol.qualname)
        if rest:
            if head in raw.records:
                return self._member(symbol, raw)
            reference = raw.references.get(head)
            if reference is not None:
                return self._follow(reference, rest, reexported=True)
        return self._elsewhere(symbol, raw, head, rest)

    def _elsewhere(self, symbol: Symbol, raw: RawModule, head: str, rest: str) -> Found | None:
        """Star imports, and names that a module serves lazily."""
        # A package may import everything from hundreds of modules: likely ones first.
        plain = head.lower()
        stars = sorted(raw.stars, key=lambda s: -_likeness(s, plain))
        for star in stars:
            if (
                star != symbol.module
                and self._library.mentions(star, head)
                and self._exports(star, head)
            ):
                found = self.find(Symbol(star, symbol.qualname))
                if found is not None:
                    return replace(found, reexported=True)
        if raw.dynamic and raw.lazy.get(head):
            return self._follow(raw.lazy[head], rest, reexported=True)
        # A module of the package, which is its attribute once it was imported.
        submodule = f"{symbol.module}.{head}"
        if rest and self._library.raw(submodule) is not None:
            return self.find(Symbol(submodule, rest))
        return None

    def _exports(self, module: str, name: str) -> bool:
        """Whether ``from module import *`` brings `name`."""
        raw = self._library.raw(module)
        if raw is None:
            return False
        if raw.exports is not None:
            return name in raw.exports or bool(raw.stars)
        return not name.startswith("_")

    def _follow(self, reference: str, rest: str, *, reexported: bool) -> Found | None:
        module, colon, name = reference.partition(":")
        if not colon:  # a module: `import a.b as c` and then `c.f`
            if not rest:
                return None
            target = self._in_module(module, rest)
        else:
            target = Symbol(module, f"{name}.{rest}" if rest else name)
        found = self.find(target)
        return replace(found, reexported=found.reexported or reexported) if found else None

    def _in_module(self, module: str, rest: str) -> Symbol:
        """Take as many names of `rest` into the module as there are modules."""
        while True:
            head, _, tail = rest.partition(".")
            if not tail or self._library.raw(f"{module}.{head}") is None:
                return Symbol(module, rest)
            module, rest = f"{module}.{head}", tail

    # ---- inheritance ---------------------------------------------------------------

    def _member(self, symbol: Symbol, raw: RawModule) -> Found | None:
        """A member that the class named may inherit."""
        owner = symbol.owner
        while owner and raw.records.get(owner, {}).get("kind") != "class":
            owner = owner.rpartition(".")[0]
        if not owner:
            return None
        rest = symbol.qualname[len(owner) + 1 :]
        order = self.order(Symbol(symbol.module, owner))
        for cls in order[1:]:
            target = Symbol(cls.module, f"{cls.qualname}.{rest}")
            base = self._library.raw(cls.module)
            if base is None:
                continue
            record = base.records.get(target.qualname)
            if record is not None:
                return Found(target, record, inherited=True)
            reference = base.references.get(target.qualname)
            if reference is not None:
                found = self._follow(reference, "", reexported=False)
                return replace(found, inherited=True) if found else None
        if "." not in rest:
            for cls in order:
                record = self._library.assigned(cls.module, cls.qualname, rest)
                if record is not None:
                    target = Symbol(cls.module, f"{cls.qualname}.{rest}")
                    return Found(target, record, inherited=target != symbol)
        return None

    def order(self, cls: Symbol) -> tuple[Symbol, ...]:
        """The class and its bases in the order in which Python searches them.

        Bases outside the library, or computed at run time, are left out.
        """
        known = self._orders.get(cls)
        if known is None:
            self._orders[cls] = (cls,)  # a class among its own bases ends here
            known = self._orders[cls] = self._linearise(cls)
        return known

    def _linearise(self, cls: Symbol) -> tuple[Symbol, ...]:
        bases = [b for b in self.bases(cls) if b != cls]
        lists = [list(self.order(b)) for b in bases] + [bases]
        merged = [cls]
        while any(lists):
            lists = [entry for entry in lists if entry]
            tails = {s for entry in lists for s in entry[1:]}
            head = next((e[0] for e in lists if e[0] not in tails), lists[0][0])
            merged.append(head)
            for entry in lists:
                if entry[0] == head:
                    del entry[0]
                elif head in entry:
                    entry.remove(head)
        return tuple(merged)

    def bases(self, cls: Symbol) -> Iterator[Symbol]:
        """The defining symbols of the direct bases that can be resolved."""
        raw = self._library.raw(cls.module)
        record = raw.records.get(cls.qualname) if raw else None
        for text in record.get("bases", ()) if record else ():
            name = text.partition("[")[0]
            if "=" in name or "(" in name:
                continue
            module, colon, qualname = name.partition(":")
            target = Symbol(module, qualname) if colon else self._local(cls, name)
            found = self.find(target)
            if found is not None and found.record["kind"] == "class":
                yield found.symbol

    def _local(self, cls: Symbol, name: str) -> Symbol:
        """A base named without an import: beside the class, or at the module's top."""
        beside = Symbol(cls.module, f"{cls.owner}.{name}" if cls.owner else name)
        return beside if cls.owner and self.find(beside) else Symbol(cls.module, name)


def _likeness(module: str, name: str) -> int:
    """How much of a module's last name a lower-case name begins with."""
    last = module.rpartition(".")[2].replace("_", "")
    return len(last) if name.startswith(last) else 0
