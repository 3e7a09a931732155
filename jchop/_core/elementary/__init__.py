"""Elementary functions to 36 bits and more in pairs of float32 numbers, rounded once; no float64 is used."""
