"""An image classifier in PyTorch that loads on its device: `reflex serve python:torch_classifier:Classifier`.

curl localhost:8000/predict --data-binary @picture.jpg         (its weights are random)
"""

import numpy as np
import torch
from PIL.Image import Image

KINDS = ("cat", "dog", "bird")


class Classifier:
    def setup(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 5, 4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
            torch.nn.Linear(8, len(KINDS)),
        ).to(device).eval()  # fmt: skip

    def predict(self, pictures: list[Image]) -> list[dict[str, float]]:
        """The probability of each kind."""
        pixels = np.stack([np.asarray(picture.resize((64, 64))) for picture in pictures])
        with torch.inference_mode():
            batch = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2).float() / 255
            shares = self.model(batch).softmax(1).tolist()
        return [dict(zip(KINDS, row, strict=True)) for row in shares]
