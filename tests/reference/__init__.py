"""The equations once more: slow, explicit, in NumPy, importing nothing of the library."""
