"""Models as files that need no Python: logits and contributions in one graph."""
