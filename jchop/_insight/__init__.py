"""The effects of a number format on a program: reports, blame, digits, searches, comparisons."""
