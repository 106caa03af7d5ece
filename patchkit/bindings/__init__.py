"""How the shared operators sit in vLLM's and transformers' own classes.

``patchkit.providers`` knows numbers; this package knows layers. An adapter for
another model of a known family picks declarations from here and writes no
replacement of its own:

- :mod:`patchkit.bindings.vllm_cpu`: patches of vLLM's shared layers, ready made;
- :mod:`patchkit.bindings.transformers`: makers of patches for a model's classes;
- :mod:`patchkit.bindings.settings`: what of a ``config.json`` they cover;
- :mod:`patchkit.bindings.operators`: the same operators for the conformance kit;
- :mod:`patchkit.bindings.tiny`: small random checkpoints.

Importing this package, or the first three, imports neither torch nor vLLM nor
transformers. Only adapters import it.
"""

from __future__ import annotations
