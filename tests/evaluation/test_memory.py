"""The process's resident memory, and its peak since it was begun anew."""

import torch

from verl_bridge.evaluation.memory import reset_peak, resident_bytes


def test_the_peak_is_that_of_the_part_since_the_reset():
    reset_peak()
    before = resident_bytes("VmRSS")
    block = torch.ones(16 * 2**20)  # 64 MiB
    del block
    assert 60 * 2**20 < resident_bytes("VmHWM") - before < 80 * 2**20
    reset_peak()
    assert resident_bytes("VmHWM") - before < 20 * 2**20
