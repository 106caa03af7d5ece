"""patchkit."""
