"""Server logs: every form is read as its engine means it, and no bytes make the reader fail."""

import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime, timedelta
from io import BytesIO

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree.analysis import figures, server_logs
from ddtree.analysis.server_logs import formats as server_log_formats
from ddtree.analysis.server_logs import read_server_logs
from ddtree.cli import main

FIRST = "SpecDecoding metrics: Draft acceptance rate: 67.7%, Accepted: 337 tokens, Drafted: 498 tokens"
SECOND = (
    "SpecDecoding metrics: Draft acceptance rate: 67.7%, Mean acceptance length: 3.03, Accepted: 337 tokens, "
    "Drafted: 498 tokens, Per-position acceptance rate: 0.837, 0.669, 0.524"
)
THIRD = (
    "SpecDecoding metrics: Mean acceptance length: 3.03, Accepted throughput: 33.70 tokens/s, Drafted throughput: "
    "49.80 tokens/s, Accepted: 337 tokens, Drafted: 498 tokens, Per-position acceptance rate: 0.837, 0.669, 0.524, "
    "Avg Draft acceptance rate: 67.7%"
)
ENGINE = (
    "Engine 000: Avg prompt throughput: 9.1 tokens/s, Avg generation throughput: 95.5 tokens/s, Running: {} reqs, "
    "Waiting: 0 reqs, GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%"
)
V0 = (
    "Speculative metrics: Draft acceptance rate: 0.642, System efficiency: 0.598, Number of speculative tokens: {}, "
    "Number of accepted tokens: {}, Number of draft tokens: {}, Number of emitted tokens: {}."
)
SGLANG = (
    "Decode batch, #running-req: {}, #full token: 0, full token usage: 0.00, accept len: {}, accept rate: {}, "
    "cuda graph: True, gen throughput (token/s): 3.12, #queue-req: 0"
)
LLAMA = (
    "slot print_timing: id  0 | task 7 | draft acceptance = 0.64479 (  167 accepted /   259 generated), mean "
    "acceptance length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)"
)
LLAMA_OLD = "draft acceptance rate = 0.57576 (  171 accepted /   297 generated)"
LLAMA_NEW = "draft acceptance = 0.64479 (  167 accepted /   259 generated), mean len =  2.92"
LLAMA_NEW_RATES = "     acc per pos = (0.805, 0.632, 0.483)"
LLAMA_TIMES = (
    "prompt eval time =     648.99 ms /   133 tokens (    4.88 ms per token,   204.94 tokens per second)\n"
    "       eval time =   30387.12 ms /  2048 tokens (   14.84 ms per token,    67.40 tokens per second)\n"
    "      total time =   31036.11 ms /  2181 tokens\n"
)
LLAMA_TIMED = LLAMA_TIMES + "draft acceptance rate = 0.98260 ( 1186 accepted /  1207 generated)"
LLAMA_SIMPLE = "n_draft   = 16\nn_predict = 257\nn_drafted = 304\nn_accept  = 190\naccept    = 62.500%"


def scrape(drafts, drafted, accepted, at, running=None, prefix="vllm", labels='engine="0"'):
    lines = [f"# TYPE {prefix}:spec_decode_num_drafts_total counter"]
    lines += [f"{prefix}:spec_decode_num_drafts_total{{{labels}}} {drafts:.1f}"]
    lines += [f"{prefix}:spec_decode_num_drafts_created{{{labels}}} 1.7619e+09"]
    lines += [f"{prefix}:spec_decode_num_draft_tokens_total{{{labels}}} {drafted:.1f}"]
    lines += [f"{prefix}:spec_decode_num_accepted_tokens_total{{{labels}}} {accepted:.1f}"]
    for i, count in enumerate(at):
        name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{{labels},position="{i}"}} {count:.1f}']
    if running is not None:
        lines += [f"{prefix}:num_requests_running{{{labels}}} {running}"]
    return "\n".join(lines)


def read(*lines, **options):
    return read_server_logs([("log", BytesIO("\n".join(lines).encode() + b"\n"))], **options)


def column(log, name):
    return [None if x != x else x for x in np.asarray(getattr(log.windows, name)).tolist()]


