"""`python:module:make`: what a factory made is served, and what is wrong with it is one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.cli import main
from reflex_runtime.cli.serving import kind_of
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import DeviceOptions, load_policy, read_source
from reflex_runtime.robots.analysis.doctor import examine
from reflex_runtime.robots.policy.spec import Embodiment, PolicySpec
from reflex_runtime.robots.policy.tokenizer import WordTokenizer
from reflex_runtime.robots.policy.units import Norm, frozen
from reflex_runtime.robots.sources.load import weight_of
from reflex_runtime.robots.versions.slots import warmed_up
from serving.harness import Server
from serving.requests import busy

LISTS: Any = [[-1, 1], [-1, 1]]

# A model in plain NumPy: a chunk that depends on state, picture and noise.
MODEL = '''
import sys
import numpy as np
from reflex_runtime.robots import DeviceOptions, PolicySpec, StagedModel, WholeModel

SPEC = PolicySpec(model_id="mine", staged=False, images={"image": (4, 4)}, takes_state=True, state_dim=2,
                  chunk_size=3, action_dim=2, config={"trained": "yesterday"})

class Mine(WholeModel):
    def chunk(self, rows, noise):
        light = np.array([row.images["image"].mean() / 255 for row in rows], np.float32)
        state = np.stack([row.state for row in rows])
        return noise * 0.1 + state[:, None, :] + light[:, None, None]

calls = []

def make(device):
    calls.append(device)
    return Mine(SPEC)

class Mixing(Mine):
    """Rows influence each other."""
    def chunk(self, rows, noise):
        made = super().chunk(rows, noise)
        return made + made.mean(axis=0) * len(rows)

def mixing(device):
    return Mixing(SPEC)

def nothing():
    return Mine(SPEC)

def broken(device):
    return {}["weights"]

def wrong(device):
    return "a model"

def refused(device):
    from reflex_runtime.core.errors import ConfigError
    raise ConfigError("weights.pt: not found")

def leaves(device):
    print("a word on standard output")
    sys.exit()

def talks(device):
    print("a word on standard output")
    return Mine(SPEC)

def unsaid(device):
    class Unsaid(WholeModel):
        def __init__(self): pass
    return Unsaid()

def crossed(device):
    import dataclasses
    return Mine(dataclasses.replace(SPEC, staged=True))

class NoStep(StagedModel):
    def prefix(self, rows): pass
    def pack(self, prefixes, rows): pass
    def stepp(self, packed, x, k, n): pass

def no_step(device):
    import dataclasses
    return NoStep(dataclasses.replace(SPEC, staged=True))

class Unwell(WholeModel):
    def chunk(self, rows, noise):
        return noise * np.nan

def unwell(device):
    return Unwell(SPEC)

class AtTimes(WholeModel):
    def chunk(self, rows, noise):
        return np.where(noise[:, :1, :1] > 0, noise, np.nan)

def at_times(device):
    return AtTimes(SPEC)

class Reader(WholeModel):
    """Like a graph that masks padding, which is the id of unknown words too."""
    def chunk(self, rows, noise):
        read = np.array([(row.tokens != 0).any() for row in rows])
        return np.where(read[:, None, None], noise, np.nan)

def reader(device):
    import dataclasses
    from reflex_runtime.robots.policy.tokenizer import WordTokenizer
    words = WordTokenizer({"[PAD]": 0, "[UNK]": 1, "open": 7})
    return Reader(dataclasses.replace(SPEC, takes_text=True, max_tokens=2, tokenizer=words))

class Own:
    """A tokenizer of one's own needs no more than these."""
    def row(self, text, most):
        return np.full(most, len(text)), np.full(most, True), 0
    def unknown(self, text):
        return []

def own_words(device):
    import dataclasses
    return Reader(dataclasses.replace(SPEC, takes_text=True, max_tokens=2, tokenizer=Own()))

class NoChunk(WholeModel): pass

def no_chunk(device):
    return NoChunk(SPEC)

