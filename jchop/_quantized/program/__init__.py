"""A function of parameters as its traced program: which parameters reach which products, and the rule of each."""
