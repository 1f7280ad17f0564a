"""Processors that change nothing: the server normalises observations and actions."""

from __future__ import annotations

from typing import Any

from lerobot.processor import PolicyProcessorPipeline
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action


def make_reflex_pre_post_processors(config: Any, dataset_stats: Any = None) -> tuple[Any, Any]:
    """Two empty pipelines: for observations and for actions."""
    return (
        PolicyProcessorPipeline(steps=[], name="policy_preprocessor"),
        PolicyProcessorPipeline(
            steps=[],
            name="policy_postprocessor",
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        ),
    )