value = 3
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the module, and the current one."""
    (tmp_path / "my_policy.py").write_text(MODEL)
    (tmp_path / "needs_more.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "needs_sklearn.py").write_text("import sklearn\n")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    (tmp_path / "with_error.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit('no licence')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as for an installed command
    for name in ("my_policy", "needs_more", "needs_sklearn", "with_error", "leaves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_p4_a_factory_is_called_once_with_the_device_and_opened(here: Path) -> None:
    device = DeviceOptions(threads=2)
    policy = load_policy(read_source("python:my_policy:make", device), device=device)
    assert sys.modules["my_policy"].calls == [device]
    assert (policy.spec.source, policy.spec.model_id) == ("python:my_policy:make", "mine")
    assert len(policy.spec.model_hash) == len(policy.spec.config_hash) == 16
    state = [0.25, -1.0]
    seen = policy.prepare(images={"image": np.full((8, 8, 3), 255, np.uint8)}, state=state, request_id="r")
    (chunk,) = policy.answers([policy.request(seen)])
    assert chunk.actions == pytest.approx(policy._noise(seen) * 0.1 + np.float32(state) + 1.0, abs=1e-6)
    assert weight_of("python:my_policy:make") == ("python:my_policy:make", 0)


def test_p4_a_factory_may_take_nothing(here: Path) -> None:
    assert load_policy("python:my_policy:nothing").spec.model_id == "mine"


def test_p4_another_device_is_another_model(here: Path) -> None:
    spec = read_source("python:my_policy:make")
    other = DeviceOptions(threads=2)
    assert spec.open(other) is not spec.open(DeviceOptions())
    assert sys.modules["my_policy"].calls == [DeviceOptions(), other]


WRONG = {
    "python:my_policy": "must be python:package.module:function",
    "python::make": "must be python:package.module:function",
    "python:no_such_module:make": "there is no module 'no_such_module': run reflex in the directory that contains it",
    "python:needs_more:make": "there is no module 'no_such_package_anywhere': install it with pip",
    "python:needs_sklearn:make": "there is no module 'sklearn': pip install scikit-learn",
    "python:with_error:make": "with_error cannot be imported: ZeroDivisionError: division by zero (with_error.py",
    "python:my_policy:nowhere": "my_policy has no 'nowhere'",
    "python:my_policy:value": "value has no method predict(self, items)",
    "python:leaves:make": "leaves cannot be imported: SystemExit: no licence (leaves.py, line 1)",
    "python:my_policy:leaves": "the factory failed: SystemExit (my_policy.py",
    "python:my_policy:broken": "the factory failed: KeyError: 'weights' (my_policy.py",
    "python:my_policy:wrong": "made a str, expected a StagedModel or a WholeModel",
    "python:my_policy:refused": "python:my_policy:refused: weights.pt: not found",
    "python:my_policy:unsaid": "the model has no spec; call super().__init__(spec) with a PolicySpec",
    "python:my_policy:crossed": "spec.staged is True, but it made a WholeModel",
    "python:my_policy:no_step": "python:my_policy:no_step: NoStep has no step(packed, x, k, n); define it",
    "python:my_policy:no_chunk": "python:my_policy:no_chunk: NoChunk has no chunk(rows, noise); define it",
}


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("()", ""), ("(device)", ""), ("(device: DeviceOptions)", ""), ("(d: DeviceOptions)", ""),
        ("(d: 'robots.DeviceOptions')", ""), ("(devices)", "functions"), ("(items: list[str])", "functions"),
    ],
)  # fmt: skip
def test_p5_a_factory_is_known_by_its_argument(here: Path, head: str, kind: str) -> None:
    Path("heads.py").write_text(f"def make{head}: ...\n")
    assert (kind_of(["python:heads:make"]) == "functions") == (kind == "functions")


@pytest.mark.parametrize("source", WRONG)
def test_p5_what_is_wrong_is_one_line_that_says_what_to_do(
    here: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", source, "--no-supervise", "--port", "0"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert WRONG[source] in told[0]


def test_p5_a_policy_is_warmed_up_with_a_word_that_it_knows(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("reader", "own_words"):
        warmed_up(load_policy(f"python:my_policy:{name}"))
    assert not caplog.messages
    (actions,) = (check for check in examine("python:my_policy:reader").checks if check.id == "actions")
    assert actions.status == "pass", actions


def test_p5_a_policy_none_of_whose_actions_are_numbers_is_refused(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warmed_up(load_policy("python:my_policy:make"))
    assert not caplog.messages
    warmed_up(load_policy("python:my_policy:at_times"))
    assert "python:my_policy:at_times: NaN or infinity in some answers" in caplog.text
    with pytest.raises(ConfigError, match=r"^python:my_policy:unwell: NaN or infinity in all its answers"):
        warmed_up(load_policy("python:my_policy:unwell"))


@pytest.mark.parametrize("words", ["--policy arm=python:no_such:make --policy hand=demo", "python:no_such:make --rtc"])
def test_p5_a_missing_module_is_named_beside_options_of_policies(
    here: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words.split(), "--no-supervise", "--port", "0"]) == 2
    assert "there is no module 'no_such'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_id": " "}, "PolicySpec.model_id: found \" \", expected a text"),
        ({"action_dim": 0}, "PolicySpec.action_dim: found 0, expected an integer in [1, 1000000]"),
        ({"num_denoising_steps": 1001}, "PolicySpec.num_denoising_steps: found 1001, expected an integer in [1, 1000]"),
        ({"chunk_size": "16"}, 'PolicySpec.chunk_size: found "16", expected an integer in'),
        ({"images": ["image"]}, 'PolicySpec.images: found ["image"], expected a dict of (height, width) by name'),
        ({"images": {"image": 224}}, "expected of image (height, width), each in [1, 4096]"),
        ({"images": {"image": (0, 4)}}, "expected of image (height, width), each in [1, 4096]"),
        ({"x_dim": 1}, "PolicySpec.x_dim: found 1, expected at least action_dim, 2"),
        ({"state_dim": 0}, "PolicySpec.state_dim: found 0, expected at least 1, because the policy reads a state"),
        ({"images": {}, "takes_state": False}, "expected one, or takes_state or takes_text"),
        ({"staged": True, "horizon": 9}, "PolicySpec.horizon: found 9, expected none in a decomposed policy"),
        ({"images": {}, "takes_state": False, "takes_text": True, "observation_steps": 2}, "expected 1, because there"),
        ({"action_norm": Norm(frozen([0.0]), frozen([1.0]))}, "action_norm: found [[1], [1]], expected a Norm"),
        ({"action_norm": {"mean": [0.0]}}, "action_norm: found [[], []], expected a Norm with offset and scale"),
        ({"state_norm": Norm.of_range(np.zeros(9), np.ones(9))}, "PolicySpec.state_norm: found [[9], [9]], expected"),
        ({"embodiment": Embodiment(action_ranges=np.float32([[-1, 1]]))}, "found [1, 2], expected action_ranges"),
        ({"embodiment": Embodiment(action_ranges=LISTS)}, "expected action_ranges, an array of shape"),
        ({"embodiment": Embodiment(action_names=("a",))}, 'embodiment: found ["a"], expected 2 action_names'),
        ({"takes_text": True, "tokenizer": WordTokenizer({"go": 1})}, "PolicySpec.max_tokens: found 0, expected at"),
        ({"optional_images": frozenset({"roof"})}, 'PolicySpec.optional_images: found "roof", expected names of'),
    ],
)
def test_p5_a_spec_that_cannot_be_is_refused(here: Path, change: dict[str, object], told: str) -> None:
    from dataclasses import replace

    spec = load_policy("python:my_policy:make").model.spec
    with pytest.raises(ConfigError) as error:
        replace(spec, **change)  # type: ignore[arg-type]
    assert told in error.value.message


def test_p5_a_norm_of_lists_is_one() -> None:
    norm: Any = Norm([0.5, 0.5], [1.0, 2.0])  # type: ignore[arg-type]
    spec = PolicySpec(model_id="it", staged=False, action_dim=2, chunk_size=1, takes_text=True, action_norm=norm)
    assert spec.action_norm is not None
    assert spec.action_norm.denormalise(np.ones((1, 2), np.float32)).tolist() == [[1.5, 2.5]]


def test_p6_the_doctor_tells_json_alone_however_much_a_model_prints(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "python:my_policy:talks", "--format", "json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["checks"]
    assert "a word on standard output" in err


def test_p6_the_doctor_runs_what_a_factory_made(here: Path) -> None:
    good = examine("python:my_policy:make")
    found = {check.id: check for check in good.checks}
    assert list(found) == [
        "config", "embodiment", "memory", "model_load", "actions", "cameras", "determinism", "batch_parity",
        "rtc_boundary", "clock",
    ]  # fmt: skip
    assert good.exit_code == 0
    assert found["config"].actual.startswith("mine, custom, monolithic")
    mixing = {check.id: check.status for check in examine("python:my_policy:mixing").checks}
    assert mixing["batch_parity"] == "fail"
    broken = {check.id: check for check in examine("python:my_policy:broken").checks}
    assert (broken["config"].status, broken["actions"].status) == ("fail", "skip")
    assert "KeyError: 'weights'" in broken["config"].actual


def test_p4_it_is_served_in_one_batch_like_an_export(here: Path) -> None:
    inside = f"import os; os.chdir({str(here)!r})"
    with Server("python:my_policy:make", before=inside, held=True) as server:
        body = {"image": white_picture(), "state": [0.5, 0.5]}
        with busy(server, **body):
            answers = server.behind([{**body, "request_id": f"r{i}"} for i in range(4)])
        assert [answer.status for answer in answers] == [200] * 4
        assert {answer.json["batch"]["size"] for answer in answers} == {4}
        assert answers[0].json["inference_mode"] == "monolithic"
        assert server.get("/config").json["export"] == {"trained": "yesterday"}
        assert server.get("/health").json["export_dir"] == "python:my_policy:make"


def white_picture() -> str:
    from base64 import b64encode
    from io import BytesIO

    import PIL.Image

    file = BytesIO()
    PIL.Image.new("RGB", (4, 4), (255, 255, 255)).save(file, "PNG")
    return b64encode(file.getvalue()).decode()



def test_p14_the_name_of_a_checkpoint_on_a_hub_is_told_how_to_download(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_source("lerobot:lerobot/smolvla_base")
    assert "hf download lerobot/smolvla_base --local-dir smolvla_base" in error.value.message
    assert error.value.message.endswith("then: reflex serve lerobot:./smolvla_base")
    with pytest.raises(ConfigError, match="not found, expected a checkpoint of LeRobot, with its config"):
        read_source(f"lerobot:{tmp_path}/nowhere")


def test_the_model_without_pytorch_of_the_page_answers(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()
    (code,) = (block.partition("```")[0] for block in page.split("```python\n") if "class Still" in block)
    (tmp_path / "my_policy.py").write_text(code)
    with Server("python:my_policy:make", before=f"import sys; sys.path.insert(0, {str(tmp_path)!r})") as server:
        answer = server.post({"state": [0.1] * 7})
        assert answer.json["actions"] == [pytest.approx([0.1] * 7)] * 16
