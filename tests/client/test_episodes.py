"""Episodes and how their ends are reported, and the calls beside /act."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from reflex_runtime.client import BadRequest, NotFound, ProcessorFailed

from .callers import Make
from .stub import ANSWER, NAMED, Stub, refusal, reply


def test_health_is_an_answer_whatever_it_says(make: Make) -> None:
    loading = {"status": "loading", "state": "loading", "error": "cannot load"}
    with Stub([reply({"state": "ready"}), reply(loading, 503)]) as stub:
        caller = make(stub.url)
        assert caller.health()["state"] == "ready"
        assert caller.health() == loading
        assert [seen.path for seen in stub.seen] == ["/health"] * 2


def test_config_is_asked_again_whatever_happened_to_the_first_time(make: Make) -> None:
    with Stub([reply(b"Bad Gateway", 502), "close", reply({"server": {}})]) as stub:
        assert make(stub.url).get("/config") == {"server": {}}
        assert [(seen.method, seen.path) for seen in stub.seen] == [("GET", "/config")] * 3
    with Stub([refusal("unauthorized", 401, retry_safe=False)]) as stub, pytest.raises(BadRequest):
        make(stub.url).get("/config")


def test_other_paths_are_asked_and_told_in_json(make: Make) -> None:
    with Stub([reply({"split": 80}), reply({"split": 50}), refusal("invalid_request", 422, retry_safe=False)]) as stub:
        caller = make(stub.url)
        assert caller.get("/diagnostics/rollout") == {"split": 80}
        assert caller.post("/admin/split", {"split": 50}) == {"split": 50}
        with pytest.raises(BadRequest):
            caller.post("/admin/split", {"split": 500})
        asked = [(seen.method, seen.path, seen.body) for seen in stub.seen]
        assert asked[0] == ("GET", "/diagnostics/rollout", b"")
        assert asked[1][:2] == ("POST", "/admin/split")
        assert stub.seen[1].fields == {"split": 50}
        assert len(asked) == 3, "what may have been done is not done again"


OUTCOME = reply({"ok": True})


def told(stub: Stub) -> list[Any]:
    return [seen.fields for seen in stub.seen if seen.path.endswith("/outcome")]


def test_an_episode_carries_its_ids_and_reports_how_it_ended(make: Make) -> None:
    def body(episode: Any, act: Any) -> None:
        act(state=[1.0], **NAMED)
        act(state=[2.0], instruction="close it", **NAMED)
        episode.success, episode.reward = True, 0.5

    with Stub([reply(), reply(ANSWER | {"policy_changed": True}), OUTCOME]) as stub:
        episode = make(stub.url).episode(body, robot_id="r7", instruction="open it")
        assert [seen.path for seen in stub.seen] == ["/act", "/act", f"/episodes/{episode.episode_id}/outcome"]
    assert [seen.fields["instruction"] for seen in stub.seen[:2]] == ["open it", "close it"]
    assert {(seen.fields["episode_id"], seen.fields["robot_id"]) for seen in stub.seen[:2]} == {
        (episode.episode_id, "r7")
    }
    assert told(stub) == [{"success": True, "reward": 0.5, "robot_id": "r7"}]
    assert episode.reported
    assert episode.changed


def test_episode_ids_are_made_anew_and_escaped(make: Make) -> None:
    def done(episode: Any, act: Any) -> None:
        episode.success = True

    with Stub([OUTCOME] * 3) as stub:
        caller = make(stub.url)
        assert caller.episode(done).episode_id != caller.episode(done).episode_id
        caller.episode(done, episode_id="a/b ü?")
        assert stub.seen[2].path == "/episodes/a%2Fb%20%C3%BC%3F/outcome"


def test_an_exception_is_a_failure_unless_told_otherwise(make: Make) -> None:
    def breaks(episode: Any, act: Any) -> None:
        raise ZeroDivisionError

    def breaks_after_success(episode: Any, act: Any) -> None:
        episode.success = True
        raise ZeroDivisionError

    with Stub([OUTCOME, OUTCOME]) as stub:
        caller = make(stub.url)
        for body in (breaks, breaks_after_success):
            with pytest.raises(ZeroDivisionError):
                caller.episode(body)
    assert told(stub) == [{"success": False}, {"success": True}]


def test_a_policy_that_does_not_answer_fails_the_episode(make: Make) -> None:
    with Stub([refusal("processor_failed", 500, retry_safe=False), OUTCOME]) as stub:
        with pytest.raises(ProcessorFailed):
            make(stub.url).episode(lambda episode, act: act(state=[1.0]))
    assert told(stub) == [{"success": False}]


def test_nothing_is_reported_that_nobody_said(make: Make) -> None:
    def interrupted(episode: Any, act: Any) -> None:
        raise KeyboardInterrupt

    with Stub([]) as stub:
        caller = make(stub.url)
        assert not caller.episode(lambda episode, act: None).reported
        with pytest.raises(KeyboardInterrupt):
            caller.episode(interrupted)
        assert stub.seen == []


@pytest.mark.parametrize("reward", [0, np.float32(0.0), np.float32(1.0)])
def test_a_reward_may_be_any_number(make: Make, reward: Any) -> None:
    with Stub([OUTCOME]) as stub:
        make(stub.url).report_outcome("ep-1", np.True_, reward)
    assert told(stub) == [{"success": True, "reward": float(reward)}]


def test_a_report_that_fails_is_logged_and_hides_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def body(episode: Any, act: Any) -> None:
        episode.success = False
        raise ZeroDivisionError

    with Stub([refusal("not_found", 404, retry_safe=False)]) as stub, caplog.at_level(logging.WARNING, "reflex.client"):
        with pytest.raises(ZeroDivisionError):
            make(stub.url).episode(body, episode_id="ep-1")
    assert "the outcome of episode ep-1 (success=False) was not taken: not_found (404)" in caplog.text
    with Stub([refusal("not_found", 404, retry_safe=False)]) as stub, pytest.raises(NotFound):
        make(stub.url).report_outcome("ep-1", True)
    with pytest.raises(ValueError, match="reward=nan"):
        make("http://127.0.0.1:1").report_outcome("ep-1", True, float("nan"))
    with pytest.raises(ValueError, match="success='no': must be True or False"):
        make("http://127.0.0.1:1").report_outcome("ep-1", "no")


def test_a_wrong_outcome_does_not_replace_the_error_of_its_block(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def body(episode: Any, act: Any, fails: bool = True) -> None:
        episode.success = "no"
        if fails:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), caplog.at_level(logging.WARNING, "reflex.client"):
        make("http://127.0.0.1:1").episode(body)
    assert "success='no': must be True or False" in caplog.text
    with pytest.raises(ValueError, match="success='no'"):
        make("http://127.0.0.1:1").episode(lambda *given: body(*given, fails=False))
