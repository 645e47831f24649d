"""`python -m megalith` is the `megalith` command."""

from megalith.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
