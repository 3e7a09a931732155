"""What every room may use: checks of arguments, bits of numbers, files, patterns of paths, settings, tables of text."""
