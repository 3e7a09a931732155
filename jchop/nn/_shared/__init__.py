"""What the faces of NNX, Linen and Equinox share."""
