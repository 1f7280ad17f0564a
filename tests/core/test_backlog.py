"""The totals of what waits, against a list of it."""

from __future__ import annotations

from random import Random

from reflex_runtime.core.cost import SLACK, Backlog
from reflex_runtime.core.request import Priority, Request, Ticket

UNIT = 2.0**-10  # seconds: sums of multiples are exact


def test_the_totals_are_those_of_the_waiting_tickets_however_they_come_and_go() -> None:
    random = Random(5)
    backlog = Backlog()
    waiting: dict[Ticket, float] = {}  # not background, and measured

    def of(tickets: list[Ticket]) -> float:
        return sum(waiting.get(ticket, 0.0) for ticket in tickets)

    for seq in range(3000):
        grows = seq % 60 < 30  # it fills, and is empty now and then
        if random.random() < (0.7 if grows else 0.2):
            ticket = Ticket(Request(client=random.randrange(5), priority=Priority(random.randrange(3))), seq, 0.0)
            seconds = random.choice((0, 1, 2, 5)) * UNIT
            backlog.add(ticket, seconds)
            if seconds and ticket.request.priority is not Priority.BACKGROUND:
                waiting[ticket] = seconds
            elif random.random() < 0.5:
                backlog.remove((ticket,))  # it was not counted
        elif waiting:
            ticket = random.choice(list(waiting))
            backlog.remove((ticket,))
            del waiting[ticket]
        leaving = random.sample(list(waiting), min(len(waiting), random.randrange(3)))
        assert backlog.seconds == of(list(waiting))
        for priority in Priority:
            ahead = [t for t in waiting if t.request.priority <= priority and t not in leaving]
            assert backlog.ahead(priority, leaving) == of(ahead)
        client, more, most = random.randrange(6), random.randrange(4) * UNIT, random.randrange(1, 40) * UNIT
        own = of([t for t in waiting if t.request.client == client and t not in leaving])
        clients = len({t.request.client for t in waiting} | {client})
        assert backlog.exceeds_share(client, more, most, leaving) is (own + more > most / clients * SLACK)


def test_what_came_and_went_leaves_no_rounding_behind() -> None:
    backlog = Backlog()
    tickets = [Ticket(Request(), seq, 0.0) for seq in range(3)]
    for ticket, seconds in zip(tickets, (0.1, 0.2, 0.3), strict=True):
        backlog.add(ticket, seconds)
    backlog.remove(tickets)
    assert backlog.seconds == 0.0