EACH = {
    # line: source, rounds, whether estimated, accepted, drafted, τ
    SECOND: ("vLLM", 166, 0, 337, 498, 1 + 337 / 166),
    THIRD: ("vLLM", 166, 0, 337, 498, 1 + 337 / 166),
    # accepted is not counted by prefix there: 8547 / 4437 + 1 would be 2.93
    V0.format(3, 8547, 13311, 10616): ("vLLM V0", 4437, 0, 6179, 13311, 10616 / 4437),
    scrape(279, 837, 676, (257, 231, 188)): ("counters", 279, 0, 676, 837, 1 + 676 / 279),
    scrape(279, 837, 676, (257, 231, 188), prefix="llamacpp"): ("counters", 279, 0, 676, 837, 1 + 676 / 279),
    SGLANG.format(2, "3.05", "0.68"): ("SGLang", 80, 1, 2.05 * 80, None, 3.05),
    SGLANG.format(2, "3.05", "0.68").replace("batch,", "batch."): ("SGLang", 80, 1, 2.05 * 80, None, 3.05),
    re.sub("accept rate: {}, ", "", SGLANG).format(2, "3.05"): ("SGLang", 80, 1, 2.05 * 80, None, 3.05),
    LLAMA: ("llama.cpp", 87, 0, 167, 259, 1 + 167 / 87),
    f"{LLAMA_NEW}\n{LLAMA_NEW_RATES}": ("llama.cpp", 87, 0, 167, 259, 1 + 167 / 87),
    LLAMA_NEW: ("llama.cpp", 87, 0, 167, 259, 1 + 167 / 87),
    LLAMA_OLD: ("llama.cpp", 0, None, 171, 297, None),
    LLAMA_TIMED: ("llama.cpp", 861, 1, 1186, 1207, 1 + 1186 / 861),
    # of a line that has its mean, that counts
    LLAMA_TIMES + LLAMA: ("llama.cpp", 87, 0, 167, 259, 1 + 167 / 87),
    LLAMA_SIMPLE: ("llama.cpp", 67, 0, 190, 304, 257 / 67),
    FIRST: ("vLLM", 0, None, 337, 498, None),
}


@pytest.mark.parametrize("text", EACH, ids=lambda text: text[:60])
@pytest.mark.parametrize(
    "dress",
    [
        "{}",
        "\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO 05-18 11:19:54 [metrics.py:101] {}",
        "server-1  | \x1b[32m[2026-09-11 23:47:28 TP0 EP0]\x1b[0m {}\r",
    ],
    ids=["bare", "coloured", "compose"],
)
def test_each_form_worked_by_hand(text, dress):
    dressed = [dress.format(line) for line in text.split("\n")]
    log = read("something else", *dressed, "and more")
    (window,) = log.windows.records()
    names = ("source", "rounds", "estimated", "accepted", "drafted", "tau")
    for name, expected in zip(names, EACH[text], strict=True):
        assert window[name] == (pytest.approx(expected) if isinstance(expected, int | float) else expected), name
    assert log.files[0].damaged == 0
    others = ("# TYPE", "_created", " time = ", "n_draft ", "n_predict", "n_drafted", "accept  ")
    assert log.files[0].unknown == 2 + sum(map(text.count, others)) - text.count("n_accept  ")


def test_tokens_of_one_request_say_nothing_of_the_next():
    log = read(LLAMA_TIMED, LLAMA_OLD, "x" * 1_100, LLAMA_OLD.replace("171", "170"))
    assert column(log, "rounds") == [861, 0, 0]
    # more accepted than there are tokens is another request's too
    assert column(read(LLAMA_TIMES.replace("2048", "171") + LLAMA_OLD), "rounds") == [0]


def test_draft_length_gives_rounds_where_nothing_else_does():
    log = read(LLAMA_OLD, LLAMA_TIMED, LLAMA, draft_length=11)
    assert column(log, "rounds") == [27, 861, 87]
    assert column(log, "estimated") == [1, 1, 0]
    assert column(log, "tau")[0] == pytest.approx(1 + 171 / 27)


@pytest.mark.parametrize("block_bytes", [1, 64, 200, 1 << 12])
def test_lines_above_are_seen_wherever_a_block_ends(block_bytes):
    lines = [LLAMA_TIMED, "anything", LLAMA_SIMPLE, LLAMA_TIMED]
    log = read(*lines, block_bytes=block_bytes)
    assert column(log, "rounds") == [861, 67, 861]
    assert log.windows.records() == read(*lines).windows.records()


def test_an_example_that_drafts_nothing_is_about_other_things():
    counts = read("n_predict = 512", "n_accept  = 187", LLAMA_SIMPLE.replace("190", "305")).files[0]
    assert (counts.recognised, counts.damaged) == (0, 1)


def test_rates_by_position_are_unconditional_and_conditional():
    for text in (THIRD, SECOND, LLAMA, f"{LLAMA_NEW}\n{LLAMA_NEW_RATES}"):
        table = read(text).positions
        printed = [float(x) for x in re.findall(r"\d\.\d{3}\b", text)][-3:]
        assert table.position.tolist() == [1, 2, 3]
        assert table.unconditional.tolist() == pytest.approx(printed)
        assert table.conditional.tolist() == pytest.approx(
            [printed[0], printed[1] / printed[0], printed[2] / printed[1]]
        )


