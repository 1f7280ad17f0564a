"""A model of scikit-learn: `reflex serve python:sklearn_model:Iris` in this directory.

curl localhost:8000/predict -d '[5.1, 3.5, 1.4, 0.2]'
"""

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression


class Iris:
    """The kind of an iris by its four lengths in centimetres."""

    example = (5.1, 3.5, 1.4, 0.2)

    def setup(self) -> None:
        data = load_iris()
        self.kinds = data.target_names
        self.model = LogisticRegression(max_iter=500).fit(data.data, data.target)

    def predict(self, flowers: list[NDArray[np.float64]]) -> list[str]:
        return [str(self.kinds[kind]) for kind in self.model.predict(np.stack(flowers))]
