"""Claims of `docs/dialects.md`: what each difference costs on a real trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.quoted.claim import Claim

DOCUMENT = "docs/dialects.md"
Made = Mapping[str, Any]


def _missed(made: Made, cause: str) -> float:
    """Percentage of the prompt tokens that was missed for a cause."""
    return 100 * made["missed"]["tokens"][cause] / made["totals"]["prompt_tokens"]


def _trace(made: Made) -> dict[str, Any]:
    totals = made["totals"]
    return {"requests": totals["requests"], "average": totals["prompt_tokens"] / totals["requests"]}


def _reserve(vllm: Made, rtp: Made, unreserved: Made) -> dict[str, Any]:
    assert rtp["totals"]["hit_tokens"] == unreserved["totals"]["hit_tokens"]
    return {
        "blocks": vllm["options"]["num_blocks"],
        "rtp_peak": rtp["totals"]["blocks_in_use_peak"],
        "vllm_peak": vllm["totals"]["blocks_in_use_peak"],
        "rtp_put_off": rtp["totals"]["put_off"],
        "vllm_put_off": vllm["totals"]["put_off"],
        "unreserved_put_off": unreserved["totals"]["put_off"],
        "unreserved_peak": unreserved["totals"]["blocks_in_use_peak"],
    }


def _whole_prompts(vllm: Made, rtp: Made) -> dict[str, Any]:
    a, b = vllm["totals"], rtp["totals"]
    return {
        "peak_more": 100 * (b["blocks_in_use_peak"] / a["blocks_in_use_peak"] - 1),
        "rtp_peak": b["blocks_in_use_peak"],
        "vllm_peak": a["blocks_in_use_peak"],
        "blocks": vllm["options"]["num_blocks"],
        "median_more": 100 * (b["blocks_in_use_median"] / a["blocks_in_use_median"] - 1),
        "rtp_median": b["blocks_in_use_median"],
        "vllm_median": a["blocks_in_use_median"],
    }


def _finished(vllm: Made, rtp: Made) -> dict[str, Any]:
    a, b = vllm["totals"], rtp["totals"]
    return {
        "lost": 100 * (1 - b["hit_tokens"] / a["hit_tokens"]),
        "requests": a["requests"],
        "vllm": a["hit_tokens"],
        "vllm_rate": 100 * a["hit_rate"],
        "rtp": b["hit_tokens"],
        "rtp_rate": 100 * b["hit_rate"],
        "unfinished": sum(1 for tokens in rtp["requests"]["not computed yet"] if tokens),
        "twice": b["blocks_not_cached_twice"],
        "rtp_peak": b["blocks_in_use_peak"],
        "vllm_peak": a["blocks_in_use_peak"],
    }


def _order(vllm: Made, front: Made, back: Made) -> dict[str, Any]:
    a, b, c = vllm["totals"], front["totals"], back["totals"]
    return {
        "blocks": vllm["options"]["num_blocks"],
        "front": b["hit_tokens"],
        "front_rate": 100 * b["hit_rate"],
        "back": c["hit_tokens"],
        "back_rate": 100 * c["hit_rate"],
        "cost": 100 * (1 - b["hit_tokens"] / c["hit_tokens"]),
        "vllm": a["hit_tokens"],
        "vllm_rate": 100 * a["hit_rate"],
    }


def _tree(vllm: Made, front: Made, back: Made, tree: Made) -> dict[str, Any]:
    hits = {each["totals"]["hit_tokens"] for each in (front, back, tree)}
    evicted = {each["totals"]["evictions"] for each in (front, back)}
    assert len(hits) == len(evicted) == 1, (hits, evicted)
    return {
        "requests": tree["totals"]["requests"],
        "blocks": int(tree["totals"]["blocks"]) + 1,
        "hits": hits.pop(),
        "vllm": vllm["totals"]["hit_tokens"],
        "tree": tree["totals"]["evictions"],
        "others": evicted.pop(),
    }


def _states(made: Made) -> dict[str, Any]:
    totals = made["totals"]
    return {
        "hits": totals["hit_tokens"],
        "rate": 100 * totals["hit_rate"],
        "median": totals["blocks_in_use_median"],
        "peak": totals["blocks_in_use_peak"],
    }


def _reasons(vllm: Made, every: Made, eighth: Made) -> dict[str, Any]:
    return {
        "every": _missed(every, "evicted"),
        "eighth": _missed(eighth, "evicted"),
        "eighth_kept": _missed(eighth, "not retained"),
        "vllm": _missed(vllm, "evicted"),
        "vllm_kept": _missed(vllm, "not retained"),
    }


def _far(vllm: Made, rtp: Made) -> dict[str, Any]:
    a, b = vllm["totals"], rtp["totals"]
    return {
        "requests": a["requests"],
        "vllm": a["hit_tokens"],
        "vllm_rate": 100 * a["hit_rate"],
        "rtp": b["hit_tokens"],
        "rtp_rate": 100 * b["hit_rate"],
        "more": 100 * (b["blocks_in_use_median"] / a["blocks_in_use_median"] - 1),
        "rtp_median": b["blocks_in_use_median"],
        "vllm_median": a["blocks_in_use_median"],
    }


def _refusals(vllm: Made, rtp: Made) -> dict[str, Any]:
    a, b = vllm["totals"], rtp["totals"]
    assert b["preemptions"] == 0
    assert a["never_fit"] == b["never_fit"] == b["verdicts"]["admission"]["permanent"]
    return {
        "blocks": a["blocks"] + 1,
        "never": a["never_fit"],
        "requests": a["requests"],
        "retryable": b["verdicts"]["admission"]["retryable"],
        "put_off": a["put_off"],
        "preempted": a["preemptions"],
        "rtp": b["hit_tokens"],
        "vllm": a["hit_tokens"],
        "rtp_wait": b["wait_steps_median"],
        "vllm_wait": a["wait_steps_median"],
    }


ROW = " | {hits} | {rate} % | {median} | {peak} |"

CLAIMS = (
    Claim(DOCUMENT, "release), {requests} requests of {average} prompt tokens on average", ("50k vllm",), _trace),
    Claim(
        DOCUMENT,
        "With {blocks} blocks, requests hold {rtp_peak} at most instead of {vllm_peak}, and the head of the queue "
        "is refused in {rtp_put_off} steps instead of {vllm_put_off}; without the reserve in {unreserved_put_off}, "
        "with {unreserved_peak} held and the same hits.",
        ("12k vllm", "12k rtp", "12k rtp unreserved"),
        _reserve,
    ),
    Claim(
        DOCUMENT,
        "whole prompts cost {peak_more} % more blocks at the peak: {rtp_peak} instead of {vllm_peak} of {blocks}, "
        "and {median_more} % in the median, {rtp_median} instead of {vllm_median}.",
        ("50k vllm", "50k rtp"),
        _whole_prompts,
    ),
    Claim(
        DOCUMENT,
        "Where nothing is evicted, {lost} % of the hits: of the first {requests} requests {vllm} tokens are found "
        "under vLLM ({vllm_rate} % of their prompts), {rtp} under RTP-LLM ({rtp_rate} %). Under RTP-LLM "
        "{unfinished} requests miss what another has that has not finished (*not computed yet*), and {twice} "
        "blocks are computed "
        "of which the cache then has another. At the peak {rtp_peak} blocks are in use instead of {vllm_peak}",
        ("all vllm", "all rtp"),
        _finished,
    ),
    Claim(
        DOCUMENT,
        "With {blocks} blocks the same full group finds {front} tokens entered from the front (`rtp-llm/single`, "
        "{front_rate} %) and {back} entered from the back (`rtp-llm/hybrid-pool` with this one group, {back_rate} "
        "%): the order costs {cost} % of the hits. vLLM finds {vllm} ({vllm_rate} %)",
        ("50k vllm", "50k rtp", "50k rtp from the back"),
        _order,
    ),
    Claim(
        DOCUMENT,
        "The prefix tree finds no more: on the first {requests} requests in {blocks} blocks RTP-LLM finds {hits} "
        "tokens in all three ways (vLLM {vllm}), and evicts {tree} blocks instead of {others}",
        ("20k vllm", "20k rtp", "20k rtp from the back", "20k rtp tree"),
        _tree,
    ),
    Claim(
        DOCUMENT,
        "RTP-LLM's cache is spared {twice} blocks of",
        ("50k rtp",),
        lambda made: {"twice": made["totals"]["blocks_not_cached_twice"]},
    ),
    Claim(DOCUMENT, "| vLLM" + ROW, ("states vllm",), _states),
    Claim(DOCUMENT, "| RTP-LLM, a state on every block" + ROW, ("states rtp",), _states),
    Claim(DOCUMENT, "| RTP-LLM, on every eighth" + ROW, ("states rtp 8",), _states),
    Claim(
        DOCUMENT,
        "Of the prompt tokens {every} % were evicted with a state on every block; on every eighth {eighth} %, and "
        "{eighth_kept} % not retained; under vLLM {vllm} % and {vllm_kept} %.",
        ("states vllm", "states rtp", "states rtp 8"),
        _reasons,
    ),
    Claim(
        DOCUMENT,
        "on the first {requests} requests, the distance is what counts: vLLM, whose states lie where the scheduler "
        "ended a step, finds {vllm} tokens ({vllm_rate} %), RTP-LLM with a state on every eighth block {rtp} "
        "({rtp_rate} %), for {more} % more blocks in use: {rtp_median} in the median instead of {vllm_median}.",
        ("all states vllm", "all states rtp 8"),
        _far,
    ),
    Claim(
        DOCUMENT,
        "In a pool of {blocks} blocks, which {never} of the first {requests} requests exceed, both refuse those "
        "{never_again}; {retryable} steps end with a `retryable` request at the head of RTP-LLM's queue, {put_off} "
        "with one put off under vLLM, which preempts {preempted} running requests where RTP-LLM's reserve preempts "
        "none. {rtp} tokens are hit instead of {vllm}, and the median request waits {rtp_wait} steps instead of "
        "{vllm_wait}.",
        ("1500 vllm", "1500 rtp"),
        lambda vllm, rtp: {**_refusals(vllm, rtp), "never_again": vllm["totals"]["never_fit"]},
    ),
)
