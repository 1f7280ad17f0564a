"""The picture: one segment per grant while there is room, honest words when there is not, the same bytes every time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe import picture
from reflex_runtime.observe.journal import BatchLine, Footer, GroupInfo, Header, Journal, Member, plain
from reflex_runtime.observe.picture import BARS, NAMED, SEGMENTS, saved, write_pictures
from reflex_runtime.observe.trace_tables import PALETTE, Colours
from thinned import thinned

LLM = {"llm": GroupInfo("tokens", 8, 256)}
PROD = {"prod": GroupInfo("seconds", 0.1, 256)}
L3 = [{"A": 8}, {"A": 3, "B": 5}, {"A": 1, "B": 2}, {"A": 1, "B": 1}, {"A": 1, "B": 1}, {"B": 1}]


def member(seq: int, units: float = 1.0, **kw: Any) -> Member:
    values: dict[str, Any] = {"id": f"r{seq}", "client": "", "asked": units, "state": "waiting", "age": 0.004}
    return Member(seq=seq, units=units, **({"outcome": "done"} | values | kw))


def batch(number: int, members: list[Member], **kw: Any) -> BatchLine:
    values: dict[str, Any] = {
        "group": "prod", "partition": "", "stage": "", "reason": "timeout", "cause": "idle", "elapsed": 0.02,
        "at": number * 0.03, "finished": number * 0.03 + 0.02, "expected": 0.018, "cost": 0.018, "unit": "seconds",
        "queued": 0, "crashed": False, "left": [], "notes": {},
    } | kw  # fmt: skip
    return BatchLine(id=number, size=len(members), members=members, **values)


def tokens() -> list[BatchLine]:
    made, known = [], set()
    for number, step in enumerate(L3, 1):
        members = []
        for name, units in step.items():
            state = "resident" if name in known else "waiting"
            known.add(name)
            members.append(member(ord(name), units, id=name, state=state))
        made.append(batch(number, members, group="llm", unit="tokens", expected=None, cost=sum(step.values())))
    return made


def trace_of(batches: list[BatchLine], groups: dict[str, GroupInfo], dropped: int = 0) -> Journal:
    header = Header(started_at="2026-01-01T00:00:00.000Z", groups=groups)
    footer = Footer("", 0, len(batches), dropped)
    return Journal(Path("t.jsonl"), header, [], batches, [], [], {}, footer, False)


@pytest.fixture(autouse=True)
def _no_png(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The PNG is the same figure, and half of the time: one test looks at it."""
    if request.function is not test_the_same_trace_gives_the_same_bytes:
        whole = picture.drawn

        def drawn(figure: Any, format: str, **options: Any) -> bytes:
            return b"" if format == "png" else whole(figure, format=format, **options)

        monkeypatch.setattr(picture, "drawn", drawn)


def draw(tmp_path: Path, trace: Journal, batches: Sequence[BatchLine] | None = None) -> str:
    svg, png = write_pictures(trace, trace.batches if batches is None else batches, tmp_path / "p")
    assert (svg.name, png.name) == ("p.svg", "p.png")
    ElementTree.parse(svg)
    return svg.read_text()


def gids(svg: str, start: str) -> list[str]:
    found = (e.get("id") or "" for e in ElementTree.fromstring(svg).iter())
    return [i for i in found if i.startswith(start)]