def test_positions_of_windows_of_several_lengths_are_not_mixed():
    """Of 166 rounds with three positions and 100 with one, the second position is about the 166 alone."""
    short = "SpecDecoding metrics: Draft acceptance rate: 50.0%, Mean acceptance length: 1.50, Accepted: 50 tokens, "
    short += "Drafted: 100 tokens, Per-position acceptance rate: 0.500"
    table = read(THIRD, short).positions
    assert table.rounds.tolist() == [266, 166, 166]
    assert table.unconditional[0] == pytest.approx((0.837 * 166 + 50) / 266)
    assert table.conditional[1] == pytest.approx(0.669 / 0.837)


def vllm_line(drafts, kept, drafted=None):
    accepted = sum(kept)
    drafted = drafts * len(kept) if drafted is None else drafted
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, Accepted throughput: 1.00 "
        f"tokens/s, Drafted throughput: 1.00 tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{k / drafts:.3f}' for k in kept)}, Avg Draft acceptance rate: "
        f"{100 * accepted / drafted:.1f}%"
    )


@st.composite
def full_windows(draw):
    drafts = draw(st.integers(1, 2000))
    kept = sorted(draw(st.lists(st.integers(0, drafts), min_size=1, max_size=9)), reverse=True)
    return drafts, kept


@given(st.lists(full_windows(), min_size=1, max_size=6))
def test_windows_of_full_drafts_give_rounds_and_tau_exactly(windows):
    log = read(*(vllm_line(*window) for window in windows))
    assert log.files[0].damaged == 0
    assert log.windows.rounds.tolist() == [drafts for drafts, _ in windows]
    assert log.windows.estimated.tolist() == [0.0] * len(windows)
    emitted = sum(drafts + sum(kept) for drafts, kept in windows)
    assert log.sources.tau[0] == pytest.approx(emitted / sum(drafts for drafts, _ in windows))


@given(full_windows(), st.data())
def test_rounds_of_short_drafts_are_within_what_is_printed(window, data):
    drafts, kept = window
    least = max(sum(kept), drafts)
    drafted = data.draw(st.integers(least, max(least, drafts * len(kept))), "drafted")
    log = read(vllm_line(drafts, kept, drafted))
    assert log.files[0].damaged == 0
    (rounds,), (estimated,) = log.windows.rounds, log.windows.estimated
    if not rounds:
        return
    if sum(kept):
        assert abs(sum(kept) / rounds - sum(kept) / drafts) <= 0.0101
    assert rounds >= drafted / len(kept) * (1 - 1e-9)
    assert estimated or rounds == int(rounds)


def test_weights_are_rounds_and_not_lines():
    log = read(vllm_line(900, [900]), vllm_line(100, [0]))
    assert log.sources.tau[0] == pytest.approx(1.9)
    assert log.sources.acceptance[0] == pytest.approx(0.9)


def test_first_form_takes_the_draft_length_from_the_configuration_or_the_caller():
    configured = "speculative_config=SpeculativeConfig(method='eagle', model='m', num_spec_tokens=3), x=1"
    for log in (read(configured, FIRST), read(FIRST, draft_length=3)):
        assert column(log, "rounds") == [166.0]
        assert column(log, "estimated") == [1.0]
        assert log.sources.tau[0] == pytest.approx(1 + 337 / 166)
    with pytest.raises(ValueError, match=r"draft_length must be in 1 … 1000000, got 0"):
        read(FIRST, draft_length=0)


def test_sglang_steps_between_lines_come_from_the_configuration():
    log = read("server_args=ServerArgs(model_path='m', decode_log_interval=10, x=1)", SGLANG.format(4, "2.50", "0.50"))
    assert column(log, "rounds") == [40.0]


def test_cumulative_figures_are_differences_and_resets_begin_anew():
    log = read(
        V0.format(4, 10, 400, 150),
        V0.format(4, 20, 800, 350),  # 100 rounds, 200 tokens
        V0.format(4, 5, 40, 15),  # another server: 10 rounds, 15 tokens
    )
    assert column(log, "rounds") == [100.0, 10.0]
    assert column(log, "tau") == [2.0, 1.5]
    log = read(
        scrape(100, 300, 150, (90, 40, 20), running=3),
        scrape(300, 900, 550, (290, 140, 120), running=5),
        scrape(10, 30, 5, (5, 0, 0), running=0),
    )
    assert column(log, "rounds") == [200.0, 10.0]
    assert column(log, "accepted") == [400.0, 5.0]
    assert column(log, "running") == [5.0, 0.0]
    assert log.windows.position_rates[0].tolist() == [1.0, 0.5, 0.5]


