"""The fused dot-add of tensor cores: in two words of 32 bits for every device, or in float64 for one CPU."""
