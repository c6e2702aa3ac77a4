"""One file per command: parse the options, call one workflow, show the result."""
