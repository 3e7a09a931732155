"""Code that the faces of NNX, Linen and Equinox share."""
