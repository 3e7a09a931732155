"""Matrix products: accumulators and packed operands."""
