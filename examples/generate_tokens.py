"""Token generation in your own loop: every step is yours. On the bundled model; or give a Hugging Face directory."""

import sys

from reflex_runtime import Priority, ReflexError
from reflex_runtime.demo import SCRIBE
from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.llm.engine.tokenizer import Conversation


def main() -> None:
    engine = LLMEngine(sys.argv[1] if len(sys.argv) > 1 else SCRIBE, max_num_batched_tokens=16, max_num_seqs=2)
    chat = engine.processor.tokenizer.chat
    ask = SamplingParams(max_tokens=60, temperature=0.7, seed=7)
    talks = [Conversation([{"role": "user", "content": f"What is a {word}?"}]) for word in ("batch", "feed", "ticket")]
    bulk = [engine.add_request(chat(talk), ask, priority=Priority.BACKGROUND) for talk in talks]
    for _ in range(3):
        engine.step()
    urgent = engine.add_request("Once there was", ask, priority=Priority.URGENT)  # takes a place from the bulk
    ended = []
    while engine.unfinished:
        for output in engine.step():
            ended.append(output.request_id)
            print(f"{output.request_id} ({output.finish_reason}): {output.text.strip()}")
    assert sorted(ended) == sorted([*bulk, urgent])
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except ReflexError as error:  # such as a missing library, with what to install
        sys.exit(error.message)
