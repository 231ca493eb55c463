"""Goldens of the installed pair: what torch computes with the same weights, for the tests of the NumPy inference.

    python -P -m ddtree.analysis.training.make_golden --pair ddtree/pairs/python-5m

Written to ``golden.kdtr`` in that folder; all values are float32's, with the first prompts of the pair:

``tokens`` : int32, shape (prompts, 64)
    Greedy continuations.
``margins`` : float32, shape (prompts, 64)
    By how much the best logit leads the second: where it is small, another order of summation may choose the other.
``logit_positions`` : int32, shape (4,); ``logits`` : float32, shape (few, 4, V)
    Logits after these numbers of new tokens, of the first few prompts.
``draft_position`` : int32, shape (); ``draft_log_probs`` : float32, shape (few, T − 1, V)
    Log-probs of all tokens at all depths where this new token is the root.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from ddtree.analysis.training.models import DRAFTER, Drafter, Target
from ddtree.kdtr import read_kdtr, write_kdtr
from ddtree.pair import DRAFTER as DRAFTER_FILE
from ddtree.pair import PROMPTS as PROMPTS_FILE
from ddtree.pair import TARGET as TARGET_FILE
from ddtree.pair import load_prompts

GREEDY_PROMPTS, NEW_TOKENS, FEW = 16, 64, 3
LOGIT_POSITIONS, DRAFT_POSITION = (0, 16, 32, 48), 32


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write what torch computes with a pair's weights.")
    parser.add_argument("--pair", type=Path, required=True, help="folder of the pair")
    folder = parser.parse_args().pair
    torch.set_grad_enabled(False)
    target, drafter = load_models(folder)
    tokens, margins, logits, drafts = [], [], [], []
    for i, prompt in enumerate(load_prompts(folder / PROMPTS_FILE).tokens[:GREEDY_PROMPTS]):
        P = len(prompt)
        ids = target.generate(torch.from_numpy(prompt)[None].long(), P + NEW_TOKENS)
        after = target(ids)[0, P - 1 :]  # [n] is after n new tokens
        best = after[:-1].topk(2).values
        tokens.append(ids[0, P:].int().numpy())
        margins.append((best[:, 0] - best[:, 1]).numpy())
        if i < FEW:
            logits.append(after[list(LOGIT_POSITIONS)].numpy())
            known = ids[:, : P + DRAFT_POSITION + 1]
            root = torch.tensor([[known.shape[1] - 1]])
            features = target.features(known, DRAFTER.target_layers)
            hidden = drafter(features, target.model.embed_tokens(known[:, -1:]), root)
            drafts.append(target.lm_head(hidden)[0, 0].log_softmax(-1).numpy())
    arrays = {
        "tokens": np.stack(tokens),
        "margins": np.stack(margins),
        "logit_positions": np.array(LOGIT_POSITIONS, np.int32),
        "logits": np.stack(logits),
        "draft_position": np.array(DRAFT_POSITION, np.int32),
        "draft_log_probs": np.stack(drafts),
    }
    write_kdtr(folder / "golden.kdtr", arrays, {"torch": torch.__version__})


def load_models(folder: Path) -> tuple[Target, Drafter]:
    """The pair of a folder, in torch, in float32."""
    models = (Target(), Drafter())
    for model, name in zip(models, (TARGET_FILE, DRAFTER_FILE), strict=True):
        arrays, _ = read_kdtr(folder / name)
        model.load_state_dict({k: torch.from_numpy(v.astype(np.float32)) for k, v in arrays.items()})
        model.eval()
    return models


if __name__ == "__main__":
    main()
