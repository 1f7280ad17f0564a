"""A client with two requests behind one with 24, in vLLM's own engine: `python vllm_fair.py MODEL [--stock]`."""

import sys
import time

try:
    from vllm import EngineArgs, LLMEngine, SamplingParams
except ImportError:
    print("this example needs vLLM 0.32, and a model: python vllm_fair.py MODEL")
    sys.exit(0)


def main(model: str, stock: bool) -> None:
    if stock:
        engine = LLMEngine.from_engine_args(EngineArgs(model=model, max_num_seqs=8))
    else:
        ours = {"reflex": {"trace": "steps.jsonl"}}
        arguments = EngineArgs(
            model=model,
            max_num_seqs=8,
            scheduler_cls="reflex_runtime.vllm.Scheduler",
            additional_config=ours,
        )
        engine = LLMEngine.from_engine_args(arguments)
    clients = ["heavy"] * 24 + ["light"] * 2
    first: dict[str, float] = {}
    began = time.monotonic()
    for i, client in enumerate(clients):
        asked = SamplingParams(max_tokens=64, ignore_eos=True, extra_args={"client": client})
        engine.add_request(f"{client}-{i}", f"Tell me story number {i}.", asked)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, time.monotonic() - began)
    engine.engine_core.shutdown()
    for client in ("heavy", "light"):
        seconds = sorted(took for name, took in first.items() if name.startswith(client))
        print(f"{client}: last first token after {seconds[-1]:.2f} s; all done after {time.monotonic() - began:.2f} s")
    if not stock:
        print("what every step was: reflex trace steps.jsonl")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(__doc__)
    else:
        main(sys.argv[1], "--stock" in sys.argv)
