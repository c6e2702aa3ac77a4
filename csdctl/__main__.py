"""`python -m csdctl`: the command line where `csdctl` is not on the PATH, as in a notebook."""

from csdctl.cli.app import main

if __name__ == "__main__":
    main()
