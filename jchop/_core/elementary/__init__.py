"""Elementary functions to some 45 bits in pairs of float32 numbers, rounded once; no float64 is used."""
