"""Decode with a Hugging Face model and n-gram drafts, and plot the tokens a round (τ) by node budget.

Run it as `python huggingface_ngrams.py MODEL`, with a folder or a name on the hub; or alone, for a small random model.
"""

import sys
from pathlib import Path

import torch
import transformers

from ddtree import DDTreeDecoder, NgramDrafter
from ddtree.analysis.acceptance import tau_by_budget
from ddtree.analysis.figures import plot_tau_by_budget, save
from ddtree.policies import chain, fixed_budget

texts = [Path(__file__).read_text(encoding="utf-8")[:n] for n in (400, 700)]
if len(sys.argv) > 1:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
    prompts = [tokenizer.encode(text) for text in texts]
else:
    # Random weights soon repeat themselves, which n-grams then foresee: the figure says nothing of a real model.
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    prompts = [list(text.encode()) for text in texts]


def run(name, budget):
    """Decode once: the tokens are the same under every policy and budget, the number of rounds is not."""
    policy = {"chain": chain, "tree": fixed_budget}[name](budget)
    decoder = DDTreeDecoder(model, NgramDrafter(), depth=8, policy=policy)
    return decoder.generate(prompts, max_new_tokens=48)


table = tau_by_budget(run, {"chain": [1, 2, 4, 8], "tree": [1, 2, 4, 8, 16, 32]})
print(table)
print("written:", save(plot_tau_by_budget(table), "tau_by_budget.png"))
