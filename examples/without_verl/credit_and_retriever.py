"""GCA and BRIDGE as plain torch functions, for a trainer that is not verl.

Four rollouts of one question, told as traces: two find the evidence (one answers right, one wrong), one guesses right
without it, one finds nothing. GCA turns the group's advantages into token-level ones; BRIDGE moves the query vector of
a retriever towards the document that makes the gold answer likely.

Run: python examples/without_verl/credit_and_retriever.py
"""

import torch

from verl_bridge.algorithms.bridge import bridge_loss, retrieval_log_probs, standardised_outcome
from verl_bridge.algorithms.gca import grounded_advantages
from verl_bridge.algorithms.grounding import TurnTable, index_groups, segment_map
from verl_bridge.credit import batch_signals
from verl_bridge.trace import SearchTrace, SearchTurn

LENGTH = 12  # response tokens: search 0-3, observation 4-8, answer 9-11


def trace(passage: str, answer: str) -> SearchTrace:
    """A search turn, what came back, and an answer turn."""
    search = SearchTurn(
        "search", (0, 4), query="capital of Peru", status="ok", candidate_ids=("lima", "quito"),
        candidate_scores=(0.6, 0.5), shown=1, observation_span=(4, 9), observation=passage, adapter_version=0,
    )  # fmt: skip
    final = SearchTurn("answer", (9, 12))
    return SearchTrace("Capital of Peru?", ("Lima",), (search, final), answer, (10, 11), "answer", LENGTH)


def grounded() -> torch.Tensor:
    """Token-level advantages of the group, (batch, response)."""
    evidence, noise = "Lima is the capital of Peru.", "Quito is the capital of Ecuador."
    traces = [trace(evidence, "Lima"), trace(evidence, "Cusco"), trace(noise, "Lima"), trace(noise, "Quito")]
    mask = torch.ones(len(traces), LENGTH)
    mask[:, 4:9] = 0  # observations were not sampled

    groups = index_groups(["question 1"] * len(traces))
    signals = batch_signals(traces, groups)
    rewards = signals.correct.float()
    base = standardised_outcome(rewards, groups).unsqueeze(1) * mask  # GRPO: one advantage per rollout
    segments = segment_map(TurnTable.of([each.turns for each in traces]), signals.first_hit_turn, mask)
    return grounded_advantages(base, mask, segments, signals.types, groups, rewards, group_relative=True).advantages


def retriever_step(steps: int = 20) -> tuple[float, float]:
    """The gold document's retrieval probability before and after some BRIDGE updates."""
    documents = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2], [0.2, 1.0]]), dim=-1)
    query = torch.nn.Parameter(torch.tensor([[0.5, 0.6]]))  # stands for the adapter's output
    mask = torch.ones(1, 2, dtype=torch.bool)
    likelihood = torch.tensor([[-0.3, -4.0]])  # log-likelihood of the gold answer given each document, in nats
    advantage = torch.tensor([0.87])
    optimizer = torch.optim.AdamW([query], lr=0.05, weight_decay=0.0)

    def log_probs() -> torch.Tensor:
        return retrieval_log_probs(torch.nn.functional.normalize(query, dim=-1) @ documents.T, mask)

    before = log_probs().exp()[0, 0].item()
    for _ in range(steps):
        scores = torch.nn.functional.normalize(query, dim=-1) @ documents.T
        old = log_probs().detach()  # the adapter that served this step's rollouts
        loss = bridge_loss(scores, old, likelihood, advantage, mask).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return before, log_probs().exp()[0, 0].item()


if __name__ == "__main__":
    torch.set_printoptions(precision=3, sci_mode=False, linewidth=120)
    print("advantages: search tokens | observation | answer tokens")
    print(grounded())
    before, after = retriever_step()
    print(f"probability of the gold document: {before:.3f} -> {after:.3f}")
