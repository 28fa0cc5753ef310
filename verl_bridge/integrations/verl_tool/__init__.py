"""Integration with verl-tool (TIGER-AI-Lab/verl-tool, not on PyPI), which vendors a verl 0.7 of its own.

Written for and tested with one commit of it; the contract tests compare every signature used here with a checkout that
``VERL_TOOL_HOME`` points to. Nothing of verl-tool is imported before it is needed.
"""

REPOSITORY = "https://github.com/TIGER-AI-Lab/verl-tool"
#: The commit that the contract tests were run with.
COMMIT = "980962b4b8af660eb96421df9ecf603a2f790570"

#: ``--tool_type`` of the tool server.
TOOL = "verl_bridge_search"
#: ``actor_rollout_ref.rollout.agent.default_agent_loop``.
AGENT_LOOP = "verl_bridge_search"
#: ``reward_model.reward_manager``.
REWARD_MANAGER = "verl_bridge_em"
#: ``algorithm.adv_estimator`` while GCA is on: our trainer sets it itself.
ESTIMATOR = "verl_bridge_prepared"
