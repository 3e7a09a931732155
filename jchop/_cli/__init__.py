"""The commands of the command line; `jchop.__main__` parses the arguments."""
