"""The command line: thin, without logic of its own."""
