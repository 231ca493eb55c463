"""Load a checkpoint, run a prompt, and print the hidden states of each layer.

Run it as `python hidden_states.py FOLDER`, with config.json and safetensors of a deepseek_v3 model in the folder; or
alone, for the small random model that comes along.
"""

import sys

import numpy as np

from ddtree import load_model
from ddtree.model import golden_bundle
from ddtree.protocols import KVCache
from ddtree.trees import chain_tree

model = load_model(sys.argv[1] if len(sys.argv) > 1 else golden_bundle(), dtype="float64")
print(model)

prompt = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)  # token ids, below model.vocab_size

# A prompt is a tree without branches, and nothing is committed before it. Its rows go to one page of a cache.
tree = chain_tree(prompt[None])
cache = KVCache(
    data=model.new_cache(num_pages=1, page_size=len(prompt)),
    page_table=np.array([[0]], np.int32),
    prefix_lens=np.array([0], np.int32),
)
layers = range(model.config.num_hidden_layers + 1)  # 0 is the embedding, i the output of layer i
output = model.forward(tree, cache, hidden_layers=tuple(layers))

print("after the last token:\nlayer  root mean square  cosine to the layer before  first numbers")
before = None
for layer in layers:
    state = output.hidden_states[layer][0, -1]  # request 0, last token: (hidden_size,)
    size = np.sqrt((state**2).mean())
    cosine = "" if before is None else f"{state @ before / np.linalg.norm(state) / np.linalg.norm(before):.3f}"
    print(f"{layer:5}  {size:16.4f}  {cosine:>26}  {np.array2string(state[:4], precision=3)}")
    before = state
print("next token:", output.logits[0, -1].argmax())
