"""The policy type `reflex` of LeRobot: its actions come from `reflex serve`.

LeRobot imports every installed distribution whose name begins with `lerobot_policy_`. It finds the policy and the
processors in the modules beside that of the configuration, by name.
"""

from lerobot_policy_reflex.configuration_reflex import ReflexConfig
from lerobot_policy_reflex.modeling_reflex import ReflexPolicy
from lerobot_policy_reflex.processor_reflex import make_reflex_pre_post_processors

__all__ = ["ReflexConfig", "ReflexPolicy", "make_reflex_pre_post_processors"]
