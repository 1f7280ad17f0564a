"""Tries every architecture of tests/llm/models.py on both runners and prints the table of docs/language-models.md.

    PYTHONPATH=tests python tools/architectures.py

Random weights, four prompts of which three share a beginning, in chunks, with a prefix cache and preemption; "equal"
is the same 16 greedy tokens of each as from `transformers`. A minute of one core, or two.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from llm.models import Oracle, random_checkpoint
from llm.test_architectures import SERVED, prompts, run
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner
from reflex_runtime.llm.runners.openvino_tracing import convert
from reflex_runtime.llm.runners.torch_runner import TorchRunner


def main() -> None:
    alike: dict[tuple[str, str], list[str]] = {}
    for kind in SERVED:
        with tempfile.TemporaryDirectory() as place:
            path, target = random_checkpoint(kind, Path(place) / "checkpoint"), Path(place) / "graph"
            target.mkdir()
            oracle = Oracle(path)
            expected = [oracle.greedy(prompt, 16) for prompt in prompts()]
            try:
                convert(path, target)
                found = run(OpenVinoRunner(target, num_blocks=5, threads=1))
                converted = "equal" if found[0] == expected and found[1] else "DIFFERENT"
            except ConfigError as error:
                converted = "refused: bounded scores" if "bounds its attention scores" in error.message else str(error)
            found = run(TorchRunner(path, num_blocks=9, block_size=16))
            plain = "equal" if found[0] == expected and found[1] else "DIFFERENT"
            alike.setdefault((converted, plain), []).append(kind)
    print("| architecture | converted to OpenVINO | on PyTorch |\n| --- | --- | --- |")
    for cells, kinds in alike.items():
        print(f"| {', '.join(kinds)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
