"""The colours of all pictures."""

NORMAL, SUBNORMAL, INK, LOST = "#31688e", "#d95f02", "#333333", "#b2182b"
BARS = (NORMAL, SUBNORMAL, LOST, "#7b3294")
