"""What runs a step of a language model: OpenVINO on a CPU, PyTorch on a GPU, and the checkpoints that both read."""
