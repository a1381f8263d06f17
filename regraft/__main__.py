"""`python -m regraft` is the command line."""

from regraft.cli.main import main

if __name__ == "__main__":
    main()
