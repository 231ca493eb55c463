"""Slots that requests pass through, without an engine: what a resident drafter sees, and what the host's would."""

import numpy as np

from ddtree.protocols import DraftContext, ResidentState


class Slots:
    """B slots, whose requests follow given texts by as many tokens a round as is said.

    Parameters
    ----------
    texts : list of array, int32, shape (n,)
        Prompt and continuation of each request.
    prompt_lens : list of int
        How much of each is the prompt.
    slots, room, depth : int
        B, the most tokens of a request, and L.
    hidden_states : callable
        ``(layer, request, positions) -> rows``: what the target's hidden states are. Needed with ``layers`` alone.
    layers, width, dtype :
        Of hidden states.
    xp : module
        NumPy or CuPy: where the state is.
    """

    def __init__(
        self, texts, prompt_lens, *, slots, room, depth, hidden_states=None, layers=(), width=0, dtype="float64", xp=np
    ):
        self.texts, self.lens, self.xp = texts, prompt_lens, xp
        self.layers, self.hidden = tuple(layers), hidden_states
        rng = np.random.default_rng(3)  # what nothing may depend on
        self.host = {
            name: np.zeros(slots, np.int32) for name in ("lengths", "roots", "prompt_lens", "remaining", "kept")
        }
        self.host["tokens"] = rng.integers(0, 5, (slots, room)).astype(np.int32)
        self.rows = {layer: rng.normal(size=(slots, depth + 1, width)).astype(dtype) for layer in self.layers}
        arrays = {name: xp.asarray(array) for name, array in self.host.items()}
        self.state = ResidentState(**arrays, hidden_states={i: xp.asarray(rows) for i, rows in self.rows.items()})
        self.of_slot = {}
        self.new_rows = {}  # of each running request, since its last draft
        self.began, self.ended = [], []

    def show(self):
        """Bring the state up to date."""
        for name, array in self.host.items():
            getattr(self.state, name)[...] = self.xp.asarray(array)
        for layer, rows in self.rows.items():
            self.state.hidden_states[layer][...] = self.xp.asarray(rows)

    def begin(self, resident, slot, request):
        """Put a request, whose prefill is done, into a free slot."""
        text, n, h = self.texts[request], self.lens[request], self.host
        h["tokens"][slot, : n + 1] = text[: n + 1]
        h["lengths"][slot], h["prompt_lens"][slot], h["kept"][slot] = n + 1, n, 0
        h["roots"][slot], h["remaining"][slot] = text[n], len(text) - n - 1
        self.show()
        rows = {i: self.hidden(i, request, np.arange(n)) for i in self.layers}
        resident.begin(slot, request, text[:n].copy(), n, {i: self.xp.asarray(r) for i, r in rows.items()})
        self.of_slot[slot], self.new_rows[request] = request, rows
        self.began.append(request)

    def commit(self, resident, slot, count):
        """Emit ``count`` tokens, or what is left, of the request in a slot; it leaves at its end."""
        request, h = self.of_slot[slot], self.host
        text, at = self.texts[request], int(h["lengths"][slot])
        count = min(count, len(text) - at)
        h["tokens"][slot, at : at + count] = text[at : at + count]
        h["lengths"][slot], h["roots"][slot] = at + count, text[at + count - 1]
        h["remaining"][slot], h["kept"][slot] = len(text) - at - count, count
        self.new_rows[request] = {i: self.hidden(i, request, at - 1 + np.arange(count)) for i in self.layers}
        for layer, rows in self.new_rows[request].items():
            self.rows[layer][slot] = np.nan
            self.rows[layer][slot, :count] = rows
        if h["remaining"][slot] == 0:
            resident.end(slot)
            del self.of_slot[slot]
            self.ended.append(request)

    def context(self):
        """What the drafter on the host is shown, of the requests in ``of_slot``'s order."""
        tokens = [self.host["tokens"][slot, : self.host["lengths"][slot]].copy() for slot in self.of_slot]
        requests = list(self.of_slot.values())
        began, ended, self.began, self.ended = self.began, self.ended, [], []
        roots = np.array([row[-1] for row in tokens], np.int32)
        return DraftContext(requests, tokens, roots, [self.new_rows[r] for r in requests], began, ended)


def drafts_in_pairs(drafter, slots, depth, topk, rng, *, on_host=None, draft=None):
    """Have a resident drafter and one on the host draft for the same requests until all have ended.

    Yields ``(resident's, host's)`` log-probs and token ids of every request of every round, as NumPy arrays. ``draft``
    makes another draft function of the resident one: by a graph, for one.
    """
    on_host = drafter if on_host is None else on_host
    resident = drafter.open_resident(slots.state, depth, topk)
    make = resident.draft if draft is None else draft(resident.draft)
    waiting = list(range(len(slots.texts)))
    count = len(slots.host["lengths"])
    while waiting or slots.of_slot:
        for slot in rng.permutation(count).tolist():
            if waiting and slot not in slots.of_slot and (rng.random() < 0.7 or not slots.of_slot):
                slots.begin(resident, slot, waiting.pop(0))
        slots.show()
        log_probs, token_ids = (slots.xp.asnumpy(a) if slots.xp is not np else a.copy() for a in make())
        expected = on_host(slots.context(), depth, topk)
        for b, slot in enumerate(slots.of_slot):
            yield (log_probs[slot], token_ids[slot]), tuple(np.asarray(a)[b] for a in expected)
        for slot in list(slots.of_slot):
            slots.commit(resident, slot, int(rng.integers(1, depth + 2)))
