"""Where policies come from: export directories, PyTorch, Python factories, checkpoints of LeRobot and openpi."""
