"""What the commands of the command line do; `jchop.__main__` reads the arguments."""
