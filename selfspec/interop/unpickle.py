"""Turn a pickled checkpoint into safetensors, in a process of its own: `python -I unpickle.py SOURCE OUTPUT`.

The weights-only unpickler builds only tensors. The process is a second barrier: its environment holds no secrets, and it
serves no one. Nothing here imports selfspec.
"""

import pickle
import sys

import torch
from safetensors.torch import save_file


def main(source: str, output: str) -> None:
    try:
        state = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # torch's own words go on for ten lines, and advise to run what is in it.
        sys.exit("it holds objects that are no tensors")
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        sys.exit("it holds something other than named tensors")
    # Copy each tensor, because safetensors refuses tensors that share memory.
    save_file({name: value.detach().clone().contiguous() for name, value in state.items()}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
