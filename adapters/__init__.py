"""Adapters that ship with patchkit, imported as ``patchkit_adapters``."""
