"""Helpers for every room: checks of arguments, bits of numbers, files, patterns of paths, settings, tables of text."""
