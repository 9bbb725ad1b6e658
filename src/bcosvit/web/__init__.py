"""The web page of `bcosvit serve` and its HTTP API."""