def test_counters_of_several_engines_are_reset_one_by_one_and_summed():
    def both(*pairs):
        return "\n".join(
            scrape(drafts, drafted, accepted, at, labels=f'engine="{i}"')
            for i, (drafts, drafted, accepted, at) in enumerate(pairs)
        )

    log = read(
        both((100, 200, 100, (60, 40)), (100, 200, 100, (60, 40))),
        both((110, 220, 115, (68, 47)), (30, 60, 20, (15, 5))),  # the second began anew
    )
    assert column(log, "rounds") == [40.0]
    assert column(log, "accepted") == [35.0]
    assert column(log, "tau") == [1 + 35 / 40]


@st.composite
def scrapes_of_counters(draw):
    """Label sets and their counters (drafts, draft tokens, accepted tokens, accepted at 1, 2), in any order."""
    engines = draw(st.integers(1, 3))
    now: dict[int, tuple[int, ...]] = {}
    events = []
    for engine in draw(st.lists(st.integers(0, engines - 1), max_size=14)):
        if draw(st.integers(0, 3)) == 0:
            now.pop(engine, None)  # begins anew
        drafts = draw(st.integers(0, 9))
        first = draw(st.integers(0, drafts))
        second = draw(st.integers(0, first))
        added = (drafts, 2 * drafts, first + second, first, second)
        now[engine] = tuple(map(sum, zip(now.get(engine, (1000 * engine,) * 5), added, strict=True)))
        events.append((engine, now[engine]))
    return events


def counted(events):
    """Totals of all windows: what is documented, in plain loops."""
    scrapes: list[dict[int, tuple[int, ...]]] = [{}]
    for engine, values in events:
        if engine in scrapes[-1]:
            scrapes.append({})
        scrapes[-1][engine] = values
    last: dict[int, tuple[int, ...]] = {}
    totals = np.zeros(5)
    for scrape in scrapes:
        window = np.zeros(5)
        for engine, values in scrape.items():
            before = last.get(engine, (0,) * 5 if len(scrapes) == 1 else values)
            fallen = any(a < b for a, b in zip(values, before, strict=True))
            window += np.array(values) - (0 if fallen else np.array(before))
            last[engine] = values
        if window[1] > 0 and window[2] <= window[1]:
            totals += window
    return totals.tolist()


@given(scrapes_of_counters(), st.integers(1, 400))
def test_counters_in_any_order_with_gaps_and_resets_are_as_counted_by_hand(events, block_bytes):
    labels = 'engine="{}",model_name="a}}\\"b"'
    text = [scrape(v[0], v[1], v[2], v[3:], labels=labels.format(e)) for e, v in events]
    log = read(*text, block_bytes=block_bytes)
    sums = [log.windows.rounds.sum(), np.nansum(log.windows.drafted), log.windows.accepted.sum()]
    at = np.zeros(2)
    at[log.positions.position - 1] = log.positions.unconditional * log.positions.rounds
    assert [*sums, *at] == pytest.approx(counted(events))


def test_a_label_set_of_which_any_counter_has_fallen_is_reset_as_a_whole():
    for first, second in (
        ((1000, 3000, 1000, ()), (900, 2700, 1800, ())),
        ((10, 30, 20, ()), (12, 36, 10, ())),
        ((10, 30, 20, (10, 10, 0)), (40, 120, 60, (40, 12, 8))),  # the rates alone have not risen
        ((10, 30, 20, (10, 6, 4)), (40, 120, 60, (40, 15, 3))),
    ):
        log = read(scrape(*first), scrape(*second))
        drafts, drafted, accepted, at = second
        fallen = any(a > b for a, b in zip((*first[:3], *first[3]), (*second[:3], *at), strict=True))
        before = (0, 0, 0) if fallen else first
        assert column(log, "rounds") == [drafts - before[0]]
        assert column(log, "drafted") == [drafted - before[1]]
        assert column(log, "accepted") == [accepted - before[2]]


def test_a_damaged_counter_waits_for_the_next_scrape_that_has_it():
    for damage in ("110.0x", "", "9" * 400, "1.1.0", "110.0 12 13"):
        log = read(
            scrape(100, 300, 150, (90, 40, 20)),
            scrape(110, 330, 170, (98, 47, 25)).replace("110.0", damage),
            scrape(120, 360, 190, (106, 54, 30)),
        )
        assert log.files[0].damaged == 1
        assert [*column(log, "rounds"), *column(log, "drafted"), *column(log, "accepted")] == [20, 60, 40]


def test_a_scrape_that_contradicts_itself_is_damaged():
    log = read(scrape(100, 300, 150, ()), scrape(110, 310, 170, ()))
    assert len(log.windows) == 0
    assert log.files[0].damaged == 1


def test_number_running_is_that_of_the_line_before_and_of_no_other():
    log = read(ENGINE.format(7), THIRD, THIRD, ENGINE.format(1), "other", THIRD, SGLANG.format(100, "2.00", "0.50"))
    assert column(log, "running") == [7.0, None, 1.0, 100.0]
    table = log.by_running
    assert list(zip(table.running, table.most_running, table.windows, strict=True)) == [
        (1, 1, 1),
        (7, 7, 1),
        (65, 128, 1),
    ]
    assert table.tau.tolist() == pytest.approx([1 + 337 / 166, 1 + 337 / 166, 2.0])


