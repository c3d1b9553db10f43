"""The command line, `dcnet`: every file in `commands` is a command, every folder there a group of them."""
