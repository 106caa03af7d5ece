"""Finding a symbol again that is no longer where it was.

Decided by content: equal bodies first, then how similar code, signature and name are.
Nothing here is ever applied by itself; every answer carries a confidence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

from patchkit.symbols._facts import Record
from patchkit.symbols._normalform import similarity
from patchkit.symbols._symbol import Symbol

ACCEPTED = 0.55
_TRIVIAL_TOKENS = 9
_STEP = 6  # hex digits of one item of a sketch
_COMMON = 400  # an item that more symbols share says nothing
_LIKELIEST = 25
_MARGIN = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where a symbol probably is now.

    Attributes:
        symbol: The new place.
        confidence: From 0 to 1.
        evidence: Why, in words.
    """

    symbol: str
    confidence: float
    evidence: str


class Index:
    """The symbols of one version, found by body, by name and by similar code."""

    def __init__(self, records: Iterable[tuple[str, Record]]) -> None:
        self.records: dict[str, Record] = dict(records)
        self._by_body: dict[str, list[str]] = {}
        self._by_name: dict[str, list[str]] = {}
        self._by_item: dict[str, list[str]] | None = None
        self._members: dict[str, dict[str, Record]] = {}
        self._by_module: dict[str, list[str]] = {}
        self._by_word: dict[str, set[str]] | None = None
        for symbol, record in self.records.items():
            self._by_body.setdefault(record["body_digest"], []).append(symbol)
            self._by_name.setdefault(last_name(symbol), []).append(symbol)
            self._by_module.setdefault(symbol.partition(":")[0], []).append(symbol)
            owner = owner_of(symbol)
            if owner and record["kind"] != "attribute":
                self._members.setdefault(owner, {})[last_name(symbol)] = record

    def same_body(self, record: Record) -> list[str]:
        return self._by_body.get(record["body_digest"], [])

    def same_name(self, name: str) -> list[str]:
        return self._by_name.get(name, [])

    def members(self, symbol: str) -> Mapping[str, Record]:
        """The methods of a class, by name."""
        return self._members.get(symbol, {})

    def similar(self, record: Record) -> Iterator[str]:
        """Symbols that share most of their sketch, likeliest first."""
        if self._by_item is None:
            self._by_item = {}
            for symbol, other in self.records.items():
                for item in _items(other.get("sketch", "")):
                    self._by_item.setdefault(item, []).append(symbol)
        shared: Counter[str] = Counter()
        for item in _items(record.get("sketch", "")):
            holders = self._by_item.get(item, ())
            if len(holders) <= _COMMON:
                shared.update(holders)
        for symbol, _ in shared.most_common(_LIKELIEST):
            yield symbol

    def alike_in_name(self, symbol: str) -> list[str]:
        """Symbols of the same module, and those whose last name shares its words."""
        if self._by_word is None:
            self._by_word = {}
            for name in self._by_name:
                for word in words(name):
                    self._by_word.setdefault(word, set()).add(name)
        near = list(self._by_module.get(symbol.partition(":")[0], ()))
        mine = last_name(symbol)
        names: set[str] = set()
        for word in words(mine):
            holders = self._by_word.get(word, set())
            if len(holders) <= _COMMON:
                names |= holders
        for name in sorted(names):
            alike = name != mine and word_likeness(name, mine) >= 0.5
            if alike and len(self._by_name[name]) <= _LIKELIEST:
                near += self._by_name[name]
        return near

    def crowd(self, symbol: str, record: Record) -> float:
        """How much the code of other symbols resembles this one's.

        Code that half a dozen models share in variants does not tell where one of them
        went: a candidate has to resemble the symbol more than its old neighbours do.
        """
        found = 0.0
        family = _FAMILY.get(record["kind"])
        for other in self.similar(record):
            if other == symbol:
                continue
            theirs = self.records[other]
            if _FAMILY.get(theirs["kind"]) == family:
                found = max(found, similarity(record.get("sketch", ""), theirs.get("sketch", "")))
        return found

    def namesakes(self, symbol: str) -> int:
        """How many other module-level symbols have its last name."""
        others = (s for s in self.same_name(last_name(symbol)) if s != symbol)
        return sum(1 for s in others if not owner_of(s))

    def twins(self, symbol: str, record: Record) -> list[str]:
        """Other symbols with the same body."""
        return [s for s in self.same_body(record) if s != symbol]