@pytest.mark.parametrize(
    "stamps, seconds",
    [
        (["INFO 12-31 23:59:50", "INFO 01-01 00:00:00", "INFO 01-01 00:00:10"], [0, 10, 20]),
        (["[23:59:50]", "[00:00:00]", "[00:00:10]"], [0, 10, 20]),
        (["[2026-02-28 23:59:50 TP0]", "[2026-03-01T00:00:00.5Z]", "2026-03-01 00:00:10,250"], [0, 10.5, 20.25]),
        (["0.00.500.000 I", "0.01.000.250 I", "12.00.000.000 I"], [0, 0.50025, 719.5]),
        (["[23:59:59]", "[00:00:01]", "[23:59:59]", "[00:00:02]"], [0, 2, 0, 3]),
        (["12-31 23:59:59", "01-01 00:00:01", "12-31 23:59:59", "01-01 00:00:02"], [0, 2, 0, 3]),
        (["[18:00:00]", "[09:00:00]"], [0, 15 * 3600]),  # nobody was there overnight
        (["no stamp", "[2026-13-45 00:00:00]", "[2026-03-01 00:00:10]"], [None, None, 0]),
    ],
    ids=["vLLM", "clock", "dates", "llama.cpp", "two processes", "two processes, dates", "night", "none"],
)
def test_time_stamps(stamps, seconds):
    """Seconds run on where a stamp without a year, or without a day, begins again."""
    log = read(*(f"{stamp} {THIRD}" for stamp in stamps))
    assert column(log, "seconds") == (seconds if None in seconds else pytest.approx(seconds))


@given(
    st.lists(st.tuples(st.integers(0, 20 * 3600), st.integers(0, 3600)), min_size=1, max_size=8),
    st.sampled_from(["%H:%M:%S", "%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S"]),
)
def test_stamps_a_little_out_of_order_are_read_as_they_were(steps, form):
    """Each stamp is up to an hour late, and the clock goes on for any time that is less than a day."""
    begin = datetime(2028, 12, 30, 12)
    at = np.cumsum([step for step, _ in steps]) + 3600 - np.array([late for _, late in steps])
    log = read(*(f"[{(begin + timedelta(seconds=int(s))).strftime(form)}] {THIRD}" for s in at))
    assert column(log, "seconds") == pytest.approx((at - at.min()).tolist())


def test_lines_that_are_cut_or_contradict_themselves_are_damaged():
    for bad in (
        THIRD.replace("Drafted: 498 tokens", "Drafted: 49"),
        THIRD.replace("Accepted: 337", "Accepted: 33"),  # mean and rates say otherwise
        THIRD.replace("Mean acceptance length: 3.03", "Mean acceptance length: 2.03"),
        THIRD.replace("Accepted: 337 tokens, Drafted: 498", "Accepted: 498 tokens, Drafted: 337"),
        SGLANG.format(2, "3.0", "0.68"),
        SGLANG.format(2, "0.05", "0.68"),  # the bonus is in it
        SGLANG.format(2, "00.50", "0.68"),
        LLAMA_OLD.replace("(  171", "(\n171"),
        LLAMA_OLD.replace("/   297", "/\n297"),
        LLAMA_NEW.replace("=  2.92", "=\n2.92").replace("167", "367"),
        LLAMA.replace("167 accepted", "267 accepted"),
        "draft acceptance = 0.64479 (  167 accepted /   25",
        "Speculative metrics: Draft acceptance rate: 0.642, System eff",
        scrape(279, 837, 676, (257, 231, 188)).replace("837.0", "8.3.7"),
        scrape(279, 837, 676, (257, 231, 188)).replace(',position="1"', ""),
        scrape(279, 837, 676, (257, 231, 188)).replace("837.0", "9" * 400),
    ):
        log = read(bad, "other")
        assert log.files[0].damaged == 1, bad
        assert not len(log.windows) or "spec_decode_num" in bad


def test_an_idle_window_is_no_window():
    nothing = (
        "SpecDecoding metrics: Mean acceptance length: nan, Accepted throughput: 0.00 tokens/s, Drafted throughput: "
    )
    nothing += (
        "0.00 tokens/s, Accepted: 0 tokens, Drafted: 0 tokens, Per-position acceptance rate: nan, nan, Avg Draft "
    )
    log = read(nothing + "acceptance rate: nan%", SGLANG.format(0, "2.00", "0.50"))
    assert len(log.windows) == 0
    assert log.files[0].recognised == 2


