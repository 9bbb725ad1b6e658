"""The web demo and its HTTP API."""
