"""``python -m bcosvit``: the command line where no script is installed, e.g. under torchrun."""

from bcosvit.cli import main

if __name__ == "__main__":
    main()
