"""Continue many prompts on every GPU that is visible, or in two processes where there is none."""

from functools import partial

from ddtree import Engine, load_pair, load_prompts
from ddtree.engine import generate_many, visible_devices


def make_engine(backend):
    """Load the pair where the tokens are made: each process does it once."""
    target, drafter, _ = load_pair(backend=backend)
    return Engine(target, drafter, depth=7, budget=64, max_batch=4)


def devices_here():
    """Every visible GPU and the kernels for it, or two processes of the CPU."""
    try:
        return range(len(visible_devices())), "cupy"
    except ValueError:
        return ["cpu", "cpu"], None


if __name__ == "__main__":  # each process reads this file again, and must not start others
    prompts = load_prompts().tokens[:12]
    devices, backend = devices_here()
    factory = partial(make_engine, backend)
    generation = generate_many(factory, prompts, max_new_tokens=16, devices=devices, share=4)
    print(generation)
    print(generation.tokens[0].tolist())
