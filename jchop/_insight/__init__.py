"""What a number format does to a program: reports, blame, digits, searches, comparisons."""
