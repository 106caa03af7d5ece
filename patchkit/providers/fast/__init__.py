"""Faster variants of reference providers on the CPU, with the same bits.

A profile that wants one names it::

    [providers]
    allow = ["patchkit.providers.fast"]

    [providers.use]
    selected_token_logprobs = "patchkit.providers.fast"

It is admitted by ``patchkit admit patchkit.providers.fast`` (``admissions.json`` beside
this file): only with the bits of the reference, on the hardware and the versions where
that was seen.
"""

from __future__ import annotations

from patchkit.providers.fast.logprobs import selected_token_logprobs

# Read from the source, by whoever checks a profile without importing torch.
IMPLEMENTS = "patchkit.providers"
DEVICE = "cpu"
CASES = "patchkit.bindings.fast_cases:cases"

__all__ = ["selected_token_logprobs"]
