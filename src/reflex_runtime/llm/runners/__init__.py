"""Runners compute a step of a language model: OpenVINO's on a CPU, PyTorch's on a GPU. Both read checkpoints."""