def loop(windows, drafts=20):
    return [vllm_line(drafts, [drafts] * 3)] * windows


def test_warns_of_a_loop_and_of_a_collapse():
    fine = [vllm_line(100, [80, 60, 40])]
    log = read(*fine * 4, *loop(5), *fine, *loop(2), *fine, *[vllm_line(50, [2, 0, 0])] * 3)
    assert [(a.kind, a.first_line, a.last_line, a.windows, a.rounds) for a in log.alerts] == [
        ("loop", 5, 9, 5, 100.0),
        ("collapse", 14, 16, 3, 150.0),
    ]
    assert log.num_alerts == {"loop": 1, "collapse": 1}
    assert not read(*loop(4, drafts=3)).alerts  # 12 rounds
    assert read(*[SGLANG.format(1, "16.00", "1.00")] * 3).alerts[0].kind == "loop"
    assert read(*[SGLANG.format(1, "1.03", "0.00")] * 3).alerts[0].kind == "collapse"


FORMS = [FIRST, SECOND, THIRD, ENGINE.format(3), V0.format(3, 8547, 13311, 10616), V0.format(2, 1, 2, 3), LLAMA]
FORMS += [scrape(9, 27, 6, (4, 1, 1)), scrape(10, 30, 7, (5, 1, 1), running=4), SGLANG.format(2, "3.05", "0.68")]
FORMS += [LLAMA_OLD, LLAMA_NEW, LLAMA_NEW_RATES, "anything", "", "\x1b[1mred\x1b[0m", "num_spec_tokens=4"]
BYTES = [form.encode() for form in FORMS]


@st.composite
def mangled_logs(draw):
    """Lines of every form, of which some are cut, doubled or changed in a byte."""
    lines = draw(st.lists(st.sampled_from(BYTES), max_size=12))
    data = bytearray(draw(st.sampled_from([b"\n", b"\r\n", b"\n\n"])).join(lines))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["cut", "drop", "byte", "insert"]))
        if change == "cut":
            del data[at:]
        elif change == "drop":
            del data[at : at + draw(st.integers(1, 40))]
        elif change == "byte" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        else:
            data[at:at] = draw(st.binary(max_size=6) | st.sampled_from([b"9" * 400, b"-1", b"nan", b"1e999", b"}"]))
    return bytes(data)


def state(log):
    return log.files, log.windows.records(), log.positions.records(), log.by_running.records(), log.alerts


# figures that are left out, behind others or not
@example(f"{LLAMA_OLD}\n{LLAMA_NEW_RATES}\n{LLAMA_NEW}\n{LLAMA_NEW}".replace("171", "1").encode(), 1)
@example(f"{LLAMA_OLD}\n{LLAMA_NEW}".replace("(  ", "(\n").encode(), 1)
@given(mangled_logs() | st.binary(max_size=200), st.integers(1, 300))
def test_any_bytes_are_read_and_blocks_make_no_difference(data, block_bytes):
    whole = read_server_logs([("log", BytesIO(data))])
    assert state(read_server_logs([("log", BytesIO(data))], block_bytes=block_bytes)) == state(whole)
    (counts,) = whole.files
    assert counts.bytes == len(data)
    assert counts.lines == data.count(b"\n") + (data[-1:] not in (b"", b"\n"))
    for name in ("rounds", "accepted", "tau", "acceptance"):
        values = getattr(whole.windows, name)
        assert not np.isinf(values).any()
    assert not (whole.windows.tau < 1).any()
    json.dumps([whole.windows.records(), whole.sources.records()], allow_nan=False)


def test_many_windows_are_added_up_and_the_sums_stay(monkeypatch):
    lines = [vllm_line(100 + i % 7, [90, 50 + i % 30]) for i in range(1000)] + loop(10)
    whole = read(*lines)
    monkeypatch.setattr(server_logs, "MOST_WINDOWS", 50)
    few = read(*lines, block_bytes=2000)
    assert len(whole.windows) == 1010
    assert 25 <= len(few.windows) <= 130
    assert few.windows.lines.sum() == 1010
    assert few.alerts == whole.alerts
    for table, names in (("sources", ("tau", "low", "high", "rounds")), ("positions", ("conditional", "rounds"))):
        for name in names:
            np.testing.assert_allclose(getattr(getattr(few, table), name), getattr(getattr(whole, table), name))


def test_long_logs_take_seconds_and_little_memory():
    """A gigabyte in 20 s is 50 MB/s: here a fifth of a log is figures, which is more than servers write."""
    chunk = b"".join(
        (f"INFO 05-18 11:{i // 60 % 60:02}:{i % 60:02} [x.py:1] " + (THIRD if i % 5 == 0 else "x" * 150)).encode()
        + b"\n"
        for i in range(3000)
    )
    data = BytesIO(chunk * 80)
    start = time.process_time()
    log = read_server_logs([("log", data)])
    seconds = time.process_time() - start
    assert log.windows.lines.sum() == 80 * 600
    assert len(log.windows) <= 2 * server_logs.MOST_WINDOWS
    assert seconds < len(chunk) * 80 / 50e6 + 0.3


