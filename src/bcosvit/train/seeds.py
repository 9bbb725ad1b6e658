"""Seeds for what must be random once and the same ever after."""

import hashlib


def mix(*numbers: int) -> int:
    """A seed that looks random, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
