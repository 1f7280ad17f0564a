"""The table of what each rule brings: every rule can be switched off, and that has an effect where it should."""

from __future__ import annotations

import pytest
from bench.sim import ablation
from bench.sim.__main__ import main


def test_every_rule_is_switched_off_and_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    load = next(load for load in ablation.loads() if load.name == "8 callers")
    monkeypatch.setattr(ablation, "loads", lambda: [load])
    whole = ablation.Figures.of(load, 3.0, 1)
    for rule in ablation.rules():
        with ablation.without([rule]):
            load.run(1.5, 0)
    assert ablation.Figures.of(load, 3.0, 1) == whole
    row = ablation.rule_row("returns", {load.name: whole}, 3.0, 1, lambda _: None)
    assert row.startswith("returns: 8 callers ")
    assert ablation.rule_row("prices", {load.name: whole}, 3.0, 1, lambda _: None) == "prices: nothing above 0.0%"


def test_a_rule_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablation", "--rules", "returns+luck"]) == 2
    assert "--rules=luck: must be of returns," in capsys.readouterr().err
