"""The name of a symbol: ``package.module:Qual.name``."""

from __future__ import annotations

from dataclasses import dataclass

from patchkit.symbols.errors import MalformedSymbolError


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    """A name inside a module, as entry points write it.

    Example:
        >>> s = Symbol.parse("vllm.v1.sample.sampler:Sampler.forward")
        >>> s.package, s.name, str(s)
        ('vllm', 'forward', 'vllm.v1.sample.sampler:Sampler.forward')
    """

    module: str
    qualname: str

    @classmethod
    def parse(cls, text: str | Symbol) -> Symbol:
        """Read ``package.module:Qual.name``; anything else is a MalformedSymbolError."""
        if isinstance(text, Symbol):
            return text
        module, colon, qualname = text.partition(":")
        if not colon:
            raise MalformedSymbolError(text, "there is no colon between module and name")
        for part, what in ((module, "module"), (qualname, "name")):
            if not part:
                raise MalformedSymbolError(text, f"the {what} is empty")
            for piece in part.split("."):
                if not piece.isidentifier():
                    raise MalformedSymbolError(text, f"{piece!r} in the {what} is no identifier")
        return cls(module, qualname)

    @property
    def package(self) -> str:
        """The top-level import package."""
        return self.module.partition(".")[0]

    @property
    def name(self) -> str:
        """The last name."""
        return self.qualname.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """The qualified name of the class around it, or the empty string."""
        return self.qualname.rpartition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"
