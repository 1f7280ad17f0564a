"""The pure scheduler without any driver: you are the clock and the device. Token budget 8, two prompts of 11 and 7."""

from reflex_runtime import Done, FlushPolicy, GroupConfig, More, Request, Scheduler, TokenCost

OUTPUTS = 4


def main() -> None:
    group = GroupConfig(flush=FlushPolicy.every_step(max_num_batched_tokens=8), cost=TokenCost)
    scheduler = Scheduler([group])
    left = {scheduler.submit(Request(id=name, client=name, wants=n), 0.0): OUTPUTS for name, n in (("A", 11), ("B", 7))}
    now, step = 0.0, 0
    while (batch := scheduler.next_batch(now)) is not None:
        step += 1
        print(f"step {step}: " + ", ".join(f"{t.id} {units:g}" for t, units in batch.grants.items()))
        outcomes: list[Done | More] = []
        for ticket, units in batch.grants.items():
            if units < ticket.wants:  # a chunk of its prompt; the rest next time
                outcomes.append(More(wants=ticket.wants - units))
                continue
            left[ticket] -= 1  # its prompt is done: this step gave it a token
            outcomes.append(More(value="token") if left[ticket] else Done("end"))
        now += 0.01
        scheduler.complete(batch, outcomes, 0.01, now)
    assert scheduler.idle
    assert step == 6


if __name__ == "__main__":
    main()