def test_a_file_that_is_no_text_is_passed_over_in_pieces(monkeypatch):
    monkeypatch.setattr(server_log_formats, "LONGEST_LINE", 1000)
    log = read_server_logs([("log", BytesIO(b"\0" * 50_000 + b"\n" + THIRD.encode()))], block_bytes=100)
    assert column(log, "rounds") == [166.0]


def test_tidy_tables_and_several_files():
    log = read_server_logs([("a", BytesIO(THIRD.encode())), ("b", BytesIO(LLAMA.encode()))])
    assert [(r["file"], r["source"]) for r in log.sources.records()] == [(0, "vLLM"), (1, "llama.cpp")]
    assert log.windows.records()[0]["position_3"] == pytest.approx(0.524)
    assert [counts.name for counts in log.files] == ["a", "b"]


# the figures


def long_log():
    lines = []
    for i in range(200):
        lines += [f"INFO 05-18 11:{i // 6:02}:{i % 6 * 10:02} {ENGINE.format(1 + i % 90)}"]
        lines += [f"INFO 05-18 11:{i // 6:02}:{i % 6 * 10:02} {vllm_line(100, [90 - i % 7, 70, 50])}"]
    return [*lines, *(f"INFO 05-18 12:00:0{i} {line}" for i, line in enumerate(loop(6)))]


def test_figures_draw_what_the_tables_hold():
    log = read(*long_log())
    drawn = figures.plot_tau_over_time(log)
    np.testing.assert_allclose(figures.find(drawn, "vLLM").get_ydata(), log.windows.tau)
    np.testing.assert_allclose(figures.find(drawn, "vLLM").get_xdata() * 60, log.windows.seconds)
    assert len([artist for artist in drawn.findobj() if artist.get_gid() == "alerts"]) == 1
    drawn = figures.plot_positions(log)
    np.testing.assert_allclose(figures.find(drawn, "vLLM").get_ydata(), log.positions.unconditional)
    np.testing.assert_allclose(figures.find(drawn, "vLLM, conditional").get_ydata(), log.positions.conditional)
    drawn = figures.plot_running(log)
    np.testing.assert_allclose(figures.find(drawn, "vLLM").get_offsets()[:, 1], log.by_running.tau)


@pytest.mark.parametrize(
    "lines", [[FIRST], [LLAMA_OLD], ["nothing"], [LLAMA], [THIRD, LLAMA, SGLANG.format(1, "2.00", "0.50")]]
)
def test_figures_of_logs_that_do_not_say_all(lines):
    figure = figures.plot_server_log(read(*lines))
    figure.draw_without_rendering()
    assert len(figure.axes) == 3


# the command


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments, input=None, **env):
        runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "FORCE_COLOR": None, **env})
        return runner.invoke(main, ["plot", *arguments], input=input, catch_exceptions=False)

    return invoke


def test_plot_writes_everything_into_a_folder(run, tmp_path):
    (tmp_path / "server.log").write_text("\n".join(long_log()))
    result = run("server.log", "-o", "out/deep", "--format", "svg")
    assert result.exit_code == 0, result.output
    names = ["by_position.svg", "by_running.svg", "overview.svg", "summary.json", "tau_over_time.svg", "windows.csv"]
    assert sorted(path.name for path in (tmp_path / "out/deep").iterdir()) == names
    document = json.loads((tmp_path / "out/deep/summary.json").read_text())
    assert document["sources"][0]["windows"] == 206
    assert document["alerts"][0]["kind"] == "loop"
    rows = (tmp_path / "out/deep/windows.csv").read_text().splitlines()
    assert rows[0].startswith("file,source,line,lines,seconds,running,rounds,estimated,accepted,drafted,acceptance,tau")
    assert len(rows) == 207
    assert f"{document['sources'][0]['tau']:.3f}" in result.stdout
    assert "does the text repeat?" in result.stdout.replace("\n", " ")
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if not line.startswith("Written: "))


def test_plot_writes_single_files_and_compares(run, tmp_path):
    (tmp_path / "a.log").write_text(THIRD)
    (tmp_path / "b.log").write_text(LLAMA)
    result = run("a.log", "b.log", "-o", "x.png", "-o", "x.csv", "-o", "x.json")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert {"a.log, vLLM", "b.log, llama.cpp"} <= set(re.findall(r"\w\.log, [\w.]+", result.stdout))


