"""Models that make one vector of a text: what their directories say, what computes them, and how texts are batched."""
