"""The learner's optimiser: learning rate over updates, weight decay, gradient norm."""

import math

import pytest
import torch

from tests.bilevel.places import PLACES, batch_of, warm


def rates(updater, count, **batch):
    return [
        updater.update(batch_of(PLACES[:1], version=updater.encoder.adapter_version, neighbours=0, **batch)).metrics[
            "bridge/lr"
        ]
        for _ in range(count)
    ]


def test_the_learning_rate_follows_its_schedule_over_updates(fresh):
    assert rates(fresh(lr=1e-4), 2) == [1e-4, 1e-4]
    assert rates(fresh(lr=1e-4, lr_warmup=2), 3) == pytest.approx([0.5e-4, 1e-4, 1e-4])
    # up over two, down over three, and still at 0 beyond the end
    expected = [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    linear = fresh(lr=1e-4, lr_schedule="linear", lr_warmup=2, total_updates=5)
    assert rates(linear, 7) == pytest.approx([1e-4 * share for share in expected])
    # a warm-up of one update is none
    for warmup in (0, 1):
        linear = fresh(lr=1e-4, lr_schedule="linear", lr_warmup=warmup, total_updates=2)
        assert rates(linear, 3) == pytest.approx([1e-4, 0.5e-4, 0.0])
    cosine = fresh(lr=1e-4, lr_schedule="cosine", total_updates=4, minibatch_size=1, epochs=2)
    expected = [(1 + math.cos(math.pi * min(step, 4) / 4)) / 2 for step in range(7)]
    assert rates(cosine, 7) == pytest.approx([1e-4 * share for share in expected], abs=1e-15)


def test_a_constant_rate_does_not_mind_how_many_updates_there_are(fresh):
    """A run shorter than the interval between updates has none, and starts all the same."""
    for settings in ({"total_updates": 0}, {"total_updates": 1}, {"total_updates": 1, "lr_warmup": 4}):
        updater = fresh(lr=1e-4, **settings)
        assert rates(updater, 3) == pytest.approx([1e-4 * min(1, i / settings.get("lr_warmup", 1)) for i in (1, 2, 3)])


def test_the_first_update_of_a_warm_up_moves_the_adapter(fresh):
    for settings in ({"lr_warmup": 1}, {"lr_warmup": 3}, {"lr_warmup": 1, "lr_schedule": "linear", "total_updates": 1}):
        updater = fresh(lr=1e-3, **settings)
        assert updater.update(batch_of(PLACES[:2])).metrics["bridge/adapter_drift"] > 1e-5


def test_schedules_that_do_not_fit_are_refused(fresh):
    for settings, message in (
        ({"lr_schedule": "step"}, "lr_schedule='step' is not one of constant, linear, cosine"),
        ({"lr_schedule": "linear"}, "lr_schedule='linear' ends somewhere: give total_updates"),
        (
            {"lr_schedule": "cosine", "total_updates": 0},
            "total_updates is 0, where lr_schedule='cosine' needs at least",
        ),
        ({"lr_schedule": "linear", "lr_warmup": 6, "total_updates": 5}, "lr_warmup=6 does not fit 5 updates"),
        ({"lr_warmup": -1}, "lr_warmup is -1; use at least 0"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh(**settings)


def test_weight_decay_pulls_on_the_adapter_alone(fresh):
    """AdamW's first step is lr·sign(gradient), whatever its size; decay takes lr·decay of the weight on top."""
    plain, decayed = fresh(lr=1e-3), None
    warm(plain.encoder)
    start = plain.encoder.adapter_state()
    plain.update(batch_of(PLACES[:3]))
    without = plain.encoder.adapter_state()
    decayed = fresh(lr=1e-3, weight_decay=0.5)
    decayed.encoder.set_adapter_state(start, 0)
    decayed.update(batch_of(PLACES[:3]))
    for name, value in decayed.encoder.adapter_state().items():
        torch.testing.assert_close(value, without[name] - 1e-3 * 0.5 * start[name], atol=1e-6, rtol=0)


def test_gradients_are_scaled_down_to_the_norm(fresh):
    seen = []

    def norm_before_the_step(limit):
        updater = fresh(max_grad_norm=limit)
        parameters = updater.parameters.values()
        updater.learner.optimizer.step = lambda: seen.append(
            math.sqrt(sum(p.grad.square().sum().item() for p in parameters))
        )
        return updater.update(batch_of(PLACES[:3])).metrics["bridge/grad_norm"]

    free = norm_before_the_step(1e9)
    assert norm_before_the_step(free / 4) == pytest.approx(free)  # what is logged is the norm before
    assert seen == [pytest.approx(free, rel=1e-4), pytest.approx(free / 4, rel=1e-4)]