def test_plot_takes_what_does_not_end_like_a_file_for_a_folder(run, tmp_path):
    (tmp_path / "a.log").write_text(LLAMA)
    (tmp_path / "made.png").mkdir()
    result = run("a.log", "-o", "fig_vllm.log/", "-o", "v1.2", "-o", "made.png")
    assert result.exit_code == 0, result.output
    for folder in ("fig_vllm.log", "v1.2", "made.png"):
        assert (tmp_path / folder / "summary.json").is_file()


def test_plot_writes_no_empty_figures(run, tmp_path):
    (tmp_path / "a.log").write_text(LLAMA)
    (tmp_path / "b.log").write_text(LLAMA_OLD)
    result = run("a.log", "-o", "a")
    names = ["by_position.png", "overview.png", "summary.json", "tau_over_time.png", "windows.csv"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    assert "Not drawn: by_running.png, as no line says how many requests ran" in result.stdout
    result = run("b.log", "-o", "b")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["summary.json", "windows.csv"]
    assert "(see --draft-length)" in " ".join(result.stdout.split())


def test_plot_overwrites_no_log(run, tmp_path):
    (tmp_path / "log.csv").write_text(THIRD)
    (tmp_path / "same.json").symlink_to(tmp_path / "log.csv")
    for output in ("log.csv", "same.json", "../" + tmp_path.name + "/log.csv"):
        result = run("log.csv", "-o", "figures", "-o", output)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{output} is an input, and would be overwritten: name another output" in result.stderr
    assert (tmp_path / "log.csv").read_text() == THIRD
    assert not (tmp_path / "figures").exists()


def test_plot_takes_names_as_they_are(run, tmp_path):
    (tmp_path / "[").mkdir()
    (tmp_path / "[/bold].log").write_text(THIRD)
    result = run("[/bold].log", "-o", "[red].png", FORCE_COLOR="1")
    assert result.exit_code == 0, result.output
    assert "[/bold].log: 1 lines, 1 with figures" in result.stdout
    assert (tmp_path / "[red].png").exists()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_plot_takes_names_that_are_no_text(tmp_path, encoding):
    """In another process, whose arguments are bytes."""
    folder = os.fsencode(tmp_path / "fig") + b"\xff"
    with open(os.fsencode(tmp_path / "x") + b"\xff.log", "w") as file:
        file.write(THIRD)
    done = subprocess.run(
        [sys.executable, "-m", "ddtree", "plot", b"x\xff.log", b"x\xff.log", "-o", b"fig\xff", "-o", b"\xff.png"],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict", "COLUMNS": "200"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    shown = "x�.log" if encoding == "utf-8" else "x?.log"
    assert f"{shown}: 1 lines, 1 with figures" in done.stdout.decode()
    assert sorted(os.listdir(folder))[-2:] == [b"tau_over_time.png", b"windows.csv"]
    with open(folder + b"/summary.json", encoding="utf-8") as file:
        assert json.load(file)["files"][0]["name"] == "x�.log"


def test_plot_reads_a_pipe(run):
    result = run("-", input=(THIRD + "\n").encode())
    assert result.exit_code == 0, result.output
    assert "3.030" in result.stdout


def test_plot_of_a_pipe_of_another_process(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "ddtree", "plot", "-"]
    done = subprocess.run(command, input=(LLAMA + "\n").encode(), capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing.log"], "missing.log: No such file"),
        (["empty.log"], "empty.log is empty"),
        (
            ["wide.log"],
            "about speculative decoding; it is UTF-16, and must be UTF-8",
        ),
        (["other.log"], "other.log: no line of 2 is one of vLLM, SGLang or llama.cpp about speculative decoding"),
        (["cut.log"], "speculative decoding, and 1 begin like one but are damaged"),
        (["folder"], "folder is a folder without sweep.json: name the logs in it"),
        (["other.log", "swept"], "inputs must be of one kind, got log and sweep: plot them one after the other"),
        (["swept"], "swept/sweep.json: cells must be a list of rows"),
        (["swept", "-o", "tau.png"], "tau.png must be a folder: the figures of a sweep are several files"),
        (
            ["first.log", "-o", "tau.png"],
            "tau.png: there is nothing to draw, no line says how many tokens a round gave;",
        ),
        (["good.log", "-o", "other.log"], "other.log cannot be written (File exists): choose another"),
        (["good.log", "-o", "good.log/x"], "good.log/x cannot be written (Not a directory): choose another"),
    ],
)
def test_plot_says_in_one_line_what_is_wrong(run, tmp_path, arguments, message):
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "wide.log").write_text(THIRD, "utf-16")
    (tmp_path / "good.log").write_text(THIRD)
    (tmp_path / "first.log").write_text(LLAMA_OLD)
    (tmp_path / "other.log").write_text("one\ntwo\n")
    (tmp_path / "cut.log").write_text(THIRD[:60])
    (tmp_path / "folder").mkdir()
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept/sweep.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
