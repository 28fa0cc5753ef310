"""verl-tool's agent loop with exact spans: its own rollout, and one :class:`SearchTrace` about it."""

from __future__ import annotations

from typing import Any

from verl_tool.agent_loop.agent_loop import AgentLoopOutput
from verl_tool.agent_loop.verltool_agent_loop import VerlToolAgentLoop

from verl_bridge.integrations.verl_tool.traces import ObservationTokenizer, RecordingManager, complete


class BridgeAgentLoop(VerlToolAgentLoop):
    """Named in ``agent_loop.yaml`` beside this file, for ``actor_rollout_ref.rollout.agent.agent_loop_config_path``."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Roll out one question; see :func:`~verl_bridge.integrations.verl_tool.traces.complete`."""
        self.server_manager = recorder = RecordingManager(self.server_manager)
        tokenizer, self.tokenizer = self.tokenizer, ObservationTokenizer(self.tokenizer)
        output = await super().run(sampling_params, **kwargs)
        complete(output, tokenizer, recorder.generations, kwargs)
        return output