def _items(sketch: str) -> Iterator[str]:
    for start in range(0, len(sketch), _STEP):
        yield sketch[start : start + _STEP]


def last_name(symbol: str) -> str:
    return symbol.rpartition(":")[2].rpartition(".")[2]


def owner_of(symbol: str) -> str:
    """The class around a symbol as a symbol, or the empty string."""
    module, _, qualname = symbol.partition(":")
    owner = qualname.rpartition(".")[0]
    return f"{module}:{owner}" if owner else ""


@lru_cache(maxsize=65536)
def words(name: str) -> frozenset[str]:
    """The words of a snake or camel case name."""
    return frozenset(w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name) if w)


@lru_cache(maxsize=65536)
def word_likeness(first: str, second: str) -> float:
    if first == second:
        return 1.0
    a, b = words(first), words(second)
    if not a or not b:
        return 0.0
    return 2 * len(a & b) / (len(a) + len(b))


@lru_cache(maxsize=262144)
def name_likeness(first: str, second: str) -> float:
    """How alike two last names are, from 0 to 1."""
    if first == second:
        return 1.0
    letters = SequenceMatcher(None, first.lower(), second.lower()).ratio()
    return 0.95 * max(word_likeness(first, second), letters - 0.1)


def signature_likeness(old: Record, new: Record) -> float | None:
    """How far the parameters' names agree; None where there are none to compare."""
    a = [p[0] for p in old.get("parameters", ()) if p[0] not in ("self", "cls")]
    b = [p[0] for p in new.get("parameters", ()) if p[0] not in ("self", "cls")]
    if not a and not b:
        return None
    if a == b:
        return 1.0
    return SequenceMatcher(None, a, b).ratio() * 0.5 + _dice(set(a), set(b)) * 0.5


def _dice(a: set[str], b: set[str]) -> float:
    return 2 * len(a & b) / (len(a) + len(b)) if a or b else 1.0


_FAMILY = {
    "function": "code", "method": "code", "staticmethod": "code", "classmethod": "code",
    "property": "code", "cached_property": "code", "class": "class", "attribute": "value",
}  # fmt: skip


def judge(
    old_symbol: str,
    old: Record,
    new_symbol: str,
    new: Record,
    *,
    owner_moved: bool = False,
    old_members: Mapping[str, Record] | None = None,
    new_members: Mapping[str, Record] | None = None,
    crowd: float = 0.0,
    twins: int = 0,
    namesakes: int = 0,
) -> Match | None:
    """Whether `new` is what became of `old`, and how sure that is.

    Args:
        old_symbol: Where it was.
        old: What it was.
        new_symbol: The candidate.
        new: What that is.
        owner_moved: The candidate's class is what became of the old one's class.
        old_members: Of a class, its methods; classes are known by them.
        new_members: The candidate's.
        crowd: How much the code of its old neighbours resembled it.
        twins: How many other symbols had its body.
        namesakes: How many other module-level symbols had its name.
    """
    mine, theirs = _FAMILY.get(old["kind"], ""), _FAMILY.get(new["kind"], "")
    same_name = last_name(old_symbol) == last_name(new_symbol)
    likeness = name_likeness(last_name(old_symbol), last_name(new_symbol))
    if mine != theirs:
        signature = signature_likeness(old, new)
        return _across(old, new, new_symbol, likeness, signature)
    around = _surroundings(old_symbol, new_symbol)
    members = None
    if mine == "class" and old_members:
        members = _members_alike(old_members, new_members or {})
    trivial = _trivial(old) and members is None
    if old["body_digest"] == new["body_digest"]:
        if mine == "value":
            return _value(old, new_symbol, same_name, likeness, around)
        if trivial and not (same_name and (owner_moved or around >= 0.5)):
            return None
        if twins and not owner_moved and not (same_name and around >= 0.6):
            return None  # a copy among copies
        if old["digest"] == new["digest"]:
            base, evidence = 0.93, "same body and signature"
        else:
            base, evidence = 0.88, "same body"
        if trivial:
            base, evidence = base - 0.15, f"{evidence}, but a short one"
        confidence = base + 0.04 * same_name + 0.03 * around
        return Match(
            symbol=new_symbol, confidence=round(min(confidence, 1.0), 2), evidence=evidence
        )
    if mine == "value":
        if same_name and around >= 0.3:
            return Match(symbol=new_symbol, confidence=0.6, evidence="same name, another value")
        return None
    code = similarity(old.get("sketch", ""), new.get("sketch", ""))
    if members is not None:
        code = members if _trivial(old) else 0.7 * members + 0.3 * code
    signature = signature_likeness(old, new)
    free = not owner_of(old_symbol) and not owner_of(new_symbol)
    # The only function of that name, with the same arguments, or much the same place.
    only = same_name and free and not namesakes and signature is not None and signature >= 0.75
    close = same_name and around >= 0.75
    if not (owner_moved or close or only) and code < crowd + _MARGIN:
        return None
    return _alike(
        new_symbol, code, signature, likeness, around, same_name, owner_moved, trivial, free
    )