def words(svg: str) -> str:
    return " | ".join("".join(e.itertext()) for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text"))


def test_l10_one_segment_per_grant(tmp_path: Path) -> None:
    svg = draw(tmp_path, trace_of(tokens(), LLM))
    grants = [f"grant-{i}-{ord(name)}" for i, step in enumerate(L3, 1) for name in step]
    assert gids(svg, "grant-") == grants
    told = words(svg)
    assert "24 tokens of 2 requests in 6 batches" in told
    for text in ("▸A 8", "▸B 5", "A 3", "budget 8 tokens", "one colour per request"):
        assert text in told
    assert gids(svg, "ceiling") == ["ceiling"]


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    pictures = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        draw(tmp_path / name, trace_of(tokens(), LLM))
        pictures.append([(tmp_path / name / f"p.{kind}").read_bytes() for kind in ("svg", "png")])
    assert pictures[0] == pictures[1]
    assert pictures[0][1].startswith(b"\x89PNG")
    assert len(pictures[0][1]) > 9_000


def test_cause_and_prediction_are_told(tmp_path: Path) -> None:
    batches = [batch(1, [member(1)]), batch(2, [member(2)], reason="budget_reached", cause="size_reached")]
    told = words(draw(tmp_path, trace_of(batches, PROD)))
    for text in ("I  idle 1", "S  size_reached 1", "measured", "predicted", "median"):
        assert text in told


def test_stages_have_a_strip_where_there_are_several(tmp_path: Path) -> None:
    batches = [batch(i, [member(i)], stage="denoise" if i % 4 else "prefix") for i in range(1, 81)]
    trace = trace_of(batches, PROD)
    svg = draw(tmp_path, trace)
    assert "prefix 20" in words(svg)
    assert "denoise 60" in words(svg)
    assert len(gids(svg, "stage-")) == 80
    assert len({gid.split("#")[1] for gid in gids(svg, "stage-")}) == 2
    one = draw(tmp_path, trace, [b for b in batches if b.stage == "denoise"])
    assert gids(one, "stage-") == []


def test_groups_are_told_apart_where_there_are_several(tmp_path: Path) -> None:
    batches = [
        batch(i, [member(i)], stage="denoise" if i % 4 else "prefix", group="b" if i % 8 < 2 else "a")
        for i in range(1, 81)
    ]
    svg = draw(tmp_path, trace_of(batches, {}))
    for told in ("a prefix 10", "a denoise 50", "b prefix 10", "b denoise 10"):
        assert told in words(svg)
    assert len({gid.split("#")[1] for gid in gids(svg, "stage-")}) == 4


def test_who_entered_is_marked_where_there_is_no_room_to_write(tmp_path: Path) -> None:
    batches = [batch(i, [member(i // 4, state="resident" if i % 4 else "waiting")]) for i in range(80)]
    svg = draw(tmp_path, trace_of(batches, PROD))
    assert gids(svg, "entered")
    assert "▸ entered from the queue with this batch" in words(svg)
    marks = [g for g in ElementTree.fromstring(svg).iter() if g.get("id") == "entered"]
    assert sum(e.tag.endswith("}use") for g in marks for e in g.iter()) == 20


def test_a_connection_is_host_and_number(tmp_path: Path) -> None:
    clients = ["127.0.0.1 #3", "::1 #4", "('not', 'one')"]
    batches = [batch(i, [member(i, client=client)]) for i, client in enumerate(clients)]
    told = words(draw(tmp_path, trace_of(batches, PROD)))
    for text in ("127.0.0.1 #3", "::1 #4", "('not', 'one')"):
        assert text in told


def test_callers_text_cannot_break_the_picture(tmp_path: Path) -> None:
    odd = ["$x_1$", "<svg>&amp;", "bell\x07\nline", "机器人", "\ud800", "x" * 300]
    batches = [batch(i, [member(i, id=name, client=name)]) for i, name in enumerate(odd, 1)]
    told = words(draw(tmp_path, trace_of(batches, PROD)))
    assert "$x_1$" in told
    assert "<svg>&amp;" in told
    assert "bell··line" in told
    assert "x" * 17 + "…" in told


def test_of_thousands_of_batches_the_newest_are_drawn_and_the_picture_says_so(tmp_path: Path) -> None:
    batches = [batch(i, [member(3 * i + k, client=f"robot_{k}") for k in range(1 + i % 3)]) for i in range(1, 5001)]
    svg = draw(tmp_path, trace_of(batches, PROD))
    for told in ("in 160 of 5,000 batches", "the newest; --from ID --to ID shows others"):
        assert told in words(svg)
    assert {gid.split("-")[1] for gid in gids(svg, "grant-")} == {str(i) for i in range(5001 - BARS, 5001)}
    assert len(svg) < 1_000_000
    assert all(f"robot_{k}" in words(svg) for k in range(3))


@pytest.mark.long
def test_of_many_grants_in_few_batches_those_are_drawn_for_which_there_is_room(tmp_path: Path) -> None:
    batches = [batch(i, [member(64 * i + k, client=f"c{k % 4}") for k in range(64)]) for i in range(1, 61)]
    assert len(gids(draw(tmp_path, trace_of(batches, PROD)), "grant-")) == SEGMENTS // 64 * 64
    one = [batch(1, [member(k) for k in range(SEGMENTS + 1)])]
    assert len(gids(draw(tmp_path, trace_of(one, PROD)), "grant-")) == SEGMENTS + 1


def test_of_too_many_clients_the_first_are_named(tmp_path: Path) -> None:
    batches = [batch(i, [member(i, client=f"c{i}")]) for i in range(100)]
    told = words(draw(tmp_path, trace_of(batches, PROD)))
    assert f"and {99 - NAMED} more" in told
    assert "colours repeat after 36" in told
    assert "entered from the queue" in told


@pytest.mark.parametrize("clients", thinned([30, 100], [30]))
def test_all_that_is_said_is_in_the_picture(clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second line where one is too long."""
    ends: list[float] = []

    def measured(prefix: Path, draw: Any, hint: str) -> tuple[Path, Path]:
        def drawn() -> Any:
            figure = draw()
            ends.extend(text.get_window_extent().x1 / figure.bbox.x1 for text in figure.texts)
            return figure

        return saved(prefix, drawn, hint)

    monkeypatch.setattr("reflex_runtime.observe.picture.saved", measured)
    batches = [batch(i, [member(i, client=f"c{i % clients}")]) for i in range(2 * BARS)]
    draw(tmp_path, trace_of(batches, PROD, dropped=12_345))
    assert max(ends) <= 1.0


def test_dropped_batches_and_a_far_budget_are_told(tmp_path: Path) -> None:
    batches = [batch(1, [member(1)])]
    told = words(draw(tmp_path, trace_of(batches, PROD, dropped=12)))
    assert "12 batches were never written and are missing" in told
    few = [batch(1, [member(1, 7.0)], group="llm", unit="tokens")]
    far = {"llm": GroupInfo("tokens", 2048.0, 256)}
    assert "budget 2048 tokens is off the scale" in words(draw(tmp_path, trace_of(few, far)))


def test_a_window_says_so_and_keeps_the_colours_of_clients(tmp_path: Path) -> None:
    batches = [batch(i, [member(i, client=f"robot_{i % 5}")]) for i in range(1, 21)]
    trace = trace_of(batches, PROD)
    late = batches[-3:]
    assert "3 requests in 3 of 20 batches" in words(draw(tmp_path, trace, late))
    whole, window = Colours.of(trace, batches), Colours.of(trace, late)
    assert [whole.hex(m) for b in late for m in b.members] == [window.hex(m) for b in late for m in b.members]
    assert whole.by == "client"


def test_colours_are_one_per_member_and_then_repeat() -> None:
    one_client = [batch(i, [member(i, client="x")]) for i in range(25)]
    colours = Colours.of(trace_of(one_client, PROD), one_client)
    assert colours.by == "request"
    assert [colours.index(b.members[0]) for b in one_client] == list(range(25))
    assert colours.hex(one_client[len(PALETTE)].members[0]) == PALETTE[0]


def test_groups_of_different_units_are_drawn_in_requests(tmp_path: Path) -> None:
    mixed = [batch(1, [member(1)]), batch(2, [member(2, 7.0)], group="llm", unit="tokens")]
    svg = draw(tmp_path, trace_of(mixed, PROD | LLM))
    assert gids(svg, "grant-") == ["grant-1-1", "grant-2-2"]
    assert "requests per batch" in words(svg)
    assert "tokens per step" in words(draw(tmp_path, trace_of(mixed, PROD | LLM), mixed[1:]))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    trace = trace_of(tokens(), LLM)
    with pytest.raises(ConfigError, match=r"--out=.*/no/p: cannot be written: there is no directory .*; make it first"):
        write_pictures(trace, trace.batches, tmp_path / "no" / "p")


def test_batches_without_entries_estimates_or_time_are_drawn(tmp_path: Path) -> None:
    batches = [batch(1, [member(1, state="resident")], expected=None, cost=None, elapsed=0.0)]
    assert "requests per batch" in words(draw(tmp_path, trace_of(batches, {})))
    batches[0].unit = None
    assert "requests per batch" in (drawn := words(draw(tmp_path, trace_of(batches, {}))))
    assert "1 request in 1 batch | " in drawn
    batches[0].members[0].units = 3.0
    assert "units per batch" in words(draw(tmp_path, trace_of(batches, {})))


def test_plain_text_is_one_line() -> None:
    assert plain("a\tb") == "a·b"
    assert plain("0123456789", 5) == "0123…"
