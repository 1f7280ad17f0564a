"""Several policies behind one port: which answers, how they do, and what follows from it."""
