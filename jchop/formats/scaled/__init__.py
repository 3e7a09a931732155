"""Formats whose groups share a scale: their fields, texts, groups and rules of scales."""
