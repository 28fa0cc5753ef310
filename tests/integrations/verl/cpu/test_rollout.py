"""The rollout server in this process: its methods are those Ray would call."""

import asyncio
import time

import pytest
import torch


@pytest.fixture(scope="module")
def settings(host_config):
    from verl.utils.config import omega_conf_to_dataclass

    config = host_config("actor_rollout_ref.rollout.max_model_len=60").actor_rollout_ref
    return omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model)


def serve(settings, conversation):
    """Run ``conversation(server)`` against a fresh server."""
    from verl_bridge.integrations.verl.cpu.rollout import RolloutServer

    async def session():
        server = RolloutServer(*settings, replica_rank=0)
        await server.launch_server()
        try:
            return await asyncio.wait_for(conversation(server), timeout=30)
        finally:
            server.serving.cancel()

    return asyncio.run(session())


def ask(server, prompt, **params):
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, **params}
    return server.generate(prompt_ids=list(prompt), sampling_params=sampling, request_id="any")


PROMPTS = [tuple(range(2, 3 + n % 7)) for n in range(40)]


def test_answers_many_at_once_each_with_its_own(settings, model):
    async def conversation(server):
        answers = [ask(server, p, max_tokens=1 + i % 9, temperature=i % 2) for i, p in enumerate(PROMPTS)]
        return await asyncio.gather(*answers)

    for i, output in enumerate(serve(settings, conversation)):
        assert 1 <= len(output.token_ids) == len(output.log_probs) <= 1 + i % 9
        assert output.stop_reason == "completed"
        assert len(output.token_ids) == 1 + i % 9 or output.token_ids[-1] == 1
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS[i], *output.token_ids]])).logits[0, len(PROMPTS[i]) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None]).squeeze(-1)
        assert output.log_probs == pytest.approx(expected.tolist(), abs=1e-5)
        if i % 2 == 0:
            assert output.token_ids == logits.argmax(-1).tolist()


def test_what_is_drawn_does_not_depend_on_the_order_of_arrival(settings):
    def conversation(order):
        async def run(server):
            outputs = await asyncio.gather(*[ask(server, PROMPTS[i], max_tokens=8) for i in order])
            drawn = {}
            for i, output in zip(order, outputs, strict=True):
                drawn.setdefault(PROMPTS[i], []).append(tuple(output.token_ids))
            # Requests with equal prompts may change places among themselves.
            return {prompt: sorted(texts) for prompt, texts in drawn.items()}

        return run

    forwards = serve(settings, conversation(range(40)))
    backwards = serve(settings, conversation(range(39, -1, -1)))
    assert forwards == backwards
    assert all(len(set(texts)) > 1 for texts in forwards.values())


def test_new_weights_draw_anew_and_say_their_version(settings, model):
    async def conversation(server):
        first = await ask(server, (2, 3, 4), max_tokens=10, ignore_eos=True)
        await server.load_weights(model.state_dict(), 7)
        second = await ask(server, (2, 3, 4), max_tokens=10, ignore_eos=True)
        await server.load_weights(model.state_dict(), 7)
        again = await ask(server, (2, 3, 4), max_tokens=10, ignore_eos=True)
        return first, second, again

    first, second, again = serve(settings, conversation)
    assert [o.extra_fields["global_steps"] for o in (first, second, again)] == [None, 7, 7]
    assert first.token_ids != second.token_ids == again.token_ids


def test_a_request_of_its_own_seed_repeats(settings):
    async def conversation(server):
        return [(await ask(server, (2, 3), max_tokens=12, seed=seed, ignore_eos=True)).token_ids for seed in (5, 5, 6)]

    first, again, other = serve(settings, conversation)
    assert first == again != other


def test_weights_are_replaced_and_checked(settings, model):
    changed = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    changed["lm_head.weight"] = changed["model.embed_tokens.weight"]
    untied = {name: tensor for name, tensor in changed.items() if name != "lm_head.weight"}
    wrong = [
        ({**changed, "model.other": torch.zeros(1)}, "unexpected .'model.other'"),
        ({n: t for n, t in changed.items() if n != "model.norm.weight"}, "missing .'model.norm.weight'"),
        ({**changed, "model.norm.weight": torch.zeros(3)}, "size mismatch"),
    ]

    async def conversation(server):
        before = (await ask(server, (2, 3, 4), max_tokens=10, temperature=0)).token_ids
        for weights, message in wrong:
            with pytest.raises(RuntimeError, match=message):
                await server.load_weights(weights, 1)
        await server.load_weights(untied, 2)
        return before, (await ask(server, (2, 3, 4), max_tokens=10, temperature=0)).token_ids

    before, after = serve(settings, conversation)
    model.load_state_dict(changed)
    ids = [2, 3, 4]
    with torch.no_grad():
        while len(ids) < 13 and ids[-1] != 1:
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    assert before != after == ids[3:]