def _members_alike(old: Mapping[str, Record], new: Mapping[str, Record]) -> float | None:
    """How far the methods of two classes agree; None where they are too short to say."""
    weights = {name: _tokens(record) for name, record in old.items()}
    if max(weights.values()) < _TRIVIAL_TOKENS:
        return None
    bodies = {record["body_digest"] for record in new.values()}
    total = 0.0
    for name, record in old.items():
        other = new.get(name)
        if record["body_digest"] in bodies:
            total += weights[name]
        elif other is not None:
            alike = similarity(record.get("sketch", ""), other.get("sketch", ""))
            total += weights[name] * alike
    return total / sum(weights.values())


def _alike(
    symbol: str,
    code: float,
    signature: float | None,
    likeness: float,
    around: float,
    same_name: bool,
    owner_moved: bool,
    trivial: bool,
    free: bool,
) -> Match | None:
    name = 0.7 * likeness + 0.3 * around
    shape = 0.5 if signature is None else signature
    confidence = 0.5 * code + 0.2 * shape + 0.3 * name
    evidence = f"similar code ({code:.2f})"
    if signature is not None:
        evidence += f", signature ({signature:.2f})"
    evidence += ", same name" if same_name else f", name ({likeness:.2f})"
    if owner_moved and same_name:
        confidence = max(confidence, 0.7)
        return Match(
            symbol=symbol, confidence=round(confidence, 2), evidence=f"its class moved; {evidence}"
        )
    if same_name and free:
        enough = code >= 0.25 or (around >= 0.6 and shape >= 0.6)
        if not trivial and around >= 0.3 and shape >= 0.75:
            # Rewritten, but still asked for by the same name with the same arguments.
            enough, confidence = True, max(confidence, 0.57)
    elif same_name:
        # `forward` of another class is another thing, unless the code says otherwise.
        enough = code >= (0.25 if around >= 0.6 else 0.5)
    else:
        enough = code >= 0.4
    if trivial and not same_name:
        return None
    if not same_name and likeness < 0.4 and code < 0.6:
        return None
    if not same_name and likeness < 0.6 and around < 0.6 and code < 0.95:
        return None  # another name in another place: the code has to be the same
    if confidence < ACCEPTED or not enough:
        return None
    return Match(symbol=symbol, confidence=round(min(confidence, 0.9), 2), evidence=evidence)


def _across(
    old: Record, new: Record, symbol: str, likeness: float, signature: float | None
) -> Match | None:
    """A class that became a function, or the other way round."""
    if {_FAMILY.get(old["kind"]), _FAMILY.get(new["kind"])} != {"class", "code"}:
        return None
    if "self" in [p[0] for p in (*old.get("parameters", ()), *new.get("parameters", ()))][:1]:
        return None  # a method is no factory
    if signature is None or signature < 0.5 or likeness < 0.55:
        return None
    confidence = round(0.3 + 0.3 * signature + 0.2 * likeness, 2)
    if confidence < ACCEPTED:
        return None
    evidence = (
        f"{old['kind']} became {new['kind']}; signature ({signature:.2f}), name ({likeness:.2f})"
    )
    return Match(symbol=symbol, confidence=confidence, evidence=evidence)


def _value(
    old: Record, symbol: str, same_name: bool, likeness: float, around: float
) -> Match | None:
    """A constant: an equal value alone says little, unless it is a long one."""
    long = len(old.get("value") or "") > 40
    if same_name:
        return Match(
            symbol=symbol, confidence=round(0.85 + 0.1 * around, 2), evidence="same name and value"
        )
    if long or likeness >= 0.7:
        confidence = round(0.6 + 0.2 * likeness, 2)
        return Match(symbol=symbol, confidence=confidence, evidence="same value")
    return None


def _trivial(record: Record) -> bool:
    """Whether a body says too little to know it by: `pass`, `return self.x`."""
    return _tokens(record) < _TRIVIAL_TOKENS


