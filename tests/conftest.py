"""verl picks its platform once, when it is first imported: every test process is a CPU process."""

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
