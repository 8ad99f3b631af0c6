"""`python -m rayapp VERB FILE`, the entry point of `ray job submit --working-dir . -- ...`."""

from rayapp.cli import main

if __name__ == "__main__":
    main()
