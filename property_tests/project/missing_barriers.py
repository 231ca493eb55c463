"""Kernels with one barrier less each, run in the simulator in every order by ``test_numba_cuda.py``.

As a program, with ``NUMBA_ENABLE_CUDASIM=1``, it prints ``{"operation:line": messages}`` as JSON; line 0 is the kernel
as it is.
"""

import json
import re
import sys
import types
from pathlib import Path

import numpy as np

from ddtree.kernels.numba_cuda import jit, simulator
from ddtree.property_tests.project.test_numba_cpu import drafted
from ddtree.trees import tree_from_parents

rng = np.random.default_rng(0)
tree = tree_from_parents(np.zeros((1, 6), int), np.array([[-1, 0, 0, 1, 2, 4]]))
q, cache = rng.standard_normal((1, 6, 2, 9)), rng.standard_normal((5, 4, 9))
paged = cache, np.array([[3, 1, 0, 2, 4]], np.int32), np.array([13], np.int32)
logits = (rng.integers(-8, 8, (1, 1, 150)) / 2).astype(np.float32)
places = np.array([[7]], np.int32)
CALLS = {
    "build_tree": lambda f: f(*drafted(1, 1, 4, 20), budget=40),
    "verify_attention": lambda f: f(q, *paged, tree, scale=1.0, kv_lora_rank=7),
    "topk_log_probs": lambda f: f(logits, 9),
    "choose_tokens": lambda f: [f(logits, temperature=1.0, top_p=p, positions=places) for p in (0.7, 1.0)],
}
SYNC = re.compile(r"^\s+cuda\.sync\w+\(")
folder, found = Path(jit.__file__).parent, {}
for name, call in CALLS.items():
    lines = (folder / f"{name}.py").read_text(encoding="utf-8").splitlines()
    for number, line in [(0, "")] + [(n, text) for n, text in enumerate(lines, 1) if SYNC.search(text)]:
        mutant = list(lines)
        if number:
            mutant[number - 1] = line.replace(line.strip(), "pass")
        module = types.ModuleType(f"mutant_{name}")
        exec(compile("\n".join(mutant), f"{name}.py", "exec"), vars(module))
        message = ""
        for seed in range(3):
            try:
                with simulator.schedule(**simulator.order_of(seed)):
                    call(vars(module)[name])
            except simulator.SimulatorError as error:
                message = str(error)
        found[f"{name}:{number}"] = message
json.dump(found, sys.stdout)
