"""Symbol manifests that ship with patchkit: ``<package>/<version>.json`` beside this file."""
