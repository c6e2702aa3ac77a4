"""The command line: the only room that imports typer and rich."""
