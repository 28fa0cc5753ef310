"""Python loads this at its start: verl-tool imports vLLM and tools for video and sound wherever it trains.

Modules of theirs that are not installed are empty ones, whose every name is an empty class. Nothing calls them here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

NAMES = ("vllm", "torchvision", "qwen_omni_utils", "librosa", "soundfile", "decord")
# a folder of tests may bear such a name, too
ROOTS = [name for name in NAMES if getattr(importlib.util.find_spec(name), "origin", None) is None]


class _Module(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ROOTS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__version__ = "0.11.0"
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Absent())