def test_errors_reach_the_caller_and_the_server_goes_on(settings):
    async def conversation(server):
        with pytest.raises(ValueError, match="beam_width=3"):
            await ask(server, (2, 3), beam_width=3)
        with pytest.raises(ValueError, match=r"60 tokens leaves no room .*max_model_len=60"):
            await ask(server, [2] * 60)
        with pytest.raises(ValueError, match="only text"):
            await server.generate([2], {}, "id", image_data=[object()])
        # An id the embedding does not have fails inside the batch.
        with pytest.raises(IndexError):
            await ask(server, (2, 9999), max_tokens=2)
        return await ask(server, [2] * 59, max_tokens=50, ignore_eos=True)

    assert len(serve(settings, conversation).token_ids) == 1


def test_default_length_is_what_the_response_may_hold(settings):
    async def conversation(server):
        short = await ask(server, [2] * 5, ignore_eos=True)
        long = await ask(server, [2] * 50, ignore_eos=True)
        return len(short.token_ids), len(long.token_ids)

    # prompt_length 40, response_length 24, max_model_len 60: min(24, 64 - 50, 60 - 50) = 10.
    assert serve(settings, conversation) == (24, 10)


def test_abort_pause_reject_resume(settings):
    async def conversation(server):
        generate = server.generator

        def until_aborted(requests, aborted):
            while not aborted():
                time.sleep(0.001)
            return generate(requests, aborted)

        server.generator = until_aborted
        running = [asyncio.create_task(ask(server, p, max_tokens=24, ignore_eos=True)) for p in PROMPTS]
        await asyncio.sleep(0.05)
        aborted = await server.abort_all_requests()
        outputs = await asyncio.gather(*running)
        server.generator = generate
        late = asyncio.create_task(ask(server, (2, 3), max_tokens=2))
        await asyncio.sleep(0.05)
        assert not late.done()
        await server.resume_generation()
        late = await late
        await server.abort_all_requests(reject_request=True)
        rejected = await ask(server, (2, 3), max_tokens=2)
        await server.resume_generation()
        return aborted, outputs, late, rejected, await ask(server, (2, 3), max_tokens=2)

    aborted, outputs, late, rejected, last = serve(settings, conversation)
    assert aborted["aborted_count"] == 40
    assert {output.stop_reason for output in outputs} == {"aborted"}
    # One token for each row of the batch in progress, none for those that were waiting.
    assert sorted(len(output.token_ids) for output in outputs) == [0] * 8 + [1] * 32
    assert all(len(output.token_ids) == len(output.log_probs) for output in outputs)
    assert (late.stop_reason, last.stop_reason) == ("completed", "completed")
    assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])


def test_drain_waits_for_everything(settings):
    async def conversation(server):
        running = [asyncio.create_task(ask(server, p, max_tokens=5)) for p in PROMPTS]
        await asyncio.sleep(0)
        await server.wait_for_requests_to_drain()
        return sum(task.done() for task in running), server.in_flight

    assert serve(settings, conversation)[1] == 0


def test_other_log_prob_modes_are_refused(host_config):
    from verl.utils.config import omega_conf_to_dataclass

    from verl_bridge.integrations.verl.cpu.rollout import RolloutServer

    config = host_config("actor_rollout_ref.rollout.logprobs_mode=raw_logits").actor_rollout_ref
    with pytest.raises(ValueError, match="logprobs_mode='raw_logits'"):
        RolloutServer(omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model), 0)


def test_adapter_takes_full_weights_only(settings):
    from verl_bridge.integrations.verl.cpu.rollout import CPURollout

    rollout = CPURollout(*settings, device_mesh=None, replica_rank=0)
    with pytest.raises(ValueError, match=r"lora\.merge=True"):
        asyncio.run(rollout.update_weights(iter(()), peft_config={"r": 8}))
    with pytest.raises(ValueError, match="wire_format='delta_flush'"):
        asyncio.run(rollout.update_weights(iter(()), wire_format="delta_flush"))


def test_every_replica_has_a_server_of_its_own(settings, monkeypatch):
    """Ranks start at 0 for the policy, a reward model and each teacher; standalone ones go on where others end."""
    from types import SimpleNamespace

    from verl_bridge.integrations.verl.cpu import rollout

    async def launched():
        return None

    def start(config, model_config, rank, suffix=""):
        return SimpleNamespace(launch_server=SimpleNamespace(remote=launched))

    monkeypatch.setattr(rollout, "start_server", start)
    replicas = [
        rollout.CPURolloutReplica(0, *settings),
        rollout.CPURolloutReplica(1, *settings),
        rollout.CPURolloutReplica(0, *settings, is_reward_model=True),
        rollout.CPURolloutReplica(0, *settings, is_teacher_model=True),
        rollout.CPURolloutReplica(0, *settings, is_teacher_model=True, name_suffix="maths"),
    ]
    for replica in replicas:
        asyncio.run(replica.launch_servers())
    assert [replica.server_address for replica in replicas] == [
        "hf_cpu_server_0",
        "hf_cpu_server_1",
        "hf_cpu_server_0_reward",
        "hf_cpu_server_0_teacher",
        "hf_cpu_server_0_teacher_maths",
    ]
    # a standalone replica's worker sends weights to the server of its replica's rank
    adapter = rollout.CPURollout(*settings, device_mesh=None, replica_rank=1)
    monkeypatch.setattr(rollout.ray, "get_actor", lambda name: name)
    assert adapter._server() == replicas[1].server_address
