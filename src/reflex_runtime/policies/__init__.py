"""Robot policies: exports, how they run, what they remember."""
