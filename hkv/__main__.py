"""`python -m hkv`: the command line."""

from hkv.cli import main

if __name__ == "__main__":
    main()
