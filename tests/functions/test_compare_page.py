"""docs/compare-functions.md: the code of the page answers, and its table says what this server does."""

import re
from pathlib import Path

import numpy as np

from .door import Functions

PAGE = Path(__file__).parents[2] / "docs" / "compare-functions.md"


def test_the_code_answers_and_one_wrong_item_is_refused_alone(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    code = dict(re.findall(r"^```python\n# (\w+).*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert list(code) == ["Reflex", "LitServe", "mosec"]
    weights = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    path = tmp_path / "weights.npy"
    np.save(path, weights)
    (tmp_path / "classify.py").write_text(code["Reflex"].replace('"weights.npy"', repr(str(path))))
    here = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    with Functions("python:classify:Classifier", before=here) as server:
        items: list[list[object]] = [[float(i), 2.0, 3.0, 4.0] for i in range(8)]
        items[3] = ["a", 2, 3, 4]
        wrong = server.predict("", items[3])
        assert (wrong.status, wrong.code) == (422, "invalid_request")
        with server.together("", items) as burst:
            burst.send()
            found = [answer.status for answer in burst.answers()]
        assert found == [422 if i == 3 else 200 for i in range(8)]
        asked = [server.predict("", item) for i, item in enumerate(items) if i != 3]
    good = np.array([item for i, item in enumerate(items) if i != 3], np.float32)
    assert [answer.json for answer in asked] == (good @ weights).argmax(1).tolist()