def _tokens(record: Record) -> int:
    """How many different tokens a body has, as far as its sketch can tell."""
    return len(record.get("sketch", "")) // _STEP


def _surroundings(old: str, new: str) -> float:
    """How alike what is around two symbols is: their class, else their module."""
    a, b = Symbol.parse(old), Symbol.parse(new)
    if a.owner and b.owner:
        if a.owner == b.owner:
            return 1.0
        return 0.9 * name_likeness(a.owner, b.owner)
    module = _module_likeness(a.module, b.module)
    return module * (0.6 if a.owner or b.owner else 1.0)


@lru_cache(maxsize=65536)
def _module_likeness(first: str, second: str) -> float:
    if first == second:
        return 1.0
    a, b = first.split("."), second.split(".")
    tail = name_likeness(a[-1], b[-1])
    shared = sum(1 for x, y in zip(a, b, strict=False) if x == y) / max(len(a), len(b))
    return 0.6 * tail + 0.4 * shared


def best(matches: Iterable[Match | None]) -> Match | None:
    """The most confident one; of equals the first by name, so that answers do not vary."""
    found = [m for m in matches if m is not None]
    return min(found, key=lambda m: (-m.confidence, m.symbol), default=None)


def find_again(
    symbol: str,
    old: Record,
    index: Index,
    *,
    before: Mapping[str, Record],
    earlier: Index | None = None,
    moved_owner: str | None = None,
    members: Mapping[str, Record] | None = None,
) -> Match | None:
    """What became of a symbol that is gone.

    Args:
        symbol: The symbol.
        old: Its record before.
        index: The symbols of the new version.
        before: The symbols of the old version: what was there before, with the same
            content, is no new home unless it is a twin into which this one was merged.
        earlier: The old version by content, as far as it is at hand.
        moved_owner: Where its class went, if that is known.
        members: Of a class, its methods.
    """
    if moved_owner:
        target = f"{moved_owner}.{last_name(symbol)}"
        record = index.records.get(target)
        if record is not None:
            match = judge(symbol, old, target, record, owner_moved=True)
            if match is not None:
                return match
    crowd = earlier.crowd(symbol, old) if earlier else 0.0
    twins = len(earlier.twins(symbol, old)) if earlier else 0
    namesakes = earlier.namesakes(symbol) if earlier else 0

    def judged(candidates: Iterable[str]) -> Match | None:
        return best(
            _judged(symbol, old, index, before, candidates, members, crowd, twins, namesakes)
        )

    holders = [
        owner_of(found)
        for member in (members or {}).values()
        if not _trivial(member)
        for found in index.same_body(member)[:_LIKELIEST]
    ]
    candidates = dict.fromkeys(
        [
            *(h for h in holders if h in index.records),
            *index.same_body(old)[: 4 * _LIKELIEST],
            *_limited(index.same_name(last_name(symbol))),
            *index.similar(old),
        ]
    )
    return judged(candidates) or judged(index.alike_in_name(symbol))


def _limited(symbols: list[str]) -> list[str]:
    """A name that half the package uses (`forward`) finds nothing by itself."""
    return symbols if len(symbols) <= 8 * _LIKELIEST else []


def _judged(
    symbol: str,
    old: Record,
    index: Index,
    before: Mapping[str, Record],
    candidates: Iterable[str],
    members: Mapping[str, Record] | None,
    crowd: float,
    twins: int,
    namesakes: int,
) -> Iterator[Match | None]:
    for candidate in candidates:
        record = index.records[candidate]
        was = before.get(candidate)
        match = judge(
            symbol,
            old,
            candidate,
            record,
            old_members=members,
            new_members=index.members(candidate) if members else None,
            crowd=crowd,
            # The twin it was merged into does not count against itself.
            namesakes=namesakes,
            twins=twins - (was is not None and was["body_digest"] == old["body_digest"]),
        )
        if match is None:
            continue
        if was is not None:
            # Merged: one of two copies is left. Of many copies none is a new home.
            twin = old["body_digest"] == record["body_digest"] == was["body_digest"]
            free = not owner_of(symbol) and last_name(symbol) == last_name(candidate)
            if not (twin and free) or _trivial(old) or twins > 1:
                continue
            match = Match(
                symbol=match.symbol,
                confidence=round(0.9 * match.confidence, 2),
                evidence=f"{match.evidence}; it was there before, too (merged)",
            )
        yield match
