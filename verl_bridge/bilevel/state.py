"""A learner's state as named tensors and numbers: to bytes, to a folder, and back only when all of it fits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from verl_bridge.files import new_folder
from verl_bridge.retrieval.encoder import QueryEncoder

Tensors = dict[str, torch.Tensor]
_NUMBERS = "numbers"  # JSON as a tensor of bytes, where there is one file for all
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class LearnerState:
    """What an updater needs to go on as if never interrupted.

    Args:
        adapters: adapter states by name: ``adapter``, ``initial``, ``served/<version>`` and, with two states,
            ``lower``; each has a tensor for every adapter parameter.
        moments: AdamW's state by name, ``optimizer`` or ``lower_optimizer``: per parameter its fields, or empty.
        rng: state of the generator.
        numbers: counters and figures.
    """

    adapters: dict[str, Tensors] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensors]] = field(default_factory=dict)
    rng: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    numbers: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """All tensors on the CPU, by flat name."""
        flat = {"rng": self.rng}
        for name, state in self.adapters.items():
            flat |= {f"{name}/{parameter}": value for parameter, value in state.items()}
        for name, moments in self.moments.items():
            for parameter, fields in moments.items():
                flat |= {f"{name}/{key}/{parameter}": value for key, value in fields.items()}
        return {name: value.detach().cpu().contiguous() for name, value in flat.items()}

    @classmethod
    def of(cls, tensors: Tensors, numbers: Mapping[str, float]) -> LearnerState:
        """The inverse of :meth:`tensors`; raises ValueError for a name of no known kind."""
        state = cls(numbers=dict(numbers))
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if name == "rng":
                state.rng = value
            elif kind == "served":
                version, _, parameter = rest.partition("/")
                state.adapters.setdefault(f"served/{version}", {})[parameter] = value
            elif kind in ("adapter", "initial", "lower"):
                state.adapters.setdefault(kind, {})[rest] = value
            elif kind in ("optimizer", "lower_optimizer"):
                key, _, parameter = rest.partition("/")
                state.moments.setdefault(kind, {}).setdefault(parameter, {})[key] = value
            else:
                raise ValueError(f"it holds a tensor {name!r}, which is not part of an updater's state")
        return state

    def check(self, parameters: Mapping[str, torch.Tensor], *, lower: bool, counters: Mapping[str, int]) -> None:
        """Raises ValueError when it is not whole or made for other parameters, or another kind of updater.

        Args:
            parameters: the adapter's, by name.
            lower: whether the updater keeps a second state.
            counters: whole numbers that have to be there, by name.
        """
        shapes = {name: value.shape for name, value in parameters.items()}
        served = {name for name in self.adapters if name.startswith("served/")}
        if any(not name.removeprefix("served/").isdecimal() for name in served):
            raise ValueError(f"it keeps adapter versions {sorted(served)}, which are not numbers")
        needed = {"adapter", "initial", *(["lower"] if lower else [])}
        if self.adapters.keys() - served != needed:
            raise ValueError(
                f"it holds the adapter states {sorted(self.adapters.keys() - served)} where {sorted(needed)} are "
                "needed: use the estimator it was saved with (verl_bridge.bridge.estimator)"
            )
        for name, state in self.adapters.items():
            if {key: value.shape for key, value in state.items()} != shapes:
                raise ValueError(
                    f"its adapter state {name!r} has other parameters or shapes; use the encoder and lora_rank it "
                    "was saved with"
                )
            _check_numbers(name, state)
        for name, moments in self.moments.items():
            if name == "lower_optimizer" and not lower:
                raise ValueError("it holds the moments of a second state; use the estimator it was saved with")
            if moments.keys() != shapes.keys():
                raise ValueError(f"its moments {name!r} are not those of the adapter's parameters")
            for parameter, fields in moments.items():
                expected = dict.fromkeys(("exp_avg", "exp_avg_sq"), shapes[parameter]) | {"step": torch.Size([])}
                if {key: value.shape for key, value in fields.items()} != expected:
                    raise ValueError(f"its moments {name!r} of {parameter} have other fields or shapes")
                _check_numbers(name, fields)
        try:
            torch.Generator().set_state(self.rng)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"its generator state cannot be used ({error})") from error
        for key in counters:
            value = self.numbers.get(key)
            if type(value) is not int or value < 0:
                raise ValueError(f"its number {key!r} is {value!r}; a whole number of at least 0 is needed")
        share = self.numbers.get("first_top1_share", 1.0)
        if type(share) is not float or not 0 <= share <= 1:
            raise ValueError(f"its number 'first_top1_share' is {share!r}; a share from 0.0 to 1.0 is needed")
        first = self.numbers.get("first_top1_documents", 1)
        if type(first) is not int or first < 1:
            raise ValueError(f"its number 'first_top1_documents' is {first!r}; a whole number of at least 1 is needed")

    # ---- bytes and folders ------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """All of it as one safetensors file."""
        from safetensors.torch import save

        numbers = torch.tensor(list(json.dumps(self.numbers).encode()), dtype=torch.uint8)
        return save(self.tensors() | {_NUMBERS: numbers})

    @classmethod
    def from_bytes(cls, data: bytes) -> LearnerState:
        """The inverse of :meth:`to_bytes`. Raises ValueError for damaged bytes."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(data)
            numbers = bytes(tensors.pop(_NUMBERS).tolist())
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error
        return cls.of(tensors, _read_numbers(numbers))

    def save(self, directory: str | os.PathLike, encoder: QueryEncoder) -> None:
        """Writes ``adapter/`` (PEFT format), ``updater.safetensors`` and ``updater.json``; appears when complete.

        The encoder says how its adapters are built; the weights are the state's. What was there before stays until
        then. Raises OSError that names the folder when it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {name: value for name, value in self.tensors().items() if not name.startswith("adapter/")}
        try:
            with new_folder(directory) as folder:
                encoder.save_adapter(folder / "adapter", self.adapters["adapter"])
                save_file(tensors, folder / "updater.safetensors")
                (folder / "updater.json").write_text(json.dumps(self.numbers, indent=2) + "\n")
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"the retriever checkpoint {directory} could not be written ({error}); what it held before is "
                "unchanged: make room or choose another folder"
            ) from error

    @classmethod
    def load(cls, directory: str | os.PathLike, encoder: QueryEncoder) -> LearnerState:
        """What :meth:`save` wrote for such an encoder. Raises ValueError for a missing or damaged file."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        directory = Path(directory)
        for name in ("updater.json", "updater.safetensors", "adapter/adapter_model.safetensors"):
            if not (directory / name).is_file():
                raise ValueError(f"{name} is missing; give a folder that an updater saved")
        try:
            tensors = load_file(directory / "updater.safetensors")
            adapter = load_file(directory / "adapter" / "adapter_model.safetensors")
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"a safetensors file is damaged ({error})") from error
        names = {file: name for name, file in encoder.file_names().items()}
        tensors |= {f"adapter/{names.get(key, key)}": value for key, value in adapter.items()}
        return cls.of(tensors, _read_numbers((directory / "updater.json").read_bytes()))


def optimizer_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """A copy of AdamW's state by parameter name; empty before its first step."""
    known = {name: optimizer.state[parameter] for name, parameter in parameters.items() if parameter in optimizer.state}
    return {name: {key: fields[key].detach().clone() for key in _MOMENTS} for name, fields in known.items()}


def set_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], moments: Mapping[str, Tensors]
) -> None:
    """Replaces AdamW's state; its step counts stay on the CPU, where it keeps them."""
    optimizer.state.clear()
    for name, fields in moments.items():
        parameter = parameters[name]
        for key, value in fields.items():
            optimizer.state[parameter][key] = value.clone() if key == "step" else value.to(parameter.device).clone()


def _read_numbers(text: bytes) -> dict[str, float]:
    try:
        numbers = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its numbers are not JSON ({error})") from error
    if not isinstance(numbers, dict):
        raise ValueError("its numbers are not a JSON object")
    return numbers


def _check_numbers(name: str, tensors: Tensors) -> None:
    for key, value in tensors.items():
        if not value.is_floating_point() or not value.isfinite().all():
            raise ValueError(f"{key} in {name!r} does not hold finite floating-point numbers")
