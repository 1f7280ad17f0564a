"""LeRobot checkpoints as policies: `checkpoint` reads the files, `staged` and `whole` run LeRobot's own code."""
